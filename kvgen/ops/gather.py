"""gather: copy cached tokens into contiguous rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvgen.dtypes import dtype
from kvgen.expr import ceil_div, const, var
from kvgen.ops.cache import ERRORS, entry_name, rows_per_block
from kvgen.ops.segments import SegmentContext, row_params, segments
from kvgen.plan import KernelPlan, Param
from kvgen.spec.kernel_set import KernelSet, Op
from kvgen.spec.table import IndexName

THREADS = 256


@dataclass(frozen=True)
class GatherContext:
    """Everything ops/gather.cu.j2 reads."""

    entry: str
    params: tuple[str, ...]
    segments: tuple[SegmentContext, ...]
    threads: int
    rows: int


class Gather(Op):
    """Copy cached tokens to k_out and v_out `[T, kv_heads, head_dim]`, dequantized.

    Row t of request b, counted from `row_offsets[b]`, is token `starts[b] + t` (`starts` optional: 0). Rows at or past
    `row_offsets[B]` are left alone; a row whose token has no valid page becomes NaN. In a
    ring, `lengths` says which tokens are stored: the last `window` before `length`.
    """

    kind: ClassVar[str] = "gather"
    index_dtype: IndexName | None = None

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache = kernels.cache
        index = dtype(self.index_dtype or cache.lengths_dtype)
        rows_of = row_params(cache, "_out", "{} of the gathered tokens", access="out")
        doc = "first row of each request"
        params = [Param("row_offsets", index, ("B+1",), untrusted=True, doc=doc, field="index_dtype"), *rows_of]
        doc = "first token to take of each request"
        params.append(Param("starts", index, ("B",), optional=True, untrusted=True, doc=doc, field="index_dtype"))
        params += [Param(f"{r.name[0]}_stride", dtype("i64"), value=f"{r.name}.stride") for r in rows_of]
        params += [Param("num_rows", dtype("u32"), value="T"), ERRORS]
        rows = rows_per_block(cache, THREADS)
        context = GatherContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            segments=segments(cache),
            threads=THREADS,
            rows=rows,
        )
        grid = (ceil_div(var("T"), rows), const(1), const(1))
        return (KernelPlan(self.name, context.entry, "ops/gather.cu.j2", context, tuple(params), grid, THREADS),)
