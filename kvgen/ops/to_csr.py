"""to_csr: page ids of Dense's and Mapped's rows or Indirect's slots, as one list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvgen.expr.nodes import ceil_div, const, var
from kvgen.layout.dtypes import dtype
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.lowered import lower
from kvgen.lowering.new_rows import counts_before, step_offsets
from kvgen.ops.base import COLUMNS, WARPS, PageListOp
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Size
from kvgen.schema.kernel_set import KernelSet
from kvgen.schema.tables import IndexName


@dataclass(frozen=True)
class ToCsrContext:
    """Everything ops/to_csr.cu.j2 reads: `fill` counts if it is given (`filled`)."""

    entry: str
    params: tuple[str, ...]
    warps: int
    columns: int
    before: bool
    element: str
    fill: int
    filled: bool
    multiplier: int


class ToCsr(PageListOp):
    """Write the requests' page ids as one list in CSR form, as FlashInfer takes it.

    Request b has entries `page_indptr[b]` to `page_indptr[b + 1]` of `page_indices[J]`. These are the pages of its tokens;
    where the spec's lengths are "before", its rows of `row_offsets[B + 1]` count as tokens too. `last_page_len[B]` (optional)
    has the tokens in its last page, 0 without pages. Entries are copied as they are. Places of page_indices behind the last
    id are left as they are.

    An id outside the pool is reported and becomes `fill`. A request whose length or offsets cannot be, or whose table has too
    few pages, is reported and has none. Ids that page_indices has no room for are left out, and the first such request is
    reported; page_indptr counts them all the same, up to the largest index (2^31 - 1 in i32, else 2^32 - 2).
    """

    kind: ClassVar[str] = "to_csr"
    table_dtype: IndexName = "i32"
    """Element type of `page_indices`."""

    def check(self, kernels: KernelSet) -> None:
        cache = kernels.kv
        if "csr" not in lower(cache).table.rewritten_as:
            one_page = lower(cache).allocation.one_page
            which = f"a {type(cache).__name__} cache" if one_page else f"table={type(cache.page_table).__name__}()"
            raise ValueError(
                f"ops: got to_csr with {which}; it makes lists of Dense's and Mapped's rows and of Indirect's slots"
            )

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache, entries = kernels.kv, dtype(self.table_dtype)
        field = "table_dtype"
        params = (
            Array("page_indices", entries.name, ("J",), access="out", doc="page ids of all requests", field=field),
            Array(
                "page_indptr", entries.name, ("B+1",), access="out", doc="where each request's ids begin", field=field
            ),
            Array(
                "last_page_len",
                entries.name,
                ("B",),
                access="out",
                optional=True,
                doc="tokens in each last page",
                field=field,
            ),
            Size("num_indices", "u32", "J"),
            step_offsets(self._index(cache)),
            ERRORS,
        )
        context = ToCsrContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            warps=WARPS,
            columns=COLUMNS,
            before=counts_before(cache),
            element=entries.c,
            fill=self.fill or 0,
            filled=self.fill is not None,
            multiplier=cache.page_table.id_multiplier,
        )
        # The first id may lie anywhere in its sector of 32 bytes.
        grid = (ceil_div(var("B") + 1, WARPS), ceil_div(var("M") + (32 // entries.bytes - 1), COLUMNS), const(1))
        return (KernelPlan(self.name, context.entry, "ops/to_csr.cu.j2", context, params, grid, WARPS * 32),)
