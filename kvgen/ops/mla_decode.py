"""mla_decode: attention of a step's query rows over latent rows, in the absorbed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from kvgen.expr.nodes import const, var
from kvgen.expr.score_c import float_literal
from kvgen.layout.dtypes import DType, dtype
from kvgen.lowering.attention.masks_scores import AttentionContext, attention_context
from kvgen.lowering.attention.mla import THREADS, LatentRow, Shape, latent_row, shape_of
from kvgen.lowering.attention.mla_lists import TEMPLATE as LISTS
from kvgen.lowering.attention.mla_lists import TOKENS as LISTS_TOKENS
from kvgen.lowering.attention.mla_lists import (
    ListsShape,
    MlaListsContext,
    check_row,
    list_contexts,
    list_lengths,
    list_params,
    list_sizes,
    lists_shape,
)
from kvgen.lowering.attention.mla_pairs import TEMPLATE as PAIRS
from kvgen.lowering.attention.mla_pairs import MlaPairsContext, hindrance, pairs_shape
from kvgen.lowering.attention.mla_warpgroups import (
    MlaWarpgroupsContext,
    warpgroups_hindrance,
    warpgroups_shape,
    with_warpgroups_of_lists,
)
from kvgen.lowering.attention.mla_widened import COLS as WIDENED_COLS
from kvgen.lowering.attention.mla_widened import TOKENS as WIDENED_TOKENS
from kvgen.lowering.attention.mla_widened import hindrance as widened_hindrance
from kvgen.lowering.attention.mla_widened import with_widening
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
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Param, Size
from kvgen.plan.split_plan import SplitPlan
from kvgen.spec.cache import Cache
from kvgen.spec.kernel_set import KernelSet, Op
from kvgen.spec.keys import Keys, class_of_keys
from kvgen.spec.mask import Mask
from kvgen.spec.tables import IndexName

LOG2E = 1.4426950408889634
# A column's maximum rises when a score passes it by more than this factor, in base 2: weights stay within f16.
SLACK = 8


@dataclass(frozen=True)
class MlaDecodeContext:
    """Everything ops/mla_decode.cu.j2 reads.

    `row` says how a latent row lies in shared memory, `shape` how a block divides its work. `qk_scale` turns products into
    scores in base 2. `ranged`: codes are multiplied in f16, and Q is brought into its range. `wgmma_file` is the kernel that
    sm_90a has beside this one ("": none).
    """

    d: Attended
    row: LatentRow
    shape: Shape
    threads: int
    slack: int
    head_dim: int
    qk_scale: str
    ranged: bool
    sparse: bool
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
      page_size + offset), which may be other requests' rows. -1 is skipped, and the optional `topk_lengths` i32 `[T]` say
      how many entries of a list count. Nothing is causal then. An index outside the pool, or a topk_length that is negative
      or above K, makes the row NaN.
    - `sources`: (). With `sparse=True` other caches, each with a list a row of q of its own, under the same softmax: Keys(name=
      "compressed", cache=...) brings `compressed_cache`, `compressed_indices` and `compressed_topk_lengths`. Their records may
      be other ones; values are those of gather, in the cache's dtype, before they are multiplied.
    - `sinks`: as in decode.
    - `split`: as in decode; with "balanced" and "invariant" a workspace is planned once a step.

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
    """How requests are divided among blocks: "none", "balanced" or "invariant", as in Decode."""
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
        if self._listed(kernels):
            check_row(cache, "ops: mla_decode")
            for keys in self.sources:
                self._check_keys(keys, cache)
        if not self.widened(kernels) and not others(kernels):
            return
        if self._listed(kernels):
            self._lists_shape(kernels)
        else:
            self._shape(kernels, cache)

    def _check_keys(self, keys: Keys, cache: Cache) -> None:
        """Rows of another cache are as long as the set's, of which V is the same part, and q's type is theirs."""
        at, other = f"sources: {keys.name}", keys.cache
        if not other.latent_part:
            raise ValueError(f"{at}: got a {type(other).__name__} cache; rows are latent; give a Latent cache")
        check_row(other, at)
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

    def _listed(self, kernels: KernelSet) -> bool:
        """Whether rows of any record go through the kernel that widens them on their way to shared memory: those of several
        caches, and those that products cannot be made of as they are."""
        if not self.sparse:
            return False
        if self.sources:
            return True
        try:
            self._shape(kernels, kernels.kv)
        except ValueError:
            return True
        return False

    def widened(self, kernels: KernelSet) -> str:
        """Why rows are not widened by warps of their own, for products of warpgroups on sm_90a; empty where they are."""
        caches, rest = (kernels.kv, *(keys.cache for keys in self.sources)), others(kernels)
        if not self.sparse:
            return "a request's table names its rows"
        if why := widened_hindrance(kernels.arch, caches, kernels.q_heads):
            return why
        if rest:
            listed = self._listed(kernels)
            cols = (
                self._lists_shape(kernels).cols
                if listed
                else shape_of(latent_row(kernels.kv), kernels.kv, kernels.q_heads, rest).cols
            )
            if -(-kernels.q_heads // cols) != -(-kernels.q_heads // WIDENED_COLS):
                return f"{', '.join(rest)}: blocks have {cols} columns, a product has {WIDENED_COLS}, and one grid serves all"
        return ""

    def _lists_shape(self, kernels: KernelSet) -> ListsShape:
        """Of the architectures that have no kernel of their own."""
        cache, archs = kernels.kv, others(kernels) or kernels.arch
        return lists_shape(cache.head_dim, cache.latent_part, kernels.q_heads, 1 + len(self.sources), archs)

    def softmax_scale(self, kernels: KernelSet) -> float:
        """What products are multiplied by."""
        if self.scale is not None:
            return self.scale
        assert kernels.model is not None
        return kernels.model.softmax_scale(kernels.kv.head_dim)

    def kernel_names(self) -> tuple[str, ...]:
        planner = () if self.split == "none" else (f"{self.name}_plan",)
        return (self.name, *planner, wgmma_file(self.name))

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        if self.widened(kernels):
            return self._plan_without(kernels)
        base = self._plan_without(kernels)[0] if others(kernels) else None
        kernel = self._widened_plan(kernels, base)
        if self.split == "none":
            return (kernel,)
        return kernel, self._lists_planner(kernels)

    def _lists_planner(self, kernels: KernelSet) -> KernelPlan:
        """The planner of rows that have lists."""
        cache, (names, _, _) = kernels.kv, self._lists()
        index = dtype(self.index_dtype or cache.lengths_dtype)
        attend = attention_context(Mask(), None, kernels, index)
        rest, warpgroups = others(kernels), not self.widened(kernels)
        tile = WIDENED_TOKENS if warpgroups and not rest else LISTS_TOKENS
        return planner(
            kernels,
            self.name,
            attend=attend,
            rows=1,
            tile=tile,
            warpgroup_tile=WIDENED_TOKENS if warpgroups and rest else 0,
            chunk_tokens=0,
            columns=self._column_tiles(kernels),
            index=index.name,
            digest=self._lists_digest(kernels),
            lengths=list_lengths(names),
        )

    def _lists_digest(self, kernels: KernelSet) -> int:
        """Of plans for rows that have lists; 0 where nothing is planned."""
        index = dtype(self.index_dtype or kernels.kv.lengths_dtype)
        attend = attention_context(Mask(), None, kernels, index)
        return plan_digest(kernels, self.name, self.split_plan(kernels), attend, 1, LISTS_TOKENS)

    def _column_tiles(self, kernels: KernelSet) -> int:
        """Blocks that share a row, of kernels over lists."""
        cols = self._lists_shape(kernels).cols if self.widened(kernels) else WIDENED_COLS
        return -(-kernels.q_heads // cols)

    def _widened_plan(self, kernels: KernelSet, base: KernelPlan | None) -> KernelPlan:
        """The kernel of sm_90a whose rows are widened, beside that of other architectures where there are any."""
        cache = kernels.kv
        index, out = dtype(self.index_dtype or cache.lengths_dtype), dtype(self.out_dtype or cache.dtype)
        params = self._params(kernels, cache, out, index)
        tiles = -(-kernels.q_heads // WIDENED_COLS)
        names, spaces, _ = self._lists()
        return with_widening(
            kernels,
            self.name,
            base,
            self._attended(
                kernels, params, attention_context(Mask(), None, kernels, index), tiles, self._lists_digest(kernels)
            ),
            lists=list_contexts(self.name, names, spaces),
            caches=(cache, *(keys.cache for keys in self.sources)),
            params=params,
            slack=SLACK,
            qk_scale=float_literal(self.softmax_scale(kernels) * LOG2E),
        )

    def _plan_without(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        """The kernels of all architectures, or of those without one whose rows are widened."""
        if self._listed(kernels):
            return (self._listed_plan(kernels),)
        cache = kernels.kv
        index = dtype(self.index_dtype or cache.lengths_dtype)
        attend = attention_context(Mask(), None, kernels, index)
        shape, columns = self._shape(kernels, cache), self.rows * kernels.q_heads
        out = dtype(self.out_dtype or cache.dtype)
        params = self._params(kernels, cache, out, index)
        tiles, planned = -(-columns // shape.cols), self.split != "none"
        warpgroups = not applies(kernels, columns, self.sparse)
        both, balanced = warpgroups and others(kernels), self.split == "balanced"
        # Balanced chunks are whole tiles of the kernel that the planner's architecture has; either kernel takes a plan of both.
        tile = CHUNK_MULTIPLE if warpgroups and not (both and balanced) else shape.tokens
        digest = plan_digest(kernels, self.name, self.split_plan(kernels), attend, self.rows, tile)
        context = MlaDecodeContext(
            d=self._attended(kernels, params, attend, tiles, digest),
            row=latent_row(cache),
            shape=shape,
            threads=THREADS,
            slack=SLACK,
            head_dim=cache.head_dim,
            qk_scale=float_literal(self.softmax_scale(kernels) * LOG2E),
            ranged=cache.quants["k"] is not None,
            sparse=self.sparse,
            wgmma_file=wgmma_file(self.name) if both else "",
        )
        grid = ((var("num_sm_parts") if planned else var("T")) * tiles, const(1), const(1))
        shared = tuple((a, shape.shared(a)) for a in self._archs(kernels))
        template = "ops/mla_decode.cu.j2"
        kernel = KernelPlan(
            self.name,
            context.d.entry,
            template,
            context,
            params,
            grid,
            THREADS,
            shared_by_arch=shared,
            reads_tables=not self.sparse,
        )
        if warpgroups:
            kernel = with_warpgroups(kernels, kernel, context.d, slack=SLACK, qk_scale=context.qk_scale)
        if not planned:
            return (kernel,)
        chunk_tokens = self.chunk if self.split == "invariant" else 0
        return kernel, planner(
            kernels,
            self.name,
            attend=attend,
            rows=self.rows,
            tile=tile,
            warpgroup_tile=CHUNK_MULTIPLE if both and balanced else 0,
            chunk_tokens=chunk_tokens,
            columns=tiles,
            index=index.name,
            digest=digest,
        )

    def _attended(
        self, kernels: KernelSet, params: tuple[Param, ...], attend: AttentionContext, tiles: int, digest: int
    ) -> Attended:
        """What every kernel of this operation has."""
        cache = kernels.kv
        return Attended(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            attend=attend,
            elem=dtype(cache.dtype).c,
            out_elem=dtype(self.out_dtype or cache.dtype).c,
            factored=False,
            kv_heads=1,
            group=kernels.q_heads,
            rows=self.rows,
            tiles=tiles,
            v_size=cache.latent_part,
            vec=4,
            planned=self.split != "none",
            plan_digest=digest,
            sinks=self.sinks is not None,
            new_in_length=new_in_length(kernels),
            lse_inf=self.lse_empty == "inf",
            lse_sinks=self.sinks == "lse",
            lse_base_two=self.lse_base == "2",
        )

    def hindrance(self, kernels: KernelSet) -> str:
        """Of lists of rows of any record: why few columns do not take codes as they are stored; empty where they do."""
        return hindrance(kernels, self.sources)

    def _pairs_plan(self, kernels: KernelSet) -> KernelPlan:
        """The kernel for few columns over codes with e8m0 scales."""
        cache, shape = kernels.kv, pairs_shape(kernels)
        index, out = dtype(self.index_dtype or cache.lengths_dtype), dtype(self.out_dtype or cache.dtype)
        params = self._params(kernels, cache, out, index)
        names, spaces, _ = self._lists()
        context = MlaPairsContext(
            d=self._attended(kernels, params, attention_context(Mask(), None, kernels, index), 1, 0),
            lists=list_contexts(self.name, names, spaces),
            shape=shape,
            threads=THREADS,
            slack=SLACK,
            head_dim=cache.head_dim,
            qk_scale=float_literal(self.softmax_scale(kernels) * LOG2E),
        )
        shared = tuple((arch, shape.shared(arch)) for arch in kernels.arch)
        grid = (var("T"), const(1), const(1))
        return KernelPlan(
            self.name, context.d.entry, PAIRS, context, params, grid, THREADS, shared_by_arch=shared, reads_tables=False
        )

    def warpgroups_hindrance(self, kernels: KernelSet) -> str:
        """The same of sm_90a's kernel, whose products are those of warpgroups."""
        return warpgroups_hindrance(kernels, self.sources)

    def _listed_plan(self, kernels: KernelSet) -> KernelPlan:
        """The kernels over lists of rows of any record."""
        plan = self._lists_plan(kernels) if self.hindrance(kernels) else self._pairs_plan(kernels)
        if self.warpgroups_hindrance(kernels):
            return plan
        found = plan.context
        assert isinstance(found, MlaPairsContext | MlaListsContext)
        context = MlaWarpgroupsContext(
            d=found.d,
            lists=found.lists,
            shape=warpgroups_shape(kernels),
            threads=THREADS,
            slack=SLACK,
            head_dim=found.head_dim,
            qk_scale=found.qk_scale,
            other_file="",
        )
        return with_warpgroups_of_lists(kernels, plan, context)

    def _lists_plan(self, kernels: KernelSet) -> KernelPlan:
        """The kernel that widens rows of any record."""
        cache, shape = kernels.kv, self._lists_shape(kernels)
        index, out = dtype(self.index_dtype or cache.lengths_dtype), dtype(self.out_dtype or cache.dtype)
        params = self._params(kernels, cache, out, index)
        tiles = -(-kernels.q_heads // shape.cols)
        names, spaces, _ = self._lists()
        context = MlaListsContext(
            d=self._attended(kernels, params, attention_context(Mask(), None, kernels, index), tiles, 0),
            lists=list_contexts(self.name, names, spaces),
            shape=shape,
            threads=THREADS,
            slack=SLACK,
            head_dim=cache.head_dim,
            qk_scale=float_literal(self.softmax_scale(kernels) * LOG2E),
        )
        grid = (var("T") * tiles, const(1), const(1))
        return KernelPlan(
            self.name, context.d.entry, LISTS, context, params, grid, THREADS, shared=shape.shared, reads_tables=False
        )

    def _lists(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """Of the set's own list and the others: names ("": its own), namespaces and classes of their caches."""
        found = (("", "", ""), *((k.name, self._space_of(k), self._class_of(k)) for k in self.sources))
        names, spaces, classes = zip(*found, strict=True)
        return names, spaces, classes

    def split_plan(self, kernels: KernelSet) -> SplitPlan | None:
        """What its workspace is made of; None without one."""
        if self.split == "none":
            return None
        cache = kernels.kv
        if self.sparse:
            cols, tiles = WIDENED_COLS, self._column_tiles(kernels)
            partial = tiles * partial_bytes(cols, cache.latent_part)
            return SplitPlan(columns=tiles, blocks_per_sm=1, partial_bytes=partial, chunk_tokens=0)
        shape = self._shape(kernels, cache)
        tiles = -(-self.rows * kernels.q_heads // shape.cols)
        return SplitPlan(
            columns=tiles,
            blocks_per_sm=1,
            partial_bytes=tiles * partial_bytes(shape.cols, cache.latent_part),
            chunk_tokens=self.chunk if self.split == "invariant" else 0,
            max_seen=most_seen(kernels, self.rows, Mask()),
        )

    def _shape(self, kernels: KernelSet, cache: Cache) -> Shape:
        return shape_of(latent_row(cache), cache, self.rows * kernels.q_heads, self._archs(kernels))

    def _archs(self, kernels: KernelSet) -> tuple[str, ...]:
        """The architectures that a warp's products are for."""
        warpgroups = not applies(kernels, self.rows * kernels.q_heads, self.sparse)
        return (others(kernels) if warpgroups else ()) or kernels.arch

    def _params(self, kernels: KernelSet, cache: Cache, out: DType, index: DType) -> tuple[Param, ...]:
        """What a call brings, in the order of the kernel's signature."""
        elem = dtype(cache.dtype)
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
                align=4 * out.bytes,
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
