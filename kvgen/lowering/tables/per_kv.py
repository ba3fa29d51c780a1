"""Two rows of page ids a request: K's, then V's."""

from __future__ import annotations

from kvgen.lowering.cache_kinds import cache_kind
from kvgen.lowering.tables.base import TableForm, row_entries
from kvgen.plan.params import Array, Size
from kvgen.spec.cache import Cache
from kvgen.spec.tables import PerKV


def form(cache: Cache, table: PerKV) -> TableForm:
    """Both rows have as many columns."""
    doc, field = "page ids of each request", cache_kind(cache).table_field
    v = "i + cache.kv_table_stride"
    return TableForm(
        template="cache/per_kv.j2",
        fields=(
            Array("page_table", table.dtype, ("B", 2, "M"), strided=True, untrusted=True, doc=doc, field=field),
            Size("table_stride", "i64", "page_table.stride"),
            Size("kv_table_stride", "i64", "M"),
            Size("table_pages", "u32", "M"),
        ),
        array="page_table",
        entries=(
            row_entries("page_table", "table_stride", at="2 * (uint64_t)b", id="k_id"),
            row_entries("page_table", "table_stride", column=v, at="2 * (uint64_t)b + 1", id="v_id"),
        ),
        ids=("k_id", "v_id"),
        fresh=("B", 2),
    )
