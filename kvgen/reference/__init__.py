"""The oracles: what every operation must do, in NumPy and float64, written from the semantics and from nothing else.

They work on logical arrays `[page, token, head, dim]`; `pool` maps those to raw memory by NumPy reshape and transpose
of the axes that a spec names, `tables` answers which page holds a token. Neither uses kvgen.layout or kvgen.expr, which
they are there to check.
"""

from kvgen.reference.append import append
from kvgen.reference.decode import Decoded, attend, decode
from kvgen.reference.faults import FaultLog
from kvgen.reference.gather import Gathered, gather
from kvgen.reference.pool import Rows, cache_rows
from kvgen.reference.tables import TableView

__all__ = ["Decoded", "FaultLog", "Gathered", "Rows", "TableView", "append", "attend", "cache_rows", "decode", "gather"]
