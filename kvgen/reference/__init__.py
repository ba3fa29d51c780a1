"""The oracles: what every operation must do, in NumPy and float64, written from the semantics and from nothing else.

They work on logical arrays `[page, token, head, dim]`; `elements` maps those to raw memory by NumPy reshape and transpose
of the axes that a spec names, `quant` has the codes and scales of one block, `segments` the blocks of a row, `pool` finds
K and V in an engine's tensors, `tables` answers which page holds a token. None uses kvgen.layout, kvgen.expr or a cache's storage
beyond its names, which they are there to check.
"""

from kvgen.reference.advance import advance as advance
from kvgen.reference.append import append as append
from kvgen.reference.attention_output import attention_output as attention_output
from kvgen.reference.combine_lists import combine_lists as combine_lists
from kvgen.reference.compact import compact as compact
from kvgen.reference.compact import compact_plan as compact_plan
from kvgen.reference.convert import convert as convert
from kvgen.reference.copy_pages import copy_pages as copy_pages
from kvgen.reference.copy_pages import overlaps as overlaps
from kvgen.reference.decode import Decoded as Decoded
from kvgen.reference.decode import attend as attend
from kvgen.reference.decode import decode as decode
from kvgen.reference.decode import decode_per_head as decode_per_head
from kvgen.reference.extend import Extended as Extended
from kvgen.reference.extend import extend as extend
from kvgen.reference.faults import FaultLog as FaultLog
from kvgen.reference.gather import Gathered as Gathered
from kvgen.reference.gather import gather as gather
from kvgen.reference.gather import gather_raw as gather_raw
from kvgen.reference.gather_rows import gather_rows as gather_rows
from kvgen.reference.gather_states import gather_states as gather_states
from kvgen.reference.indexer_query import indexer_query as indexer_query
from kvgen.reference.indexer_scores import Scored as Scored
from kvgen.reference.indexer_scores import candidate_scores as candidate_scores
from kvgen.reference.indexer_scores import indexer_scores as indexer_scores
from kvgen.reference.list_keys import list_keys as list_keys
from kvgen.reference.lora_add import lora_add as lora_add
from kvgen.reference.merge_states import merge_states as merge_states
from kvgen.reference.mla_decode import mla_decode as mla_decode
from kvgen.reference.mla_decode import mla_decode_sparse as mla_decode_sparse
from kvgen.reference.mla_decompress import mla_decompress as mla_decompress
from kvgen.reference.mla_plan import Chunked as Chunked
from kvgen.reference.mla_plan import mla_plan as mla_plan
from kvgen.reference.move_tokens import move_tokens as move_tokens
from kvgen.reference.norm_cache import norm_cache as norm_cache
from kvgen.reference.pool import Rows as Rows
from kvgen.reference.pool import cache_rows as cache_rows
from kvgen.reference.pool_tokens import pool_tokens as pool_tokens
from kvgen.reference.remap_indices import remap_indices as remap_indices
from kvgen.reference.reorder import reorder as reorder
from kvgen.reference.rotate_cache import rotate_cache as rotate_cache
from kvgen.reference.row_offsets import row_offsets as row_offsets
from kvgen.reference.rows_add import rows_add as rows_add
from kvgen.reference.scatter import scatter as scatter
from kvgen.reference.scatter import scatter_raw as scatter_raw
from kvgen.reference.scatter_states import scatter_states as scatter_states
from kvgen.reference.seal import seal as seal
from kvgen.reference.sliced_add import sliced_add as sliced_add
from kvgen.reference.slot_mapping import slot_mapping as slot_mapping
from kvgen.reference.store_scales import store_scales as store_scales
from kvgen.reference.swap_pages import swap_pages as swap_pages
from kvgen.reference.tables import Place as Place
from kvgen.reference.tables import TableView as TableView
from kvgen.reference.to_csr import to_csr as to_csr
from kvgen.reference.to_dense import to_dense as to_dense
from kvgen.reference.zero_pages import zero_pages as zero_pages
