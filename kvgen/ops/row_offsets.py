"""row_offsets: where the tokens of every request begin, one request's behind the other's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from kvgen.expr.nodes import ceil_div, const, var
from kvgen.layout.dtypes import dtype
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.new_rows import counts_before, step_offsets
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.tables import IndexName

THREADS: Final = 512


@dataclass(frozen=True)
class RowOffsetsContext:
    """Everything ops/row_offsets.cu.j2 reads."""

    entry: str
    params: tuple[str, ...]
    threads: int
    index: str
    before: bool


class RowOffsets(Op):
    """Sum up the tokens, cached and new, of the requests before each one: `out[B + 1]`, the last entry for all.

    A request has as many tokens as its length says (in a ring, the dropped ones too), and its rows of `row_offsets[B + 1]`
    where the spec's lengths are "before"; "after" counts them already. A length or offsets that cannot be are reported and
    count as no tokens. Sums stop at the largest index (2^31 - 1 in i32, else 2^32 - 2), and the first request past it is
    reported. An empty batch gets its one 0. Source: Modular MAX, kv_cache.row_offsets.ragged.paged.
    """

    kind: ClassVar[str] = "row_offsets"
    index_dtype: IndexName | None = None
    """Element type of `row_offsets` and of `out`. None: the cache's `lengths_dtype`."""

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache = kernels.kv
        index = dtype(self.index_dtype or cache.lengths_dtype)
        doc = "where each request's tokens begin"
        params = (
            Array("out", index.name, ("B+1",), access="out", doc=doc, field="index_dtype"),
            step_offsets(index),
            ERRORS,
        )
        context = RowOffsetsContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            threads=THREADS,
            index=index.c,
            before=counts_before(cache),
        )
        grid = (ceil_div(var("B") + 1, THREADS), const(1), const(1))
        plan = KernelPlan(self.name, context.entry, "ops/row_offsets.cu.j2", context, params, grid, THREADS)
        return (plan,)
