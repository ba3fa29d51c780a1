"""The oracles: what every operation must do, in NumPy and float64, written from the semantics and from nothing else.

They work on logical arrays `[page, token, head, dim]`; `elements` maps those to raw memory by NumPy reshape and transpose
of the axes that a spec names, `quant` has the codes and scales of one block, `segments` the blocks of a row, `pool` finds
K and V in an engine's tensors, `tables` answers which page holds a token. None uses kvgen.layout, kvgen.expr or a cache's storage
beyond its names, which they are there to check.
"""

from kvgen.reference.advance import advance
from kvgen.reference.append import append
from kvgen.reference.compact import compact, compact_plan
from kvgen.reference.convert import convert
from kvgen.reference.copy_pages import copy_pages, overlaps
from kvgen.reference.decode import Decoded, attend, decode
from kvgen.reference.faults import FaultLog
from kvgen.reference.gather import Gathered, gather, gather_raw
from kvgen.reference.gather_rows import gather_rows
from kvgen.reference.lora_add import lora_add
from kvgen.reference.merge_states import merge_states
from kvgen.reference.mla_decode import mla_decode, mla_decode_sparse
from kvgen.reference.mla_decompress import mla_decompress
from kvgen.reference.mla_plan import Chunked, mla_plan
from kvgen.reference.norm_cache import norm_cache
from kvgen.reference.pool import Rows, cache_rows
from kvgen.reference.remap_indices import remap_indices
from kvgen.reference.reorder import reorder
from kvgen.reference.rotate_cache import rotate_cache
from kvgen.reference.row_offsets import row_offsets
from kvgen.reference.rows_add import rows_add
from kvgen.reference.scatter import scatter, scatter_raw
from kvgen.reference.seal import seal
from kvgen.reference.sliced_add import sliced_add
from kvgen.reference.slot_mapping import slot_mapping
from kvgen.reference.store_scales import store_scales
from kvgen.reference.swap_pages import swap_pages
from kvgen.reference.tables import Place, TableView
from kvgen.reference.to_csr import to_csr
from kvgen.reference.to_dense import to_dense

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
    "norm_cache",
    "overlaps",
    "remap_indices",
    "reorder",
    "rotate_cache",
    "row_offsets",
    "rows_add",
    "scatter",
    "scatter_raw",
    "seal",
    "sliced_add",
    "slot_mapping",
    "store_scales",
    "swap_pages",
    "to_csr",
    "to_dense",
]
