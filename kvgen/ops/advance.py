"""advance: the step's new tokens, added to the lengths of a batch on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from kvgen.expr.nodes import ceil_div, const, var
from kvgen.layout.dtypes import dtype
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.tables import IndexName

THREADS: Final = 256


@dataclass(frozen=True)
class AdvanceContext:
    """Everything ops/advance.cu.j2 reads: `by_rows` counts the new tokens of a request by row_offsets, not new_tokens."""

    entry: str
    params: tuple[str, ...]
    threads: int
    length: str
    by_rows: bool


class Advance(Op):
    """Add the step's new tokens to the lengths, on the device, so that a captured graph can run step after step.

    `new_lengths[B]` is the result; it may be the array of the lengths itself. `counts` says how many tokens request b has
    new: "row_offsets", its rows of `row_offsets[B + 1]`; "new_tokens", `new_tokens[b]`, for instance those that speculation
    accepted. Without the array each request has one, as in a decode step. A length that cannot be or would pass 2^32 - 2
    (2^31 - 1 in i32), and offsets that contradict each other, are reported; that request's length stays. Source: Modular
    MAX, increment_cache_lengths.
    """

    kind: ClassVar[str] = "advance"
    at_rates: ClassVar[bool] = True
    counts: Literal["row_offsets", "new_tokens"] = "row_offsets"
    """Where the number of new tokens comes from: "row_offsets", `row_offsets[B + 1]`; "new_tokens", `new_tokens[B]`."""
    index_dtype: IndexName | None = None
    """Element type of the array that `counts` names. None: the cache's `lengths_dtype`."""

    def check(self, kernels: KernelSet) -> None:
        if kernels.kv.page_table.counts_tokens:
            raise ValueError(
                "ops: got advance with CSR(last_page_len=True), whose lengths follow from its page lists; make new lists "
                "with to_csr from a dense table, or use CSR() with lengths"
            )

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache = kernels.kv
        lengths, index = dtype(cache.lengths_dtype), dtype(self.index_dtype or cache.lengths_dtype)
        by_rows = self.counts == "row_offsets"
        doc = (
            "first new row of each request; None: one each" if by_rows else "new tokens of each request; None: one each"
        )
        counts = Array(
            self.counts,
            index.name,
            ("B+1" if by_rows else "B",),
            optional=True,
            untrusted=True,
            doc=doc,
            field="index_dtype",
        )
        doc = "lengths with the new tokens; may be the lengths themselves"
        params = (
            Array(
                "new_lengths", lengths.name, ("B",), access="out", doc=doc, field="lengths_dtype", in_place=("lengths",)
            ),
            counts,
            ERRORS,
        )
        context = AdvanceContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            threads=THREADS,
            length=lengths.c,
            by_rows=by_rows,
        )
        grid = (ceil_div(var("B"), THREADS), const(1), const(1))
        return (KernelPlan(self.name, context.entry, "ops/advance.cu.j2", context, params, grid, THREADS),)
