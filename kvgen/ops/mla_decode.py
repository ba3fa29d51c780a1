"""mla_decode: attention of a step's query rows over latent rows, in the absorbed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from kvgen.expr.nodes import const, var
from kvgen.expr.score_c import float_literal
from kvgen.layout.dtypes import DType, dtype
from kvgen.lowering.attention.masks_scores import attention_context
from kvgen.lowering.attention.mla import THREADS, LatentRow, Shape, latent_row, shape_of
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
        if self.sparse and self.split != "none":
            raise ValueError(
                f"split: got {self.split!r} with sparse=True; lists are as long as each other, and a row is one block's; leave "
                "split out"
            )
        if self.chunk % 64:
            raise ValueError(f"chunk: got {self.chunk}; chunks are whole tiles: a multiple of 64 tokens")
        if "chunk" in self.model_fields_set and self.split != "invariant":
            raise ValueError(
                f"chunk: got {self.chunk} beside split={self.split!r}; chunks have a fixed size with split='invariant' only"
            )
        return self

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
        self._shape(kernels, cache)
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
            d=Attended(
                entry=entry_name(kernels, self.name),
                params=tuple(p.declaration for p in params),
                attend=attend,
                elem=dtype(cache.dtype).c,
                out_elem=out.c,
                factored=False,
                kv_heads=1,
                group=kernels.q_heads,
                rows=self.rows,
                tiles=tiles,
                v_size=cache.latent_part,
                vec=4,
                planned=planned,
                plan_digest=digest,
                sinks=False,
                new_in_length=new_in_length(kernels),
                lse_inf=self.lse_empty == "inf",
                lse_sinks=False,
                lse_base_two=self.lse_base == "2",
            ),
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
        kernel = KernelPlan(self.name, context.d.entry, template, context, params, grid, THREADS, shared_by_arch=shared)
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

    def split_plan(self, kernels: KernelSet) -> SplitPlan | None:
        """What its workspace is made of; None without one."""
        if self.split == "none":
            return None
        cache = kernels.kv
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
        listed: tuple[Param, ...] = (WORKSPACE,) if planned else (row_offsets(index.name),)
        sizes = SIZES if planned else ()
        if self.sparse:
            doc = "physical rows of each row of q, page id * page_size + offset; -1 is skipped"
            listed = (
                Array("indices", "i32", ("T", "K"), strided=True, untrusted=True, doc=doc),
                Array(
                    "topk_lengths", "i32", ("T",), optional=True, untrusted=True, doc="entries of each list that count"
                ),
            )
            sizes = (Size("indices_stride", "i64", "indices.stride"), Size("num_indices_each", "u32", "K"))
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
