"""What every cache variant says: its dtype, heads, layout, lengths and quantization."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from kvgen.layout.axes import parse_axes
from kvgen.layout.dtypes import FloatName
from kvgen.schema.any_cache import AnyCache
from kvgen.schema.base import Spec
from kvgen.schema.quant import Quant
from kvgen.schema.tables import IndexName, Offsets, Table

HeadDim = Annotated[int, Field(ge=1, le=1024)]


class Layout(Spec):
    """The axes of the pool's tensors, slowest first, among page (block), kv, layer, token, head and dim.

    Give either `kv`, one tensor for K and V, or `k` and `v`, a tensor each. Strides of page, kv and layer are read from the
    tensors at run time; token, head and dim are packed as the text says.
    """

    kv: str | None = None
    """Axes of one tensor that holds K and V, slowest first, as in "page kv layer token head dim". Without a `kv` axis,
    K and V have page ids of their own (table=PerKV()), or the cache stores K only. None: K and V have a tensor each.
    """
    k: str | None = None
    """Axes of K's tensor, slowest first. An axis may be split: "page head dim/8 token dim%8". None: `kv` has K."""
    v: str | None = None
    """Axes of V's tensor, slowest first. None: there is no V (stores="k")."""
    rope: str | None = None
    """Axes of a tensor for the RoPE part of latent rows. None: the RoPE part lies behind the latent part, in K's
    tensor.
    """
    scales: str | None = None
    """Axes of the tensors of scales, where `dim` counts groups of dims. None: the axes of the values, without a split
    of dim.
    """
    v_scales: str | None = None
    """Axes of V's tensor of scales, which V then has for itself. None: as `scales`."""
    layers: Literal["axis", "pointers"] = "axis"
    """"axis": the tensors have a `layer` axis. "pointers": every layer has tensors of its own, a call brings a list of
    them, and the axes have no `layer` (vLLM, SGLang).
    """
    page_align: int | None = Field(default=None, ge=1, le=2**20)
    """Bytes of which the distance from a page to the next is a multiple, in every tensor of values. None: any that holds
    a page.
    """
    row_align: int = Field(default=1, ge=1, le=4096)
    """Rows that have their scales (place="row") begin at multiples of so many bytes, padded at their end. 1: no padding."""
    swizzle: tuple[int, int, int] | None = None
    """(bits, base, shift): permutes the elements inside a page, offset ^= ((offset >> shift) & (2^bits - 1)) << base.
    None: elements lie as the axes say.
    """

    @model_validator(mode="after")
    def _complete(self) -> Layout:
        if (self.kv is None) == (self.k is None):
            raise ValueError("layout: give either kv='...' (one tensor) or k='...' (with v='...' unless stores='k')")
        if self.kv is not None and self.v is not None:
            raise ValueError("layout: v stands beside kv; one tensor holds both, or k and v have one each")
        for text in filter(None, (self.kv, self.k, self.v, self.rope, self.scales, self.v_scales)):
            names = [a.name for a in parse_axes(text)]
            if ("layer" in names) == (self.layers == "pointers"):
                raise ValueError(
                    f"layout: {text!r} has {'a' if 'layer' in names else 'no'} layer axis, but layers={self.layers!r}; "
                    "layers='axis' needs one, layers='pointers' (a tensor per layer) must not have one"
                )
            if self.kv is None and "kv" in names:
                raise ValueError(f"layout: {text!r} has a kv axis, but K and V have a tensor each; drop the axis")
        return self


DEFAULT_LAYOUT = "page kv layer token head dim"


class CacheFields(AnyCache):
    """Fields that every cache has, and what follows from them alone."""

    dtype: FloatName
    """Element type that operations take and give: "f32", "f16" or "bf16". Without `quant` also the type that is stored.
    """
    kv_heads: int = Field(ge=1, le=4096)
    """KV heads of a layer on this device: after tensor parallelism, not the model's."""
    head_dim: HeadDim
    """Elements of a head's K row."""
    v_head_dim: HeadDim | None = None
    """Elements of a head's V row. None: `head_dim`."""
    layout: Layout = Field(default=Layout(kv=DEFAULT_LAYOUT), validate_default=True)
    """Axes of the pool's tensors; a string is Layout(kv=string)."""
    lengths: Literal["before", "after"] = "before"
    """What `lengths[b]` counts: "before", the tokens stored before this step (Modular MAX); "after", those and this
    step's new ones (vLLM, FlashInfer).
    """
    lengths_dtype: IndexName = "i32"
    """Element type of `lengths`, and of the index arrays of operations that state no type of their own."""
    total_pages: int | None = Field(default=None, ge=1, le=2**31)
    """Pages that a tensor has room for; a tensor may show fewer. Needed where page lies inside token, head or dim, whose
    strides then depend on it. None: read from the tensors.
    """
    total_layers: int | None = Field(default=None, ge=1, le=4096)
    """Layers that a tensor has room for; a tensor may show fewer. Needed where layer lies inside token, head or dim.
    None: read from the tensors.
    """
    stores: Literal["kv", "k"] = "kv"
    """"kv": a token has K and V. "k": a token has one row, K (latent rows, indexers)."""
    quant: Quant | None = None
    """How K and V are stored in fewer bits. None: in `dtype`."""
    k_quant: Quant | None = None
    """How K is stored, where K and V differ; not beside `quant`. None: as `quant` says."""
    v_quant: Quant | None = None
    """How V is stored, where K and V differ; not beside `quant`. None: as `quant` says."""

    @field_validator("layout", mode="before")
    @classmethod
    def _layout_text(cls, value: Any) -> Any:
        return Layout(kv=value) if isinstance(value, str) else value

    @property
    def page_table(self) -> Table | Offsets:
        """The form of the page table."""
        raise NotImplementedError

    @property
    def layers(self) -> Literal["axis", "pointers"]:
        return self.layout.layers

    @property
    def index_type(self) -> IndexName:
        return self.lengths_dtype

    @property
    def token_extent(self) -> int | None:
        """How many places the token axis of the tensors has room for; None where only they know."""
        return self.page_tokens

    @property
    def token_step(self) -> int:
        """Elements from a token to the next one where rows lie in wider ones; 0 where they are side by side."""
        return 0

    @property
    def v_dim(self) -> int:
        """Head dim of V."""
        return self.v_head_dim or self.head_dim

    @property
    def outer_extents(self) -> tuple[tuple[str, int | None], ...]:
        """Pages and layers that tensors have room for, as far as the spec says."""
        return (("page", self.total_pages), ("layer", self.total_layers))

    @property
    def roles(self) -> tuple[Literal["k", "v"], ...]:
        """What a token has: K and V, or K only."""
        return ("k",) if self.stores == "k" else ("k", "v")

    @property
    def quants(self) -> dict[str, Quant | None]:
        """How each role is quantized; None: stored in `dtype`."""
        found: dict[str, Quant | None] = {"k": self.k_quant or self.quant}
        if self.stores == "kv":
            found["v"] = self.v_quant or self.quant
        return found

    @property
    def scales_together(self) -> bool:
        """Whether the scales of K and V share a tensor: they do where the values do and are quantized alike."""
        alike = len(set(self.quants.values())) == 1 and self.quants["k"] is not None
        return alike and self.layout.kv is not None and self.layout.v_scales is None

    @property
    def rope_part(self) -> int:
        """Dims of a K row that are its RoPE part, the last ones; 0 where a row has no such part."""
        return 0

    @property
    def latent_part(self) -> int:
        """Dims of a K row that attention reads as V, the first ones; 0 where rows are not latent."""
        return 0

    @property
    def plain_dims(self) -> int:
        """Dims of a K row, the last ones, that quantization leaves in `dtype`."""
        return 0

    @property
    def byte_rows(self) -> bool:
        """Whether a token's row mixes element types, so that the pool is one of bytes."""
        return False

    @property
    def scaled_rows(self) -> bool:
        """Whether what a token's head has is codes and then their scales, so that the pool is one of bytes."""
        return not self.plain_dims and any(
            q is not None and q.computed and q.place == "row" for q in self.quants.values()
        )

    @property
    def joint_rows(self) -> bool:
        """Whether such a row is K's bytes and then V's: the layout has kv right before dim."""
        text = self.layout.kv or ""
        return self.scaled_rows and self.stores == "kv" and text.split()[-2:] == ["kv", "dim"]
