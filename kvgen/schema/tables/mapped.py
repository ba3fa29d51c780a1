"""A row of page ids a request, in a table of every request there is: the step's requests say which rows are theirs."""

from __future__ import annotations

from typing import Literal

from kvgen.schema.tables.base import IndexName, PageTable


class Mapped(PageTable):
    """`page_table[requests, max_pages]` read at row `idx_mapping[b]`: pages of any size (vLLM's block tables where they stay).

    vLLM's newer GPU model runner (2026) keeps `block_tables` i32 `[max_num_reqs, max_num_blocks]` on the device and makes
    `idx_mapping` i32 `[num_reqs]` every step; with this form no copy of the step's rows is made first. Source:
    vllm/v1/worker/gpu/block_table.py at commit 00bd1493, BlockTables, whose compute_slot_mappings reads them so and whose
    gather_block_tables makes the copy; model_runner.py beside it makes idx_mapping.
    """

    kind: Literal["mapped"] = "mapped"
    """Which form this is; set by the class."""
    dtype: IndexName = "i32"
    """Element type of `page_table[requests, max_pages]`."""
    request_dtype: IndexName = "i32"
    """Element type of `idx_mapping[B]`, the row of `page_table` that each request of the batch has."""
