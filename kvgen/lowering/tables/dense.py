"""A row of page ids a request, or the id of the one block that holds it; scales may have a second table."""

from __future__ import annotations

from kvgen.layout.dtypes import dtype
from kvgen.lowering.allocation import allocation_of
from kvgen.lowering.tables.base import EntryList, TableForm
from kvgen.plan.params import Array, Size
from kvgen.schema.any_cache import AnyCache
from kvgen.schema.tables import Dense


def form(cache: AnyCache, table: Dense) -> TableForm:
    """Rows of any length and stride; where a request has one page, an entry each."""
    allocation, own_scales = allocation_of(cache), cache.storage.own_table
    fields: list[Array | Size]
    if allocation.one_page:
        fields = [
            Array(
                "page_table",
                table.dtype,
                ("B",),
                untrusted=True,
                doc="block of each request",
                field=allocation.table_field,
            ),
            Size("table_stride", "i64", "one"),
            Size("table_pages", "u32", "one"),
        ]
        entries = [EntryList("page_table")]
    else:
        fields = [
            Array(
                "page_table",
                table.dtype,
                ("B", "M"),
                strided=True,
                untrusted=True,
                align=table.align * dtype(table.dtype).bytes,
                doc="page ids of each request",
                field=allocation.table_field,
            ),
            Size("table_stride", "i64", "page_table.stride"),
            Size("table_pages", "u32", "M"),
        ]
        entries = [EntryList("page_table", "table_stride")]
    if own_scales:
        doc, field = "page ids of each request's scales", allocation.table_field
        fields += [
            Array("scales_page_table", table.dtype, ("B", "MS"), strided=True, untrusted=True, doc=doc, field=field),
            Size("scales_table_stride", "i64", "scales_page_table.stride"),
            Size("scales_table_pages", "u32", "MS"),
        ]
        entries.append(
            EntryList("scales_page_table", "scales_table_stride", "fresh_scales", "scale_id", "num_scale_pages")
        )
    return TableForm(
        template="cache/dense.j2",
        policy="DenseTables" if own_scales else "DenseTable",
        fields=tuple(fields),
        array="page_table",
        entries=tuple(entries),
        ids=("id", "scale_id") if own_scales else ("id",),
        vector=table.align,
        copied_whole=allocation.one_page,
        rewritten_as=() if allocation.one_page else ("csr",),
    )
