"""The oracles: what every operation must do, in NumPy and float64, written from the semantics and from nothing else.

They work on logical arrays `[page, token, head, dim]`; `elements` maps those to raw memory by NumPy reshape and transpose
of the axes that a spec names, `quant` has the codes and scales of one block, `segments` the blocks of a row, `pool` finds
K and V in an engine's tensors, `tables` answers which page holds a token. None uses kvgen.layout, kvgen.expr or a cache's storage
beyond its names, which they are there to check.
"""

from kvgen.reference.adding import lora_add, rows_add, sliced_add
from kvgen.reference.append import append
from kvgen.reference.convert import convert
from kvgen.reference.decode import Decoded, attend, decode
from kvgen.reference.faults import FaultLog
from kvgen.reference.gather import Gathered, gather, gather_raw
from kvgen.reference.gather_rows import gather_rows
from kvgen.reference.lengths import advance, row_offsets
from kvgen.reference.merge_states import merge_states
from kvgen.reference.mla_decode import mla_decode, mla_decode_sparse
from kvgen.reference.mla_decompress import mla_decompress
from kvgen.reference.mla_plan import Chunked, mla_plan
from kvgen.reference.page_lists import to_csr, to_dense
from kvgen.reference.pages import compact, compact_plan, copy_pages, overlaps, reorder
from kvgen.reference.pool import Rows, cache_rows
from kvgen.reference.scatter import scatter, scatter_raw
from kvgen.reference.seal import seal
from kvgen.reference.slots import remap_indices, slot_mapping
from kvgen.reference.store_scales import store_scales
from kvgen.reference.tables import Place, TableView

__all__ = [
    "Chunked",
    "Decoded",
    "FaultLog",
    "Gathered",
    "Place",
    "Rows",
    "TableView",
    "advance",
    "append",
    "attend",
    "cache_rows",
    "compact",
    "compact_plan",
    "convert",
    "copy_pages",
    "decode",
    "gather",
    "gather_raw",
    "gather_rows",
    "lora_add",
    "merge_states",
    "mla_decode",
    "mla_decode_sparse",
    "mla_decompress",
    "mla_plan",
    "overlaps",
    "remap_indices",
    "reorder",
    "row_offsets",
    "rows_add",
    "scatter",
    "scatter_raw",
    "seal",
    "sliced_add",
    "slot_mapping",
    "store_scales",
    "to_csr",
    "to_dense",
]
