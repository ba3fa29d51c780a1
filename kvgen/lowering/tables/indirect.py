"""A slot per token, in the row that the request's id names."""

from __future__ import annotations

from kvgen.lowering.allocation import allocation_of
from kvgen.lowering.tables.base import EntryList, TableForm
from kvgen.plan.params import Array, Size
from kvgen.schema.any_cache import AnyCache
from kvgen.schema.tables import Indirect


def form(cache: AnyCache, table: Indirect) -> TableForm:
    """Rows are those of all requests there are, not of the batch."""
    return TableForm(
        template="cache/indirect.j2",
        policy="IndirectTable",
        fields=(
            Array(
                "req_to_token",
                table.dtype,
                ("R", "M"),
                strided=True,
                untrusted=True,
                doc="slot of each token",
                field=allocation_of(cache).table_field,
            ),
            Array(
                "request_ids",
                table.request_dtype,
                ("B",),
                untrusted=True,
                doc="row of req_to_token of each request",
                field="table.request_dtype",
            ),
            Size("table_stride", "i64", "req_to_token.stride"),
            Size("table_pages", "u32", "M"),
            Size("table_rows", "u32", "R"),
        ),
        array="req_to_token",
        entries=(EntryList("req_to_token", "table_stride"),),
        rewritten_as=("csr", "dense"),
    )
