"""New rows: the step's rows of q, K and V on their way to the cache, as every operation that handles them describes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvgen.layout.dtypes import DType, dtype
from kvgen.plan.params import Array, Param
from kvgen.schema.cache import Cache
from kvgen.schema.model import Rope
from kvgen.schema.norm import Norm
from kvgen.schema.position_scale import PositionScale

RowsForm = Literal["ragged", "padded", "slots"]


@dataclass(frozen=True)
class NewRows:
    """Which rows are new, where each goes, and what is done to it before it is stored.

    `rows` says how the call names them: "ragged" by `row_offsets[B + 1]`, "padded" by `valid_lengths[B]`, "slots" one by one;
    `index_dtype` is that array's type (None: that of lengths, of slots i64). Rows of the roles `stored` come from the cache and
    go back to it, and the other role is left alone; with `tiled` the kernel has made K's rows itself, one a block or `tiled` of
    them, in k_tile; else the call brings all. `inputs` says in which arrays: q, k and v
    "separate", one of "qkv", a latent row's "parts", or "q" alone, and nothing is stored. In this order, each where it is asked
    for: `bias`, the norms, `rope` (`local`: with the base of local layers), by `angles` that are computed or brought in
    `angles_dtype`, at `positions` of `sections` in their order; with `norm_order` "after", the norms of q and k follow RoPE; then
    the `position_scale` of q, last the Hadamard transform of the roles `hadamard`. Where the kernel `takes_q`, whose heads
    have `q_dim` elements, `q_out` says how it comes back, in `q_out_heads` heads: those
    behind q's are zeros.
    """

    name: str
    rows: RowsForm = "ragged"
    index_dtype: str | None = None
    stored: tuple[str, ...] = ()
    tiled: int = 0
    inputs: Literal["separate", "qkv", "parts", "q"] = "separate"
    bias: bool = False
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    norm_order: Literal["before", "after"] = "before"
    rope: Rope | None = None
    local: bool = False
    angles: Literal["computed", "pairs", "halves"] = "computed"
    angles_dtype: Literal["f32", "same"] = "f32"
    positions: Literal["lengths", "given"] = "lengths"
    sections: tuple[int, ...] = ()
    sections_order: Literal["runs", "interleaved"] = "runs"
    position_scale: PositionScale | None = None
    hadamard: str = ""
    takes_q: bool = False
    q_out: Literal["same", "e4m3", "none"] = "none"
    q_dim: int | None = None
    q_out_heads: int | None = None

    @property
    def q_alone(self) -> bool:
        """Whether q is all there is: nothing is stored."""
        return self.inputs == "q"

    @property
    def takes_positions(self) -> bool:
        """Whether something is done by a row's position."""
        return self.rope is not None or self.position_scale is not None

    def rotary_dim(self, cache: Cache) -> int:
        """Elements of a head of K that RoPE rotates; 0 without RoPE."""
        return 0 if self.rope is None else self.rope.dim or cache.rope_part or cache.head_dim

    def index(self, cache: Cache) -> DType:
        """The type of the array that says where rows go."""
        return dtype(self.index_dtype or ("i64" if self.rows == "slots" else cache.lengths_dtype))

    def after(self, cache: Cache) -> bool:
        """Whether lengths count these rows: the last one is then the request's last token."""
        return cache.lengths == "after"

    def places_param(self, cache: Cache) -> Array:
        """The array that says where rows go."""
        name, shape, doc = {
            "slots": ("slots", "T", "place of each row, or -1 to skip it"),
            "padded": ("valid_lengths", "B", "new rows of each request"),
            "ragged": ("row_offsets", "B+1", "first row of each request"),
        }[self.rows]
        return Array(name, self.index(cache).name, (shape,), untrusted=True, doc=doc, field="index_dtype")

    def search_lanes(self, rows: int, threads: int) -> int:
        """Lanes that search together for the request of a row, where a block of `threads` has so many rows."""
        lanes = 32 if self.rows == "ragged" else 1
        while lanes * rows > threads:
            lanes //= 2
        return lanes


def step_offsets(index: DType) -> Param:
    """The rows of this step's tokens, which a call without new tokens leaves out."""
    doc = "first new row of each request; None: no new tokens"
    return Array("row_offsets", index.name, ("B+1",), optional=True, untrusted=True, doc=doc, field="index_dtype")


def counts_before(cache: Cache) -> bool:
    """Whether this step's tokens come on top of what lengths say."""
    return cache.lengths == "before"
