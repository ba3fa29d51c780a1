"""mla_decode: attention of a step's query rows over latent rows, in the absorbed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from kvgen.expr.nodes import const, var
from kvgen.expr.score_c import float_literal
from kvgen.layout.dtypes import DType, dtype
from kvgen.lowering.attention import mla_pairs, mla_records, mla_warpgroups, mla_widened
from kvgen.lowering.attention.masks_scores import attention_context
from kvgen.lowering.attention.mla import THREADS, LatentRow, Shape, latent_row, shape_of
from kvgen.lowering.attention.mla_lists import ListContext, list_contexts, list_lengths, list_params, list_sizes
from kvgen.lowering.attention.split_kv import (
    SIZES,
    WORKSPACE,
    Attended,
    Split,
    most_seen,
    new_in_length,
    partial_bytes,
    plan_digest,
    planner,
    row_offsets,
)
from kvgen.lowering.attention.wgmma import CHUNK_MULTIPLE, applies, others, wgmma_file, with_warpgroups
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.model_facts import Attention, check_attention, softmax_scale
from kvgen.ops.base import specified
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Param, Size
from kvgen.plan.split_plan import SplitPlan
from kvgen.schema.cache import Cache
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.keys import Keys, class_of_keys
from kvgen.schema.mask import Mask
from kvgen.schema.tables import IndexName

LOG2E = 1.4426950408889634
# A column's maximum rises when a score passes it by more than this factor, in base 2: weights stay within f16.
SLACK = 8


@dataclass(frozen=True)
class MlaDecodeContext:
    """Everything ops/mla_decode.cu.j2 reads.

    `lists` name rows, or there are none, and a request's page table does. `row` says how a latent row lies in shared memory,
    `shape` how a block divides its work. `qk_scale` turns products into scores in base 2. `ranged`: codes are multiplied in
    f16, and Q is brought into its range. `wgmma_file` is the kernel that sm_90a has beside this one ("": none).
    """

    d: Attended
    lists: tuple[ListContext, ...]
    row: LatentRow
    shape: Shape
    threads: int
    slack: int
    head_dim: int
    qk_scale: str
    ranged: bool
    wgmma_file: str


class MlaDecode(Op):
    """Attend with absorbed queries to a cache of latent rows (MLA), this step's rows included.

    q is `[T, q_heads, latent_dim + rope_dim]`. V is the first `latent_dim` dims of each row, so `out` is `[T, q_heads,
    latent_dim]`, still latent: the model's up-projection of every head follows. Sums are f32, rounded once to `out_dtype`
    (None: the cache's dtype). `lse` is an optional output f32 `[T, q_heads]`, as in decode.

    Request b has q's rows from b * rows on, or with `row_offsets[B + 1]` its own, at most `rows` (1). Of n tokens, row i of
    r stands at token n - r + i and sees the tokens up to there.

    Choices:

    - `scale` multiplies scores. None: from the set's model. It follows from the model's heads before absorption, not from
      the width of a cached row: DeepSeek V3's is (128 + 64) ** -0.5, times YaRN's factor.
    - `sparse`: False. True: each row of q has a list of its own, `indices` i32 `[T, K]`, of physical rows (page id *
      page_size + offset), which may be other requests' rows. -1 is skipped, and `topk_lengths` i32 `[T]` say how many
      entries of a list count (optional with split="none"; None: all). Nothing is causal then. An index outside the pool, or
      a topk_length that is negative or above K, makes the row NaN.
    - `sources`: (). With `sparse=True` other caches, each with a list a row of q of its own, under the same softmax: Keys(name=
      "compressed", cache=...) brings `compressed_cache`, `compressed_indices` and `compressed_topk_lengths`. Their records may
      be other ones; values are those of gather, in the cache's dtype, before they are multiplied.
    - `sinks`: as in decode.
    - `split`: as in decode; with "balanced" and "invariant" a workspace is planned once a step. With `sparse=True` "balanced"
      divides the listed rows among blocks: `topk_lengths` of every list are then required, in `plan` and in the call, and lists
      of other lengths than were planned make their row NaN. "invariant" is refused there: with "none" a row is one block's.

    Rows of no request and rows that see nothing give 0, and `lse_empty` in lse; a request with invalid pages or lengths
    gives NaN.
    """

    kind: ClassVar[str] = "mla_decode"
    at_rates: ClassVar[bool] = True
    rows: int = Field(default=1, ge=1, le=8)
    """Most query rows of a request."""
    scale: float | None = None
    """Factor of q . k, from the model's heads before absorption. None: the set's `model` says."""
    sparse: bool = False
    """True: every row of q attends to the rows of `indices[T, K]`, i32, instead of its request's."""
    sources: tuple[Keys, ...] = Field(default=(), strict=False)
    """Caches besides the set's own that lists name rows of, with sparse=True. (): none."""
    sinks: Literal["out", "lse"] | None = None
    """"out" and "lse": the call brings `sinks`, f32 `[q_heads]`, a logit of each head in the softmax's denominator;
    "lse" counts it in `lse` too. None: no sinks.
    """
    out_dtype: Literal["f32", "f16", "bf16"] | None = None
    """Element type of `out`. None: the cache's `dtype`."""
    lse_base: Literal["e", "2"] = "e"
    """Base of the logarithm in `lse`: "e" or "2"."""
    lse_empty: Literal["-inf", "inf"] = "-inf"
    """What `lse` is for a row that sees no token."""
    split: Split = "none"
    """How requests, or the lists of rows, are divided among blocks: "none", "balanced" or "invariant", as in Decode."""
    chunk: int = Field(default=512, ge=64, le=2**20)
    """Tokens of a piece with split="invariant"."""
    index_dtype: IndexName | None = None
    """Element type of `row_offsets`. None: the cache's `lengths_dtype`."""

    @field_validator("scale")
    @classmethod
    def _usable_scale(cls, value: float | None) -> float | None:
        if value is not None and not 1e-30 <= value <= 1e30:
            raise ValueError(f"scale: got {value!r}; a softmax scale lies in [1e-30, 1e30]; None takes the model's")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> MlaDecode:
        if self.sparse and self.rows != 1:
            raise ValueError(
                f"rows: got {self.rows} with sparse=True, where every row of q has a list of its own; leave rows out"
            )
        if self.sparse and self.split == "invariant":
            raise ValueError(
                "split: got 'invariant' with sparse=True; where a row is one block's, its bits follow from its lists alone; use "
                "split='none', or 'balanced'"
            )
        self._check_sources()
        if self.chunk % 64:
            raise ValueError(f"chunk: got {self.chunk}; chunks are whole tiles: a multiple of 64 tokens")
        if "chunk" in self.model_fields_set and self.split != "invariant":
            raise ValueError(
                f"chunk: got {self.chunk} beside split={self.split!r}; chunks have a fixed size with split='invariant' only"
            )
        return self

    def _check_sources(self) -> None:
        """Lists alone name rows of several caches, whose arguments have names of their own."""
        names = [keys.name for keys in self.sources]
        if names and not self.sparse:
            raise ValueError(
                f"sources: got {', '.join(names)} with sparse=False, where a request's table says which rows are read; give "
                "sparse=True, or leave sources out"
            )
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(
                f"sources: got {twice!r} twice; arguments are called after them; give each a name of its own"
            )

    def check(self, kernels: KernelSet) -> None:
        """The cache is one of latent rows that tensor cores can take."""
        cache = kernels.kv
        if not cache.latent_part:
            raise ValueError(
                f"ops: mla_decode reads latent rows, but the cache is {type(cache).__name__}; use ops.Decode(), or a Latent cache"
            )
        if self.scale is None and (kernels.model is None or kernels.model.mla is None):
            raise ValueError(
                "ops: mla_decode has no scale, and the set no model with mla to take it from; a latent row's width says "
                "nothing about it; give scale, for DeepSeek V3 (128 + 64) ** -0.5"
            )
        check_attention(Attention(self, self.scale, self.sinks, None if self.sparse else Mask()), kernels)
        if self.rows > 1 and cache.entry_tokens > 1:
            raise ValueError(
                f"rows: got {self.rows} with rate={cache.entry_tokens}; rows of a request see entries that end at each other's "
                "tokens, which the kernel does not tell apart; use one row a request, or lists with sparse=True"
            )
        if self.sparse and cache.storage.own_table:
            raise ValueError(
                "ops: mla_decode with sparse=True finds rows by one index, but scales have a page table of their own "
                "(own_table); use own_table=False"
            )
        if self.as_stored(kernels):
            mla_records.check_row(cache, "ops: mla_decode")
        for keys in self.sources:
            self._check_keys(keys, cache)
        self.plan(kernels)

    def _check_keys(self, keys: Keys, cache: Cache) -> None:
        """Rows of another cache are as long as the set's, of which V is the same part, and q's type is theirs."""
        at, other = f"sources: {keys.name}", keys.cache
        if not other.latent_part:
            raise ValueError(f"{at}: got a {type(other).__name__} cache; rows are latent; give a Latent cache")
        mla_records.check_row(other, at)
        for name, mine, its in (
            ("dtype", cache.dtype, other.dtype),
            ("head_dim", cache.head_dim, other.head_dim),
            ("latent_dim", cache.latent_part, other.latent_part),
        ):
            if mine != its:
                raise ValueError(
                    f"{at}: got {name}={its!r} beside a cache with {name}={mine!r}; one q is multiplied with all rows, and one "
                    f"out sums them; give {name}={mine!r}"
                )

    def other_caches(self) -> dict[str, Cache]:
        return {self._class_of(keys): keys.cache for keys in self.sources}

    def about_other(self, class_name: str) -> str:
        return f"A cache whose rows the lists of {self.name} name: its pages, of any tables or none."

    def other_space(self, class_name: str) -> str:
        return next(self._space_of(keys) for keys in self.sources if self._class_of(keys) == class_name)

    def _class_of(self, keys: Keys) -> str:
        return class_of_keys(self.name, keys.name)

    @staticmethod
    def _space_of(keys: Keys) -> str:
        return f"{keys.name}_keys"

    def _caches(self, kernels: KernelSet) -> tuple[Cache, ...]:
        return (kernels.kv, *(keys.cache for keys in self.sources))

    def _columns(self, kernels: KernelSet) -> int:
        """Of a request, or of a row that has lists."""
        return self.rows * kernels.q_heads

    def as_stored(self, kernels: KernelSet) -> str:
        """Why products are not made of rows as they are stored; empty where they are. Other kernels take rows of any record, of
        several caches as well."""
        if self.sources:
            return "rows of several caches"
        try:
            shape_of(latent_row(kernels.kv), kernels.kv, self._columns(kernels), kernels.arch)
        except ValueError as error:
            return str(error)
        return ""

    def in_pairs(self, kernels: KernelSet) -> str:
        """Why pairs of warps do not take the rows that lists name; empty where they do."""
        if not self.sparse:
            return "a request's table names its rows"
        return mla_pairs.hindrance(kernels, self.sources)

    def by_warpgroups(self, kernels: KernelSet) -> str:
        """The same of the warpgroups of sm_90a that take few columns."""
        if not self.sparse:
            return "a request's table names its rows"
        return mla_warpgroups.warpgroups_hindrance(kernels, self.sources)

    def widened(self, kernels: KernelSet) -> str:
        """The same of the warps of sm_90a that widen rows for warpgroups with many columns."""
        columns, rest = self._columns(kernels), others(kernels)
        if not self.sparse and self.rows > 1:
            return "rows of a request do not see the same tokens"
        if not self.sparse and not applies(kernels, columns, self.sparse):
            return "rows of 16 bits are copied as they are"
        if why := mla_widened.hindrance(kernels.arch, self._caches(kernels), columns):
            return why
        cols, own = self._warp_cols(kernels, rest) if rest else mla_widened.COLS, mla_widened.COLS
        if -(-columns // cols) != -(-columns // own) or (self.split != "none" and cols != own):
            return f"{', '.join(rest)}: blocks have {cols} columns, a product has {own}, and one grid serves all"
        return ""

    def _warp_cols(self, kernels: KernelSet, archs: tuple[str, ...]) -> int:
        """Columns of a block whose products are of warps, on these architectures."""
        if not self.as_stored(kernels):
            return shape_of(latent_row(kernels.kv), kernels.kv, self._columns(kernels), archs).cols
        if not self.in_pairs(kernels):
            return mla_pairs.pairs_shape(kernels).cols
        return self._records_shape(kernels, archs).cols

    def _records_shape(self, kernels: KernelSet, archs: tuple[str, ...]) -> mla_records.RecordsShape:
        cache = kernels.kv
        lists = len(self._caches(kernels)) if self.sparse else 0
        return mla_records.records_shape(cache.head_dim, cache.latent_part, self._columns(kernels), lists, archs)

    def _tiles(self, kernels: KernelSet) -> tuple[int, int]:
        """Columns of a block, and blocks that share a request."""
        cols = self._warp_cols(kernels, self._archs(kernels)) if self.widened(kernels) else mla_widened.COLS
        return cols, -(-self._columns(kernels) // cols)

    def softmax_scale(self, kernels: KernelSet) -> float:
        """Factor of q . k: `scale`, else the model's."""
        return softmax_scale(self.name, self.scale, kernels)

    @property
    def description(self) -> str:
        """The launcher's docstring: the operation, with the fields that its spec gives."""
        return specified(self)

    def kernel_names(self) -> tuple[str, ...]:
        planner = () if self.split == "none" else (f"{self.name}_plan",)
        return (self.name, *planner, wgmma_file(self.name))

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        widened = not self.widened(kernels)
        kernel = None if widened and not others(kernels) else self._kernel_of_warps(kernels)
        if widened:
            kernel = mla_widened.with_widening(
                kernels,
                self.name,
                kernel,
                self._attended(kernels),
                lists=self._contexts(),
                caches=self._caches(kernels),
                params=self._params(kernels),
                slack=SLACK,
                qk_scale=self._qk_scale(kernels),
            )
        assert kernel is not None
        return (kernel,) if self.split == "none" else (kernel, self._planner(kernels))

    def _kernel_of_warps(self, kernels: KernelSet) -> KernelPlan:
        """The kernel of all architectures, with sm_90a's own beside it where rows are not widened there."""
        if not self.as_stored(kernels):
            return self._stored_plan(kernels)
        plan = self._records_plan(kernels) if self.in_pairs(kernels) else self._pairs_plan(kernels)
        if self.by_warpgroups(kernels):
            return plan
        context = mla_warpgroups.MlaWarpgroupsContext(
            d=self._attended(kernels),
            lists=self._contexts(),
            shape=mla_warpgroups.warpgroups_shape(kernels),
            threads=THREADS,
            slack=SLACK,
            head_dim=kernels.kv.head_dim,
            qk_scale=self._qk_scale(kernels),
            other_file="",
        )
        return mla_warpgroups.with_warpgroups_of_lists(kernels, plan, context)

    def _stored_plan(self, kernels: KernelSet) -> KernelPlan:
        """The kernel that multiplies rows as they are stored."""
        cache, shape = kernels.kv, self._shape(kernels)
        warpgroups = not applies(kernels, self._columns(kernels), self.sparse)
        context = MlaDecodeContext(
            d=self._attended(kernels),
            lists=self._contexts(),
            row=latent_row(cache),
            shape=shape,
            threads=THREADS,
            slack=SLACK,
            head_dim=cache.head_dim,
            qk_scale=self._qk_scale(kernels),
            ranged=cache.quants["k"] is not None,
            wgmma_file=wgmma_file(self.name) if warpgroups and others(kernels) else "",
        )
        shared = tuple((a, shape.shared(a)) for a in self._archs(kernels))
        plan = self._plan_of(kernels, "ops/mla_decode.cu.j2", context, context.d, shared)
        if warpgroups:
            plan = with_warpgroups(kernels, plan, context.d, slack=SLACK, qk_scale=context.qk_scale)
        return plan

    def _pairs_plan(self, kernels: KernelSet) -> KernelPlan:
        """The kernel for few columns over codes with e8m0 scales."""
        shape = mla_pairs.pairs_shape(kernels)
        context = mla_pairs.MlaPairsContext(
            d=self._attended(kernels),
            lists=self._contexts(),
            shape=shape,
            threads=THREADS,
            slack=SLACK,
            head_dim=kernels.kv.head_dim,
            qk_scale=self._qk_scale(kernels),
        )
        shared = tuple((arch, shape.shared(arch)) for arch in kernels.arch)
        return self._plan_of(kernels, mla_pairs.TEMPLATE, context, context.d, shared)

    def _records_plan(self, kernels: KernelSet) -> KernelPlan:
        """The kernel of rows of any record."""
        archs = self._archs(kernels)
        shape = self._records_shape(kernels, archs)
        context = mla_records.MlaRecordsContext(
            d=self._attended(kernels),
            lists=self._contexts(),
            shape=shape,
            threads=THREADS,
            slack=SLACK,
            head_dim=kernels.kv.head_dim,
            qk_scale=self._qk_scale(kernels),
        )
        shared = tuple((arch, shape.shared) for arch in archs)
        return self._plan_of(kernels, mla_records.TEMPLATE, context, context.d, shared)

    def _plan_of(
        self, kernels: KernelSet, template: str, context: object, d: Attended, shared: tuple[tuple[str, int], ...]
    ) -> KernelPlan:
        rows = var("num_sm_parts" if d.planned else "T")
        return KernelPlan(
            self.name,
            d.entry,
            template,
            context,
            self._params(kernels),
            (rows * d.tiles, const(1), const(1)),
            THREADS,
            shared_by_arch=shared,
            reads_tables=not self.sparse,
        )

    def _planner(self, kernels: KernelSet) -> KernelPlan:
        """What cuts requests, or the lists of rows, into chunks."""
        tile, warpgroup_tile = self._plan_tiles(kernels)
        fields: dict[str, Any] = {"tile": tile, "warpgroup_tile": warpgroup_tile}
        if self.sparse:
            # Lists take whole tiles of the kernel that reads them.
            fields = {"tile": CHUNK_MULTIPLE, "list_tile": tile, "warpgroup_list_tile": warpgroup_tile}
            fields["lengths"] = list_lengths(self._lists()[0])
        return planner(
            kernels,
            self.name,
            attend=attention_context(Mask(), None, kernels, self._index(kernels)),
            rows=self.rows,
            chunk_tokens=self.chunk if self.split == "invariant" else 0,
            columns=self._tiles(kernels)[1],
            index=self._index(kernels).name,
            digest=self._digest(kernels),
            **fields,
        )

    def _plan_tiles(self, kernels: KernelSet) -> tuple[int, int]:
        """Tokens of a tile, and where sm_90a's kernel has others than that of other architectures, its own (0: it has not)."""
        stored = not self.as_stored(kernels)
        own = 0
        if not self.widened(kernels) or not self.by_warpgroups(kernels):
            own = mla_widened.TOKENS
        elif stored and not applies(kernels, self._columns(kernels), self.sparse):
            own = CHUNK_MULTIPLE
        if own and not others(kernels):
            return own, 0
        if stored:
            tile = self._shape(kernels).tokens
        else:
            tile = mla_records.TOKENS if self.in_pairs(kernels) else mla_pairs.TOKENS
        # Chunks of balanced plans are whole tiles of the architecture's kernel, those of fixed ones of both.
        if own and not self.sparse and self.split != "balanced":
            return own, 0
        return tile, own

    def _digest(self, kernels: KernelSet) -> int:
        """Of the plans that its kernels take; 0 where nothing is planned."""
        attend = attention_context(Mask(), None, kernels, self._index(kernels))
        tile, _ = self._plan_tiles(kernels)
        return plan_digest(kernels, self.name, self.split_plan(kernels), attend, self.rows, tile)

    def _index(self, kernels: KernelSet) -> DType:
        return dtype(self.index_dtype or kernels.kv.lengths_dtype)

    def _qk_scale(self, kernels: KernelSet) -> str:
        """From products to scores in base 2."""
        return float_literal(self.softmax_scale(kernels) * LOG2E)

    def _attended(self, kernels: KernelSet) -> Attended:
        """What every kernel of this operation has."""
        cache = kernels.kv
        params = self._params(kernels)
        return Attended(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            attend=attention_context(Mask(), None, kernels, self._index(kernels)),
            elem=dtype(cache.dtype).c,
            out_elem=dtype(self.out_dtype or cache.dtype).c,
            factored=False,
            kv_heads=1,
            group=kernels.q_heads,
            rows=self.rows,
            tiles=self._tiles(kernels)[1],
            v_size=cache.latent_part,
            vec=4,
            planned=self.split != "none",
            plan_digest=self._digest(kernels) if self.split != "none" else 0,
            sinks=self.sinks is not None,
            new_in_length=new_in_length(kernels),
            lse_inf=self.lse_empty == "inf",
            lse_sinks=self.sinks == "lse",
            lse_base_two=self.lse_base == "2",
        )

    def _contexts(self) -> tuple[ListContext, ...]:
        """Its lists as templates have them; none where a request's table names its rows."""
        names, spaces, _ = self._lists()
        return list_contexts(self.name, names, spaces) if self.sparse else ()

    def _lists(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """Of the set's own list and the others: names ("": its own), namespaces and classes of their caches."""
        found = (("", "", ""), *((k.name, self._space_of(k), self._class_of(k)) for k in self.sources))
        names, spaces, classes = zip(*found, strict=True)
        return names, spaces, classes

    def split_plan(self, kernels: KernelSet) -> SplitPlan | None:
        """What its workspace is made of; None without one."""
        if self.split == "none":
            return None
        cols, tiles = self._tiles(kernels)
        return SplitPlan(
            columns=tiles,
            blocks_per_sm=1,
            partial_bytes=tiles * partial_bytes(cols, kernels.kv.latent_part),
            chunk_tokens=self.chunk if self.split == "invariant" else 0,
            max_seen=0 if self.sparse else most_seen(kernels, self.rows, Mask()),
        )

    def _shape(self, kernels: KernelSet) -> Shape:
        """Of rows as they are stored."""
        return shape_of(latent_row(kernels.kv), kernels.kv, self._columns(kernels), self._archs(kernels))

    def _archs(self, kernels: KernelSet) -> tuple[str, ...]:
        """The architectures that have no kernel with products of warpgroups and many columns."""
        warpgroups = not self.widened(kernels) or not applies(kernels, self._columns(kernels), self.sparse)
        return (others(kernels) if warpgroups else ()) or kernels.arch

    def _params(self, kernels: KernelSet) -> tuple[Param, ...]:
        """What a call brings, in the order of the kernel's signature."""
        cache, index = kernels.kv, self._index(kernels)
        elem, out = dtype(cache.dtype), dtype(self.out_dtype or cache.dtype)
        heads = kernels.q_heads
        planned = self.split != "none"
        sinks = Array("sinks", "f32", (heads,), doc="score of each query head's sink", fields=("q_heads",))
        listed: tuple[Param, ...] = (WORKSPACE,) if planned else (row_offsets(index.name),)
        sizes = SIZES if planned else ()
        if self.sparse:
            listed = (*((WORKSPACE,) if planned else ()), *list_params(*self._lists(), planned=planned))
            sizes = (*sizes, *list_sizes(self._lists()[0]))
        return (
            Array(
                "q",
                elem.name,
                ("T", heads, cache.head_dim),
                align=16,
                strided=True,
                doc="query rows in the absorbed form",
                field="dtype",
                fields=(None, "q_heads", "head_dim"),
            ),
            Array(
                "out",
                out.name,
                ("T", heads, cache.latent_part),
                access="out",
                align=min(16, (4 if self.widened(kernels) else mla_widened.VEC) * out.bytes),
                strided=True,
                doc="attention output, still latent",
                field="out_dtype" if self.out_dtype else "dtype",
                fields=(None, "q_heads", "latent_dim"),
            ),
            *listed,
            *((sinks,) if self.sinks else ()),
            Array(
                "lse",
                "f32",
                ("T", heads),
                access="out",
                optional=True,
                doc=f"logarithm to base {self.lse_base} of the softmax's denominator",
                fields=(None, "q_heads"),
            ),
            Size("q_stride", "i64", "q.stride"),
            Size("out_stride", "i64", "out.stride"),
            Size("num_rows", "u32", "T"),
            *sizes,
            ERRORS,
        )
