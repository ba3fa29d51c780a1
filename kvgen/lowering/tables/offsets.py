"""No pages: the rows of request b are [kv_offsets[b], kv_offsets[b + 1])."""

from __future__ import annotations

from kvgen.lowering.allocation import allocation_of
from kvgen.lowering.tables.base import TableForm
from kvgen.plan.params import Array
from kvgen.schema.any_cache import AnyCache
from kvgen.schema.tables import Offsets


def form(cache: AnyCache, table: Offsets) -> TableForm:
    """No entry names a page, so that none is looked up or replaced."""
    doc = "first row of each request, and where the last one ends"
    field = allocation_of(cache).table_field
    return TableForm(
        template="cache/offsets.j2",
        policy="OffsetsTable",
        fields=(Array("kv_offsets", table.dtype, ("B+1",), untrusted=True, doc=doc, field=field),),
        array="kv_offsets",
        entries=(),
    )
