"""Cache variants: what is stored, in which order, found through which table."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final, Literal

from pydantic import Field, model_validator

from kvgen.layout.axes import INNER, parse_axes
from kvgen.layout.dtypes import dtype as element
from kvgen.layout.regions import Region
from kvgen.layout.storage import Storage
from kvgen.schema.build_storage import storage_of
from kvgen.schema.cache_fields import CacheFields, HeadDim, Layout
from kvgen.schema.layout_rules import check_layout
from kvgen.schema.quant import NORMS, Block, Quant
from kvgen.schema.tables import Dense, IndexName, Ring, Table

# Elements of a block whose norm readers correct: squares of 22 bits add up in 32.
_MOST_CORRECTED: Final = 1023


class Cache(CacheFields):
    """A cache: its fields, held against each other, and the memory that follows from them."""

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions of values, one a tensor: (K and V,), (K, V), (K,) ..."""
        found = {self.storage.base(s.base).tensor: s.region for s in reversed(self.storage.segments)}
        return tuple(found[t.name] for t in self.storage.tensors if t.name in found)

    @cached_property
    def storage(self) -> Storage:
        """The tensors, page pointers and segments; operations read the cache through nothing else."""
        return storage_of(self)

    @model_validator(mode="after")
    def _consistent(self) -> Cache:
        if self.stores == "k":
            if self.layout.v is not None or self.v_head_dim is not None:
                raise ValueError("stores: got 'k' beside a V layout or v_head_dim; a cache without V has neither")
        elif self.layout.kv is None and self.layout.v is None:
            raise ValueError("layout: k stands without v; give v='...', or stores='k' for a cache without V")
        if self.layout.kv is not None and self.v_dim != self.head_dim and not self.joint_rows:
            raise ValueError(
                f"v_head_dim: got {self.v_dim} beside head_dim {self.head_dim} in one tensor; give K and V a layout each"
            )
        if self.stores == "kv" and self.layout.kv is not None:
            has_axis = any(a.name == "kv" for a in parse_axes(self.layout.kv))
            if has_axis == self.page_table.separate_kv:
                raise ValueError(
                    f"layout: {self.layout.kv!r} has {'a' if has_axis else 'no'} kv axis; one tensor tells K from V by a kv "
                    "axis, or by page ids of their own with table=PerKV()"
                )
        if self.stores == "k" and self.page_table.separate_kv:
            raise ValueError(
                f"table: got {type(self.page_table).__name__} for a cache without V; use Dense, CSR, Indirect, Mapped or Ring"
            )
        self._check_quant()
        check_layout(self)
        _ = self.storage
        return self

    def _check_quant(self) -> None:
        """What quantization asks of the cache around it."""
        for name, given in (("k_quant", self.k_quant), ("v_quant", self.v_quant)):
            if given is not None and self.quant is not None:
                raise ValueError(
                    f"{name}: got a value beside quant, which is for both; give quant, or k_quant and v_quant"
                )
        if self.v_quant is not None and self.stores == "k":
            raise ValueError("v_quant: got a value for a cache that stores K only; use quant")
        for role, quant in self.quants.items():
            if quant is not None:
                self._check_one(role, quant)
        quants = [q for q in self.quants.values() if q is not None]
        places = {q.place for q in quants if q.computed}
        if self.scaled_rows:
            return self._check_rows(places)
        widths = {(q.codes.bits if q else element(self.dtype).bits) for q in self.quants.values()}
        if self.layout.kv is not None and len(widths) > 1:
            k, v = (q.codes.name if q else self.dtype for q in self.quants.values())
            raise ValueError(
                f"{self._quant_field()}: got K as {k} and V as {v} in one tensor, whose elements have one width; give them "
                "one each with Layout(k='...', v='...')"
            )
        kinds = {(q.codes.name if q else self.dtype) for q in self.quants.values()}
        if self.layout.kv is not None and len(kinds) > 1 and not all(element(k).bits == 8 for k in kinds):
            raise ValueError(
                f"{self._quant_field()}: K and V share a tensor as {' and '.join(sorted(kinds))}; give them one each with "
                "Layout(k='...', v='...')"
            )
        if "page" in places:
            self._check_page_bytes(places)

    def _check_rows(self, places: set[Literal["pool", "page", "row"]]) -> None:
        """What scales in rows ask: those of K and of V lie in rows, and rows are whole."""
        if places != {"row"}:
            raise ValueError(
                f"{self._quant_field()}: got scales in {' and '.join(sorted(places))}; where rows have their scales, those of K "
                "and V both lie there; give both place='row'"
            )
        if self.layout.swizzle is not None:
            raise ValueError(
                f"layout: got swizzle={self.layout.swizzle} with place='row', rows of bytes whose elements differ in size; "
                "leave it out"
            )

    def _quant_field(self, role: str = "") -> str:
        """The field that says how a role is quantized, or the first that says how any is."""
        role = role or ("k" if self.k_quant is not None else "v")
        return "quant" if self.quant is not None else f"{role}_quant"

    def _check_pad(self, field: str, quant: Quant, whole: int) -> None:
        """Zeros behind a token's scales are behind one head's: a whole number of scales, at least as many as there are."""
        assert quant.scale_dtype is not None
        size = element(quant.scale_dtype).bytes
        least = -(-whole // (quant.block.dim or whole)) * (1 + quant.zero) * size
        pad = quant.scale_pad or least
        if self.kv_heads != 1 or pad < least or pad % size:
            raise ValueError(
                f"{field}: got scale_pad={quant.scale_pad} with kv_heads={self.kv_heads} and {least} bytes of "
                f"{quant.scale_dtype} scales a token; zeros follow one head's scales as whole {quant.scale_dtype} elements: "
                f"kv_heads=1, and a multiple of {size} from {least} on"
            )

    def _check_one(self, role: str, quant: Quant) -> None:
        heads, dims, field = quant.block.head, quant.block.dim, self._quant_field(role)
        whole = self.v_dim if role == "v" else self.head_dim - self.plain_dims
        if quant.strided and self.latent_part:
            raise ValueError(
                f"{field}: got packing='strided' for latent rows; it is for the keys and values of heads; use 'neighbours'"
            )
        if quant.place == "row" and self.plain_dims and not self.byte_rows:
            raise ValueError(
                f"{field}: got place='row' with layout.rope={self.layout.rope!r}; scales lie between the latent and the RoPE "
                "part of one row; leave layout.rope out, or use 'pool'"
            )
        if quant.scale_dtype is None:
            return
        if quant.scale_pad is not None:
            self._check_pad(field, quant, whole)
        if heads is not None and self.kv_heads % heads:
            raise ValueError(
                f"{field}: got block.head={heads} with kv_heads={self.kv_heads}; blocks of heads divide them"
            )
        if dims is not None and dims > whole:
            raise ValueError(
                f"{field}: got block.dim={dims} for rows of {whole}; a block lies within a row's quantized dims"
            )
        if (heads or self.kv_heads) != 1 and dims is not None and dims < whole:
            raise ValueError(
                f"{field}: got block.head={heads} and block.dim={dims}; a block is part of one head, or whole rows of several"
            )
        if quant.recipe in NORMS and dims is not None and whole % dims:
            raise ValueError(
                f"{field}: got block.dim={dims} with recipe={quant.recipe!r} for rows of {whole}; norms are of whole blocks; use "
                "one of its divisors"
            )
        block = (heads or self.kv_heads) * (dims or whole)
        if quant.norm_correction and block > _MOST_CORRECTED:
            raise ValueError(
                f"{field}: got norm_correction=True with blocks of {block} elements; readers add up the squares of "
                f"{_MOST_CORRECTED} at most; use block=Block(), a norm a token and head, or recipe='unit'"
            )
        if quant.own_table and not self.page_table.second_table:
            raise ValueError(
                f"{field}: got own_table=True with table={type(self.page_table).__name__}(); only Dense() may have a "
                "second page table, for scales; use table=Dense(), or own_table=False"
            )
        if quant.residual is not None and role == "v":
            raise ValueError(
                f"v_quant: got residual={quant.residual}; V is quantized per token; give residual to K only, with k_quant"
            )
        if quant.residual is not None and (self.page_tokens is None or self.page_tokens % quant.residual):
            raise ValueError(
                f"{field}: got residual={quant.residual} with pages of {self.page_tokens} tokens; a sealed group lies in one "
                "page, so the page size must be a multiple of residual; use one of its divisors"
            )
        if quant.order == "swizzled":
            groups = -(-whole // (dims or whole))
            if self.page_tokens is None or self.page_tokens % 128 or groups % 4 or quant.block.token != 1 or heads != 1:
                raise ValueError(
                    f"{field}: got order='swizzled' with pages of {self.page_tokens} tokens and {groups} scales a row; tiles "
                    "are 128 tokens x 4 scales: page_size a multiple of 128, scales a row of 4, per token and head"
                )

    def _check_page_bytes(self, places: set[Literal["pool", "page", "row"]]) -> None:
        names = [a.name for a in parse_axes(self.layout.kv or "page")]
        if len(places) > 1 or self.layout.kv is None or self.page_tokens is None or self.page_table.separate_kv:
            raise ValueError(
                f"{self._quant_field()}: got place='page' with table={type(self.page_table).__name__}(), pages of "
                f"{self.page_tokens} tokens and scales in {' and '.join(sorted(places))}; a page of bytes is the values, then "
                "the scales, of both: one tensor (layout kv='...'), a known page size, one page id for K and V, the same place"
            )
        inner = [n for n in names if n in INNER]
        if names[len(names) - len(inner) :] != inner or self.layout.swizzle:
            raise ValueError(
                f"layout: got {self.layout.kv!r} with place='page'; token, head and dim come last, so that a page's bytes "
                "are neighbours, and nothing is swizzled"
            )


class Paged(Cache):
    """Pages of `page_size` tokens, found through `table` (MAX's PagedKVCache and every paged engine)."""

    page_size: int = Field(ge=1, le=2**20)
    """Tokens of a page. Where an entry of the cache stands for several (`rate`), entries of a page."""
    rate: int = Field(default=1, ge=1, le=2**16)
    """Tokens that an entry of the cache stands for: r > 1 for compressed caches (DeepSeek V4: 4 and 128). Lengths and new rows
    count tokens. Entry j stands for tokens [j * r, j * r + r): the row of its last token is stored, at RoPE position j * r, and
    the other rows are skipped as padding is. A query at position p sees entries j < (p + 1) // r. A page is `page_size` entries:
    an engine's blocks of n tokens are pages of n // r, found through the same page table.
    """
    table: Table = Field(default=Dense(), validate_default=True, discriminator="kind")
    """Form of the page table: Dense(), CSR(), PerKV(), Indirect(), Mapped() or Ring(window=...)."""

    @property
    def page_tokens(self) -> int | None:
        return self.page_size

    @property
    def entry_tokens(self) -> int:
        return self.rate

    @property
    def page_table(self) -> Table:
        return self.table

    @model_validator(mode="after")
    def _table_fits(self) -> Paged:
        if self.table.token_slots and self.page_size != 1:
            raise ValueError(
                f"page_size: got {self.page_size} with table={type(self.table).__name__}(), whose entries are token slots; use 1"
            )
        if self.table.counts_tokens and self.lengths == "before":
            raise ValueError(
                "lengths: got 'before' with CSR(last_page_len=True), which counts this step's tokens; use 'after'"
            )
        if self.rate > 1:
            self._check_rate()
        return self

    def _check_rate(self) -> None:
        """What entries that stand for several tokens ask of the cache around them."""
        form = type(self.table).__name__
        if self.table.token_slots or self.table.drops_tokens:
            why = "whose entries are slots of tokens" if self.table.token_slots else "which drops tokens"
            raise ValueError(
                f"rate: got {self.rate} with table={form}(), {why}; an entry of the cache stands for several tokens, all of "
                "which stay; use Dense(), CSR(), PerKV() or Mapped()"
            )
        if self.table.counts_tokens:
            raise ValueError(
                f"rate: got {self.rate} with CSR(last_page_len=True), which counts the entries of pages and no tokens; use "
                "CSR() with lengths"
            )
        if self.storage.residual:
            raise ValueError(
                f"rate: got {self.rate} with residual={self.storage.residual}; an entry is a token's row alone, and no group "
                "waits to be quantized; leave one out"
            )


class Continuous(Cache):
    """A block of tokens per request, found through `lookup_table[B]` (MAX's ContinuousBatchingKVCache)."""

    layout: Layout = Field(default=Layout(kv="block kv layer token head dim"), validate_default=True)
    """Axes of the pool's tensors; `block` stands where a paged layout has `page`."""
    max_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    """Tokens that a block has room for. None: read from the pool at run time, which the layout must allow (token
    outside of head and dim).
    """
    table_dtype: IndexName = "i32"
    """Element type of `lookup_table[B]`, the block of each request."""

    @property
    def page_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def page_table(self) -> Table:
        return Dense(dtype=self.table_dtype)


class Latent(Paged):
    """Latent rows (MLA): `latent_dim` shared dims, then `rope_dim` RoPE dims; one head, one tensor, V is not stored.

    Without `quant`, rows of 576 in `dtype`. With `quant`, the latent part is stored as codes and the RoPE part stays in
    `dtype` behind it, in rows of bytes: 512 fp8 + 64 bf16 = 640 bytes. With `place="row"` the scales lie between the two
    (DeepSeek's 656-byte rows: 512 fp8 | 4 f32 | 64 bf16), with `place="page"` behind all rows of their page (DeepSeek V4's
    584 bytes: rows of 448 fp8 | 64 bf16, then 7 e8m0 and a zero a token). With `quant_rope` a row is codes, and with
    `place="row"` their scales behind them.
    """

    kv_heads: Literal[1] = 1
    """1: a latent row serves all query heads."""
    latent_dim: int = Field(default=512, ge=1, le=1024)
    """Elements of a row's latent part, which attention reads as K and as V."""
    rope_dim: int = Field(default=64, ge=0, le=1024)
    """Elements of a row's RoPE part, behind the latent part. 0: none."""
    head_dim: HeadDim = 0
    """Elements of a row: latent_dim + rope_dim. 0, the default, works it out."""
    stores: Literal["k"] = "k"
    """"k": V is a part of the row and not stored."""
    quant_rope: bool = False
    """True: `quant` covers the RoPE part as well. False: the RoPE part stays in `dtype`."""
    values: Literal["latent", "row"] = "latent"
    """What attention reads as V: "latent", the first `latent_dim` dims of K; "row", the whole of it, RoPE part included
    (DeepSeek V4).
    """

    def model_post_init(self, context: Any) -> None:
        """A row is both parts."""
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.latent_dim + self.rope_dim)

    @model_validator(mode="after")
    def _rows(self) -> Latent:
        if self.head_dim != self.latent_dim + self.rope_dim:
            raise ValueError(
                f"head_dim: got {self.head_dim} with latent_dim={self.latent_dim} and rope_dim={self.rope_dim}; a row is "
                "both; leave head_dim out"
            )
        if self.head_dim > 1024:
            raise ValueError(
                f"latent_dim: got {self.latent_dim} with rope_dim={self.rope_dim}; a row is both, at most 1024 dims"
            )
        if self.quant_rope and (self.layout.rope is not None or self.quants["k"] is None):
            raise ValueError(
                "quant_rope: got True, which stores the RoPE part as codes in the latent's row; it takes a quant, and no "
                "layout.rope"
            )
        if self.storage.residual:
            raise ValueError(
                f"quant: got residual={self.storage.residual} for latent rows, whose dims are mixtures and no channels; leave it "
                "out"
            )
        return self

    @property
    def rope_part(self) -> int:
        return self.rope_dim

    @property
    def latent_part(self) -> int:
        return self.head_dim if self.values == "row" else self.latent_dim

    @property
    def plain_dims(self) -> int:
        return self.rope_dim if self.quants["k"] is not None and not self.quant_rope else 0

    @property
    def byte_rows(self) -> bool:
        quant = self.quants["k"]
        in_page = quant is not None and quant.computed and quant.place == "page"
        return self.plain_dims > 0 and self.layout.rope is None and not in_page


CacheSpec = Paged | Continuous

__all__ = ["Block", "Cache", "CacheSpec", "Continuous", "Latent", "Layout", "Paged", "Quant", "Ring"]
