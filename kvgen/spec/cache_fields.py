"""What every cache variant says: its dtype, heads, layout, lengths and quantization."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from kvgen.layout.axes import parse_axes
from kvgen.layout.dtypes import FloatName
from kvgen.spec.base import Spec
from kvgen.spec.quant import Quant
from kvgen.spec.tables import IndexName, Offsets, Table

HeadDim = Annotated[int, Field(ge=1, le=1024)]


class Layout(Spec):
    """The axes of the pool's tensors, slowest first.

    Either `kv`, one tensor for both (with a `kv` axis, or without one where a per-K/V table tells the pages apart), or
    `k` and `v`, a tensor each; `rope` puts the RoPE part of latent rows in a tensor of its own (FlashInfer). `scales` are
    the axes of tensors of scales, by default those of the values without dim's split; `v_scales` are V's where they
    differ (TensorRT-LLM), and give V's scales a tensor of their own. `layers="pointers"` says that every layer has tensors
    of its own, as in vLLM and SGLang; the axes then have no `layer`. `swizzle` permutes the elements inside a page.
    """

    kv: str | None = None
    k: str | None = None
    v: str | None = None
    rope: str | None = None
    scales: str | None = None
    v_scales: str | None = None
    layers: Literal["axis", "pointers"] = "axis"
    swizzle: tuple[int, int, int] | None = None

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


class CacheFields(Spec):
    """Fields every variant has, and what follows from them alone.

    `dtype` is what operations take and give; `quant` says how values are stored, `k_quant` and `v_quant` where K and V
    differ. `lengths` says what the lengths tensor counts: the tokens "before" this step (MAX) or "after" it (vLLM,
    FlashInfer), the step's new tokens included. `stores="k"` keeps one row a token and no V.
    """

    dtype: FloatName
    kv_heads: int = Field(ge=1, le=4096)
    head_dim: HeadDim
    v_head_dim: HeadDim | None = None
    layout: Layout = Field(default=Layout(kv=DEFAULT_LAYOUT), validate_default=True)
    lengths: Literal["before", "after"] = "before"
    lengths_dtype: IndexName = "u32"
    stores: Literal["kv", "k"] = "kv"
    quant: Quant | None = None
    k_quant: Quant | None = None
    v_quant: Quant | None = None

    @field_validator("layout", mode="before")
    @classmethod
    def _layout_text(cls, value: Any) -> Any:
        return Layout(kv=value) if isinstance(value, str) else value

    @property
    def page_tokens(self) -> int | None:
        """Tokens a page holds; None where only the pool knows."""
        raise NotImplementedError

    @property
    def page_table(self) -> Table | Offsets:
        """The form of the page table."""
        raise NotImplementedError

    @property
    def ragged(self) -> bool:
        """Whether requests lie one after another, without pages."""
        return False

    @property
    def token_extent(self) -> int | None:
        """How many places the token axis of the tensors has room for; None where only they know."""
        return self.page_tokens

    @property
    def v_dim(self) -> int:
        """Head dim of V."""
        return self.v_head_dim or self.head_dim

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
