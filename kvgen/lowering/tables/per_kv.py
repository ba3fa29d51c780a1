"""Two rows of page ids a request: K's, then V's."""

from __future__ import annotations

from kvgen.lowering.allocation import allocation_of
from kvgen.lowering.tables.base import EntryList, TableForm
from kvgen.plan.params import Array, Size
from kvgen.schema.any_cache import AnyCache
from kvgen.schema.tables import PerKV


def form(cache: AnyCache, table: PerKV) -> TableForm:
    """Both rows have as many columns."""
    doc, field = "page ids of each request", allocation_of(cache).table_field
    return TableForm(
        template="cache/per_kv.j2",
        policy="PerKvTable",
        fields=(
            Array("page_table", table.dtype, ("B", 2, "M"), strided=True, untrusted=True, doc=doc, field=field),
            Size("table_stride", "i64", "page_table.stride"),
            Size("kv_table_stride", "i64", "M"),
            Size("table_pages", "u32", "M"),
        ),
        array="page_table",
        entries=(
            EntryList("page_table", "table_stride", id="k_id"),
            EntryList("page_table", "table_stride", id="v_id", second=True),
        ),
        ids=("k_id", "v_id"),
        fresh=("B", 2),
    )
