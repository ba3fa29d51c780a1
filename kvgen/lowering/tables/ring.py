"""A row of page ids used as a ring: page i lies in column i % table_pages, and the newest tokens live."""

from __future__ import annotations

from kvgen.lowering.allocation import allocation_of
from kvgen.lowering.tables.base import EntryList, TableForm
from kvgen.plan.params import Array, Size
from kvgen.schema.any_cache import AnyCache
from kvgen.schema.tables import Ring


def form(cache: AnyCache, table: Ring) -> TableForm:
    """Columns are written again, so that requests share none: each has a free page for every one."""
    doc, field = "page ids of each request", allocation_of(cache).table_field
    return TableForm(
        template="cache/ring.j2",
        policy="RingTable",
        fields=(
            Array("page_table", table.dtype, ("B", "M"), strided=True, untrusted=True, doc=doc, field=field),
            Size("table_stride", "i64", "page_table.stride"),
            Size("table_pages", "u32", "M"),
        ),
        array="page_table",
        entries=(EntryList("page_table", "table_stride"),),
        window=table.window,
        wraps=True,
        copied_whole=True,
        fresh=("B", "M"),
    )
