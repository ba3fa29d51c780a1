"""What happens to a head between the caller's rows and the cache: bias, RMS norm, RoPE; and how lanes share it."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from kvgen.layout.dtypes import dtype
from kvgen.lowering.frequencies import cos_sin_factor, inverse_frequencies
from kvgen.spec.model import Rope
from kvgen.spec.norm import RmsNorm


@dataclass(frozen=True)
class NormContext:
    """An RMS norm as templates see it: over `count` elements, with `weight` a C pointer of type `type`."""

    weight: str
    type: str
    count: int
    eps: str
    offset: str
    cast_before_weight: bool
    whole_row: bool


@dataclass(frozen=True)
class RopeContext:
    """The angles of a row: `pairs` of them, from a table or from `frequencies` (lines of C literals).

    `stored` says where a table has pair `pair`'s cosine and sine, `given` that the caller brings positions, of which
    `section` chooses the row of a pair; `most` is the first position that is too large for f32, "" with a table.
    """

    pairs: int
    table: str
    stored: tuple[str, str]
    frequencies: tuple[str, ...]
    factor: str
    given: bool
    sections: int
    section: str
    most: int

    @property
    def position(self) -> str:
        """The position by which pair `pair` of row `row` of the block is rotated, as C."""
        if not self.given:
            return "cache_slots[row].position"
        return f"load_index(positions, {'section * (uint64_t)num_rows + ' if self.section else ''}first + row)"

    @property
    def position_out_of_range(self) -> str:
        """Whether a row's position has no angle, as C."""
        most = "cos_sin_rows" if self.table else f"{self.most}u"
        if not self.given:
            return f"position >= {most}"
        rows = ["row", *(f"{s} * (uint64_t)num_rows + row" for s in range(1, self.sections))]
        return " || ".join(f"load_index(positions, {row}) >= {most}" for row in rows)


@dataclass(frozen=True)
class PartContext:
    """Dims [begin, begin + dim) of every head of a role: a HeadLayout, what is done to them, and where they go.

    `rows` is the C function that finds a row of the caller's, `row` the elements that a head has in it, of which the part's
    begin at `begin`. `sink` is a file of templates/heads/: "cache", elements of `struct` from `at` on; "tile", shared
    memory, `tile_row` elements a head, from `tile_at` on; "out", elements of type `struct` in q_out. `stored`: they come
    from the cache, where they go back to.
    """

    title: str
    role: str
    walk: str
    rows: str
    row: int
    heads: int
    begin: int
    dim: int
    rotary_dim: int
    rotary_begin: int
    neox: bool
    width: int
    lanes: int
    bias: str
    norm: NormContext | None
    sink: str
    struct: str
    head: str = ""
    pointer: str = ""
    at: int = 0
    tile_row: int = 0
    tile_at: int = 0
    divisor: str = ""
    stored: bool = False

    @property
    def mask(self) -> str:
        """The lanes of a head, the first at 0, as C."""
        return f"{(1 << self.lanes) - 1:#x}u"

    @property
    def uses_slot(self) -> bool:
        """Whether its lanes ask where the row goes."""
        return self.sink != "tile" or self.rotary_dim > 0 or self.stored

    @property
    def tile_width(self) -> int:
        """Elements of the widest access to shared memory."""
        return min(self.width, 4)


@dataclass(frozen=True)
class InputContext:
    """A C function that finds row `row` of the block in the caller's memory."""

    name: str
    pointer: str


@dataclass(frozen=True)
class TileContext:
    """Rows of K or V that wait in shared memory, `stride` floats apart."""

    role: str
    stride: int


def width_of(element: str, *sizes: int) -> int:
    """Elements of the widest access that all these sizes are whole numbers of."""
    return math.gcd(16 // dtype(element).bytes, *sizes)


def lanes_of(dim: int, width: int) -> int:
    """Lanes that share a head: a pair of vectors each, a warp at most."""
    pairs = -(-dim // (2 * width))
    return min(32, 1 << (pairs - 1).bit_length())


def literal(x: float) -> str:
    """An f32 as C, in the fewest digits that name it."""
    single = struct.Struct("<f")
    wanted = single.pack(x)
    rounded = single.unpack(wanted)[0]
    text = next(t for n in range(1, 18) if single.pack(float(t := f"{rounded:.{n}g}")) == wanted)
    return f"{text}f" if any(c in text for c in ".e") else f"{text}.0f"


def _lines(numbers: tuple[float, ...]) -> tuple[str, ...]:
    """f32 literals, eight a line."""
    found = [literal(x) for x in numbers]
    return tuple(", ".join(found[i : i + 8]) for i in range(0, len(found), 8))


def norm_context(norm: RmsNorm, weight: str, element: str, dim: int, heads: int) -> NormContext:
    """A norm over heads of `dim` elements, of which a row has `heads`."""
    row = norm.over == "row"
    return NormContext(
        weight=weight,
        type=dtype("f32" if norm.weight_dtype == "f32" else element).c,
        count=heads * dim if row else norm.dim or dim,
        eps=literal(norm.eps),
        offset=literal(norm.weight_offset),
        cast_before_weight=norm.multiply == "after",
        whole_row=row,
    )


def _section(sections: tuple[int, ...]) -> str:
    """The row of positions of pair `pair`, as C."""
    ends = [sum(sections[: i + 1]) for i in range(len(sections))]
    return "".join(f"pair < {end}u ? {i}u : " for i, end in enumerate(ends[:-1])) + f"{len(sections) - 1}u"


def rope_context(
    rope: Rope, dims: int, *, local: bool, table: str, form: str, given: bool, sections: tuple[int, ...]
) -> RopeContext:
    """The angles of `dims` rotated elements; `form` says how a table of element type `table` is stored."""
    half = dims // 2
    stored = ("pair", f"pair + {half}u") if form == "halves" else ("2 * pair", "2 * pair + 1")
    return RopeContext(
        pairs=half,
        table=table,
        stored=stored,
        frequencies=() if table else _lines(inverse_frequencies(rope, dims, local=local)),
        factor="" if table or cos_sin_factor(rope, local=local) == 1.0 else literal(cos_sin_factor(rope, local=local)),
        given=given,
        sections=max(1, len(sections)),
        section=_section(sections) if len(sections) > 1 else "",
        most=0 if table else 2**24,
    )
