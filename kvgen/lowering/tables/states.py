"""The id of one state a request."""

from __future__ import annotations

from kvgen.lowering.allocation import allocation_of
from kvgen.lowering.tables.base import EntryList, TableForm
from kvgen.plan.params import Array
from kvgen.schema.any_cache import AnyCache
from kvgen.schema.tables import States


def form(cache: AnyCache, table: States) -> TableForm:
    """An entry a request; requests share no state, which each of them goes on to change."""
    doc, field = "state of each request, -1: it has none", allocation_of(cache).table_field
    return TableForm(
        template="cache/states.j2",
        fields=(Array("state_ids", table.dtype, ("B",), untrusted=True, doc=doc, field=field),),
        array="state_ids",
        entries=(EntryList("state_ids"),),
        copied_whole=True,
    )
