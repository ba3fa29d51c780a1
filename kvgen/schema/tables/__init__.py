"""Page tables: how an engine says which page holds a request's tokens.

Every form answers one question, "which page holds logical page i of request b", and every entry is untrusted device data:
an id outside the pool is reported and skipped, never followed. An id is the entry times `id_multiplier`, checked after
scaling (an engine whose table counts big pages hands kvgen small ones).

A form is five files of one name: here what a user gives, in `kvgen/lowering/tables/` what kernels see of it, in
`kvgen/reference/tables/` how the oracles read it, in `templates/device/cache/tables/` how kernels find a page, in
`templates/cache/` where operations that rewrite tables find an entry.
"""

from __future__ import annotations

from kvgen.schema.tables.base import IndexName, PageTable
from kvgen.schema.tables.csr import CSR
from kvgen.schema.tables.dense import Dense
from kvgen.schema.tables.indirect import Indirect
from kvgen.schema.tables.mapped import Mapped
from kvgen.schema.tables.offsets import Offsets
from kvgen.schema.tables.per_kv import PerKV
from kvgen.schema.tables.ring import Ring
from kvgen.schema.tables.states import States

Table = Dense | CSR | PerKV | Indirect | Mapped | Ring

__all__ = [
    "CSR",
    "Dense",
    "IndexName",
    "Indirect",
    "Mapped",
    "Offsets",
    "PageTable",
    "PerKV",
    "Ring",
    "States",
    "Table",
]
