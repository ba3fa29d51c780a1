"""seal: quantize the groups of K tokens that a step completes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field

from kvgen.expr.nodes import const, var
from kvgen.layout.dtypes import dtype
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.lowered import lower
from kvgen.lowering.row_runs import row_params
from kvgen.lowering.segments import SegmentContext
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Size
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.tables import IndexName

THREADS = 128


@dataclass(frozen=True)
class SealContext:
    """Everything ops/seal.cu.j2 reads."""

    entry: str
    params: tuple[str, ...]
    s: SegmentContext
    threads: int
    residual: int
    lengths: str


class Seal(Op):
    """Quantize the groups of `residual` tokens of K that the step's rows complete; call it before append.

    k is `[T, kv_heads, head_dim]`, and `row_offsets[B + 1]` says which rows are whose, both as append takes them. The older
    tokens of a group come from the cache's tail. Every channel (a head's dim) gets one scale, and zero point, over the
    group's tokens. `k_sealed[b]` becomes the number of tokens of request b that are quantized: the whole groups of its
    length. Source of the scheme: KIVI (Liu et al., 2024), keys per channel, values per token.
    """

    kind: ClassVar[str] = "seal"
    index_dtype: IndexName | None = Field(default=None)
    """Element type of `row_offsets`. None: the cache's `lengths_dtype`."""

    def check(self, kernels: KernelSet) -> None:
        if not kernels.kv.storage.residual:
            raise ValueError(
                "ops: seal needs a cache whose keys have residual=R; without it every token is quantized as it is written"
            )

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache = kernels.kv
        lowered = lower(cache)
        key = lowered.segments[0]
        index = dtype(self.index_dtype or cache.lengths_dtype)
        params = (
            row_params(lowered, "", "new {} rows")[0],
            Array(
                "row_offsets",
                index.name,
                ("B+1",),
                untrusted=True,
                doc="first row of each request",
                field="index_dtype",
            ),
            Size("k_stride", "i64", "k.stride"),
            Size("num_rows", "u32", "T"),
            ERRORS,
        )
        context = SealContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            s=key,
            threads=THREADS,
            residual=cache.storage.residual,
            lengths=cache.lengths,
        )
        grid = (var("T"), const(1), const(1))
        plan = KernelPlan(self.name, context.entry, "ops/seal.cu.j2", context, params, grid, THREADS, writes_pool=True)
        return (plan,)
