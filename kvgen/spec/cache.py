"""Cache variants: what is stored, in which order, found through which table."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from kvgen.dtypes import FloatName, dtype
from kvgen.layout import Region, Swizzle, parse_axes
from kvgen.spec.base import Spec
from kvgen.spec.table import CSR, Dense, IndexName, Indirect, PerKV, Ring, Table

HeadDim = Annotated[int, Field(ge=1, le=1024)]


class Block(Spec):
    """Which elements share a scale: extents along token, head and dim; None means the whole axis."""

    token: int | None = Field(default=1, ge=1)
    head: int | None = Field(default=1, ge=1)
    dim: int | None = Field(default=None, ge=1)


class Layout(Spec):
    """The axes of the pool's tensors, slowest first.

    Either `kv`, one tensor for both (with a `kv` axis, or without one where a per-K/V table tells the pages apart), or
    `k` and `v`, a tensor each. `layers="pointers"` says that every layer has tensors of its own, as in vLLM and SGLang;
    the axes then have no `layer`. `swizzle` permutes the elements inside a page.
    """

    kv: str | None = None
    k: str | None = None
    v: str | None = None
    layers: Literal["axis", "pointers"] = "axis"
    swizzle: tuple[int, int, int] | None = None

    @model_validator(mode="after")
    def _complete(self) -> Layout:
        if (self.kv is None) == (self.k is None):
            raise ValueError("layout: give either kv='...' (one tensor) or k='...' (with v='...' unless stores='k')")
        if self.kv is not None and self.v is not None:
            raise ValueError("layout: v stands beside kv; one tensor holds both, or k and v have one each")
        for text in filter(None, (self.kv, self.k, self.v)):
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


class Cache(Spec):
    """Fields every variant has.

    `lengths` says what the lengths tensor counts: the tokens "before" this step (MAX) or "after" it (vLLM, FlashInfer),
    the step's new tokens included. `stores="k"` keeps one row a token and no V (latent rows).
    """

    dtype: FloatName
    kv_heads: int = Field(ge=1, le=4096)
    head_dim: HeadDim
    v_head_dim: HeadDim | None = None
    layout: Layout = Field(default=Layout(kv=DEFAULT_LAYOUT), validate_default=True)
    lengths: Literal["before", "after"] = "before"
    lengths_dtype: IndexName = "u32"
    stores: Literal["kv", "k"] = "kv"

    @field_validator("layout", mode="before")
    @classmethod
    def _layout_text(cls, value: Any) -> Any:
        return Layout(kv=value) if isinstance(value, str) else value

    @property
    def page_tokens(self) -> int | None:
        """Tokens a page holds; None where only the pool knows."""
        raise NotImplementedError

    @property
    def page_table(self) -> Table:
        """The form of the page table."""
        raise NotImplementedError

    @property
    def v_dim(self) -> int:
        """Head dim of V."""
        return self.v_head_dim or self.head_dim

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """The tensors: (kv,), (k, v) or (k,)."""
        swizzle = Swizzle(*self.layout.swizzle) if self.layout.swizzle else None

        def region(role: Literal["k", "v", "kv"], text: str, dim: int) -> Region:
            extents = (
                ("kv", 1 if self.stores == "k" else 2),
                ("token", self.page_tokens),
                ("head", self.kv_heads),
                ("dim", dim),
            )
            return Region(role, dtype(self.dtype), parse_axes(text), extents, swizzle=swizzle)

        if self.layout.kv is not None:
            return (region("k" if self.stores == "k" else "kv", self.layout.kv, self.head_dim),)
        assert self.layout.k is not None
        keys = region("k", self.layout.k, self.head_dim)
        if self.layout.v is None:
            return (keys,)
        return (keys, region("v", self.layout.v, self.v_dim))

    @model_validator(mode="after")
    def _consistent(self) -> Cache:
        if self.stores == "k":
            if self.layout.v is not None or self.v_head_dim is not None:
                raise ValueError("stores: got 'k' beside a V layout or v_head_dim; a cache without V has neither")
        elif self.layout.kv is None and self.layout.v is None:
            raise ValueError("layout: k stands without v; give v='...', or stores='k' for a cache without V")
        if self.layout.kv is not None and self.v_dim != self.head_dim:
            raise ValueError(
                f"v_head_dim: got {self.v_dim} beside head_dim {self.head_dim} in one tensor; give K and V a layout each"
            )
        if self.stores == "kv" and self.layout.kv is not None:
            has_axis = any(a.name == "kv" for a in parse_axes(self.layout.kv))
            if has_axis == isinstance(self.page_table, PerKV):
                raise ValueError(
                    f"layout: {self.layout.kv!r} has {'a' if has_axis else 'no'} kv axis; one tensor tells K from V by a kv "
                    "axis, or by page ids of their own with table=PerKV()"
                )
        if self.stores == "k" and isinstance(self.page_table, PerKV):
            raise ValueError("table: got PerKV for a cache without V; use Dense, CSR, Indirect or Ring")
        _ = self.regions
        return self


class Paged(Cache):
    """Pages of `page_size` tokens, found through `table` (MAX's PagedKVCache and every paged engine)."""

    page_size: int = Field(ge=1, le=2**20)
    table: Table = Field(default=Dense(), validate_default=True, discriminator="kind")

    @property
    def page_tokens(self) -> int | None:
        return self.page_size

    @property
    def page_table(self) -> Table:
        return self.table

    @model_validator(mode="after")
    def _table_fits(self) -> Paged:
        if isinstance(self.table, Indirect) and self.page_size != 1:
            raise ValueError(
                f"page_size: got {self.page_size} with table=Indirect(), whose entries are token slots; use 1"
            )
        if isinstance(self.table, CSR) and self.table.last_page_len and self.lengths == "before":
            raise ValueError(
                "lengths: got 'before' with CSR(last_page_len=True), which counts this step's tokens; use 'after'"
            )
        return self


class Continuous(Cache):
    """A block per request, found through `lookup_table[batch]` (MAX's ContinuousBatchingKVCache).

    `max_tokens` is the block's token capacity; None leaves it to the pool, where the layout allows (token outside
    head and dim).
    """

    layout: Layout = Field(default=Layout(kv="block kv layer token head dim"), validate_default=True)
    max_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    table_dtype: IndexName = "u32"

    @property
    def page_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def page_table(self) -> Table:
        return Dense(dtype=self.table_dtype)


CacheSpec = Paged | Continuous

__all__ = ["Block", "CacheSpec", "Continuous", "Layout", "Paged", "Ring"]
