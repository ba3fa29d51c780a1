"""All page ids in one list, a slice a request."""

from __future__ import annotations

from kvgen.lowering.allocation import allocation_of
from kvgen.lowering.tables.base import EntryList, TableForm
from kvgen.plan.params import Array, Size
from kvgen.schema.any_cache import AnyCache
from kvgen.schema.tables import CSR


def form(cache: AnyCache, table: CSR) -> TableForm:
    """With last_page_len, which has a text of its own, lengths follow from the lists."""
    index, field = table.dtype, allocation_of(cache).table_field
    fields: list[Array | Size] = [
        Array(
            "page_indices",
            index,
            ("I",),
            untrusted=True,
            doc="page ids of all requests",
            field=field,
        ),
        Array(
            "page_indptr",
            index,
            ("B+1",),
            untrusted=True,
            doc="where each request's ids begin",
            field=field,
        ),
        Size("num_indices", "u32", "I"),
    ]
    if table.last_page_len:
        doc = "tokens in each request's last page"
        fields.append(Array("last_page_len", index, ("B",), untrusted=True, doc=doc, field=field))
    return TableForm(
        template="cache/csr_last.j2" if table.last_page_len else "cache/csr.j2",
        policy="CsrLastTable" if table.last_page_len else "CsrTable",
        fields=tuple(fields),
        array="page_indices",
        entries=(EntryList("page_indices"),),
        slices=True,
        rewritten_as=("dense",),
    )
