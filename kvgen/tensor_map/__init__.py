"""Tensor maps as plans: what a tensor copy (TMA) must know of a cache, one function for each form of it.

Pure numbers: `kvgen.runtime.tensor_map.encode` makes the 128 bytes of a plan. Dimensions, coordinates and boxes stand
from the fastest to the slowest, as the hardware takes them. An element outside of a dimension is not touched: a load
fills it, a store drops it.

A tile of `rows` x `depth` elements lies in shared memory as chunks of `gran` columns, one behind the other, each chunk
`rows` lines of one swizzle span. Packed 4-bit elements are given as the bytes that hold them.
"""

from kvgen.tensor_map.forms import (
    fold_chunks,
    folded_tile,
    gather4,
    group_tile,
    head_steps,
    index_scale_tile,
    ragged_tile,
    rope_gather4,
    rope_tile,
    scale_tile,
    split_tile,
)
from kvgen.tensor_map.plan import Promotion, Swizzle, TensorMapPlan, chunk_elements, element, padded_depth
from kvgen.tensor_map.views import PageView, RowView, kv_tma_coords, rope_view

__all__ = [
    "PageView",
    "Promotion",
    "RowView",
    "Swizzle",
    "TensorMapPlan",
    "chunk_elements",
    "element",
    "fold_chunks",
    "folded_tile",
    "gather4",
    "group_tile",
    "head_steps",
    "index_scale_tile",
    "kv_tma_coords",
    "padded_depth",
    "ragged_tile",
    "rope_gather4",
    "rope_tile",
    "rope_view",
    "scale_tile",
    "split_tile",
]
