"""to_dense: page ids of CSR's lists, Mapped's rows or Indirect's slots, as rows of a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field

from kvgen.expr.nodes import ceil_div, const, maximum, var
from kvgen.layout.dtypes import dtype
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.lowered import lower
from kvgen.lowering.new_rows import counts_before, step_offsets
from kvgen.ops.base import COLUMNS, WARPS, PageListOp
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Param, Size
from kvgen.schema.kernel_set import KernelSet
from kvgen.schema.tables import IndexName


@dataclass(frozen=True)
class ToDenseContext:
    """Everything ops/to_dense.cu.j2 reads: `pages` counts those of request b; lists that are `counted` say lengths too; an id
    is `multiplier` pages; `grouped` slots are pages of so many."""

    entry: str
    params: tuple[str, ...]
    warps: int
    columns: int
    sliced: bool
    before: bool
    counted: bool
    element: str
    length: str
    fill: int
    filled: bool
    multiplier: int
    grouped: bool


class ToDense(PageListOp):
    """Write the page ids of a CSR, a Mapped or an Indirect table as rows of a Dense one: `page_table[B, C]`.

    With CSR a request has the pages of its slice. With Mapped and Indirect it has those of its tokens; where the spec's
    lengths are "before", its rows of `row_offsets[B + 1]` count as tokens too. Entries are copied as they are. Entries behind
    a request's last page become `fill`. Where the CSR table has `last_page_len`, `lengths[B]` (optional) gets the tokens of
    each request, 0 where its slice is wrong.

    With `page_tokens=n` slots of an Indirect table become pages of n tokens, page slot // n of a request's every n-th token, for
    pools whose allocator hands out such pages whole (SGLang with a page size): one table for all caches of the request whose
    pages stand for n tokens, whatever their `rate`. A page's first slot that is no multiple of n is reported (SLOT).

    An id outside the pool is reported and becomes `fill`. Pages that C columns do not hold are reported and left out. A
    request whose slice, length or offsets cannot be is reported and has no pages.
    """

    kind: ClassVar[str] = "to_dense"
    table_dtype: IndexName = "i32"
    """Element type of `page_table`."""
    page_tokens: int = Field(default=1, ge=1, le=2**20)
    """Tokens of a page of the table that is written, of an Indirect table's slots. 1: entries are copied as they are."""

    def check(self, kernels: KernelSet) -> None:
        cache = kernels.kv
        if "dense" not in lower(cache).table.rewritten_as:
            raise ValueError(
                f"ops: got to_dense with table={type(cache.page_table).__name__}(); it makes rows of CSR's lists, "
                "of Mapped's rows and of Indirect's slots"
            )
        if self.page_tokens > 1 and (not cache.page_table.token_slots or cache.page_table.id_multiplier > 1):
            raise ValueError(
                f"page_tokens: got {self.page_tokens} with table={type(cache.page_table).__name__}(id_multiplier="
                f"{cache.page_table.id_multiplier}); it makes pages of slots of tokens, which Indirect() has; leave it out"
            )

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache, entries = kernels.kv, dtype(self.table_dtype)
        counted, lengths = cache.page_table.counts_tokens, dtype(cache.lengths_dtype)
        sliced = lower(cache).table.slices
        doc = "page ids of each request"
        params: list[Param] = [
            Array("page_table", entries.name, ("B", "C"), access="out", strided=True, doc=doc, field="table_dtype"),
            Size("page_table_stride", "i64", "page_table.stride"),
            Size("columns", "u32", "C"),
        ]
        if counted:
            doc = "tokens of each request"
            params.append(
                Array("lengths", lengths.name, ("B",), access="out", optional=True, doc=doc, field="lengths_dtype")
            )
        if not sliced:
            params.append(step_offsets(self._index(cache)))
        params.append(ERRORS)
        context = ToDenseContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            warps=WARPS,
            columns=COLUMNS,
            sliced=sliced,
            before=counts_before(cache),
            counted=counted,
            element=entries.c,
            length=lengths.c,
            fill=self.fill or 0,
            filled=self.fill is not None,
            multiplier=max(cache.page_table.id_multiplier, self.page_tokens),
            grouped=self.page_tokens > 1,
        )
        # A row of no columns has its pages reported too.
        grid = (ceil_div(var("B"), WARPS), maximum(ceil_div(var("C"), COLUMNS), 1), const(1))
        plan = KernelPlan(self.name, context.entry, "ops/to_dense.cu.j2", context, tuple(params), grid, WARPS * 32)
        return (plan,)
