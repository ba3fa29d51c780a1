"""A row of page ids a request, in a table of every request there is: the step's requests say which rows are theirs."""

from __future__ import annotations

from kvgen.lowering.allocation import allocation_of
from kvgen.lowering.tables.base import EntryList, TableForm
from kvgen.plan.params import Array, Size
from kvgen.schema.any_cache import AnyCache
from kvgen.schema.tables import Mapped


def form(cache: AnyCache, table: Mapped) -> TableForm:
    """Rows are those of all requests there are, not of the batch."""
    return TableForm(
        template="cache/mapped.j2",
        policy="MappedTable",
        fields=(
            Array(
                "page_table",
                table.dtype,
                ("R", "M"),
                strided=True,
                untrusted=True,
                doc="page ids of each row",
                field=allocation_of(cache).table_field,
            ),
            Array(
                "idx_mapping",
                table.request_dtype,
                ("B",),
                untrusted=True,
                doc="row of page_table of each request",
                field="table.request_dtype",
            ),
            Size("table_stride", "i64", "page_table.stride"),
            Size("table_pages", "u32", "M"),
            Size("table_rows", "u32", "R"),
        ),
        array="page_table",
        entries=(EntryList("page_table", "table_stride"),),
        rewritten_as=("csr", "dense"),
    )
