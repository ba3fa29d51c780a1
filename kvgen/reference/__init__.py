"""The oracles: what every operation must do, in NumPy and float64, written from the semantics and from nothing else.

They work on logical arrays `[page, token, head, dim]`; `elements` maps those to raw memory by NumPy reshape and transpose
of the axes that a spec names, `quant` has the codes and scales of one block, `segments` the blocks of a row, `pool` finds
K and V in an engine's tensors, `tables` answers which page holds a token. None uses kvgen.layout, kvgen.expr or a cache's
storage beyond its names, which they are there to check.
"""

from kvgen.reference.append import append
from kvgen.reference.decode import Decoded, attend, decode
from kvgen.reference.faults import FaultLog
from kvgen.reference.gather import Gathered, gather
from kvgen.reference.pool import Rows, cache_rows
from kvgen.reference.seal import seal
from kvgen.reference.tables import Place, TableView

__all__ = [
    "Decoded",
    "FaultLog",
    "Gathered",
    "Place",
    "Rows",
    "TableView",
    "append",
    "attend",
    "cache_rows",
    "decode",
    "gather",
    "seal",
]
