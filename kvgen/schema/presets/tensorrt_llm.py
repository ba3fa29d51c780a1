"""TensorRT-LLM."""

from __future__ import annotations

from typing import Literal

from kvgen.layout.dtypes import FloatName
from kvgen.schema.cache import Paged
from kvgen.schema.cache_fields import Layout
from kvgen.schema.preset_call import preset
from kvgen.schema.presets.quants import nvfp4, per_tensor
from kvgen.schema.quant import Quant
from kvgen.schema.tables import PerKV


@preset
def tensorrt_llm(
    *,
    dtype: FloatName,
    kv_heads: int,
    head_dim: int,
    page_size: int = 32,
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "int8"] = "auto",
) -> Paged:
    """TensorRT-LLM's KVBlockArray (main branch, 2025 and 2026): HND blocks, with offsets of their own for K and V.

    A view per layer of the primary pool, `[blocks, H, P, D]`: strides `(H*P*D, P*D, D, 1)`. The pool is `[N, L, 2,
    H*P*D]`: layer l's view begins at its element 2*l*H*P*D, and a block has the offsets `block * L * 2` (K) and
    `block * L * 2 + 1` (V). Table: block offsets i32 `[B, 2, max_blocks]` (beam width 1; the bit that marks the
    secondary pool must be clear). TensorRT-LLM wants a power of 2 for `page_size`. Lengths: i32, this step included
    (its `sequence_length`, by convention). fp8 and int8: one scale for K and V, `qkv_scale_quant_orig[0]`, passed twice
    as `[1, 1]`; TensorRT-LLM's int8 codes reach -128, kvgen's -127. Source:
    cpp/tensorrt_llm/kernels/kvCacheUtils.h, KVBlockArray::getRowPtr and getKVLocalIdx;
    cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp, getKOrVBlockIndex; unfusedAttentionKernels_2_template.h,
    applyBiasRopeUpdateKVCache.
    """
    layout = Layout(kv="page head token dim", layers="pointers")
    return _tensorrt_llm(dtype, kv_heads, head_dim, page_size, layout, per_tensor(kv_cache_dtype))


@preset
def tensorrt_llm_nvfp4(*, dtype: FloatName, kv_heads: int, head_dim: int, page_size: int = 32) -> Paged:
    """TensorRT-LLM's nvfp4 cache (main branch, 2025 and 2026): a pool of codes and one of block scales, same offsets.

    Views per layer: codes u8 `[blocks, H, P, D/2]`, strides `(H*P*D/2, P*D/2, D/2, 1)`; scales e4m3 of the block scale
    pool, K's `[blocks, H, P, D/16]`, linear, and V's the same bytes as `[blocks, H, P/4, D/16, 4]`: 4 tokens interleaved
    (P a multiple of 4). Table and lengths as `tensorrt_llm`. The second-level scales `k_global_scale` and
    `v_global_scale`, f32 `[1]`, are the reciprocals of `qkv_scale_orig_quant[1]` and `[2]`. Source:
    cpp/tensorrt_llm/kernels/unfusedAttentionKernels/unfusedAttentionKernels_2_template.h, quantizeAndWriteFP4KVCache.
    """
    layout = Layout(
        kv="page head token dim",
        scales="page head token dim",
        v_scales="page head token/4 dim token%4",
        layers="pointers",
    )
    return _tensorrt_llm(dtype, kv_heads, head_dim, page_size, layout, nvfp4())


def _tensorrt_llm(
    dtype: FloatName, kv_heads: int, head_dim: int, page_size: int, layout: Layout, quant: Quant | None
) -> Paged:
    return Paged(
        dtype=dtype,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        layout=layout,
        table=PerKV(dtype="i32"),
        lengths="after",
        lengths_dtype="i32",
        quant=quant,
    )
