"""Page tables as kernels see them: a module a form, and `table_form`, which asks a cache for its own."""

from __future__ import annotations

from kvgen.lowering.tables import csr, dense, indirect, mapped, offsets, per_kv, ring, states
from kvgen.lowering.tables.base import EntryList, TableForm
from kvgen.schema.any_cache import AnyCache
from kvgen.schema.tables import CSR, Dense, Indirect, Mapped, Offsets, PerKV, Ring, States

__all__ = ["EntryList", "TableForm", "table_form"]


def table_form(cache: AnyCache) -> TableForm:
    """The page table of a cache: the only place of lowering that asks for its class."""
    match cache.page_table:
        case Dense() as table:
            return dense.form(cache, table)
        case CSR() as table:
            return csr.form(cache, table)
        case PerKV() as table:
            return per_kv.form(cache, table)
        case Indirect() as table:
            return indirect.form(cache, table)
        case Mapped() as table:
            return mapped.form(cache, table)
        case Ring() as table:
            return ring.form(cache, table)
        case Offsets() as table:
            return offsets.form(cache, table)
        case States() as table:
            return states.form(cache, table)
