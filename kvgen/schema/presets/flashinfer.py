"""FlashInfer."""

from __future__ import annotations

from typing import Literal

from kvgen.layout.dtypes import FloatName
from kvgen.schema.cache import Latent, Paged
from kvgen.schema.cache_fields import Layout
from kvgen.schema.preset_call import preset
from kvgen.schema.presets.quants import KVCacheDType, nvfp4, per_tensor, record_v4
from kvgen.schema.presets.vllm import nvfp4_layout
from kvgen.schema.quant import Block, Quant
from kvgen.schema.tables import CSR


@preset
def flashinfer_nhd(
    *,
    dtype: FloatName,
    kv_heads: int,
    head_dim: int,
    page_size: int = 16,
    kv_cache_dtype: KVCacheDType = "auto",
) -> Paged:
    """FlashInfer, `kv_layout="NHD"`, as of 0.7: one tensor per layer.

    `[N, 2, P, H, D]`: strides `(2*P*H*D, P*H*D, H*D, D, 1)`. Table: `kv_indices` i32 and `kv_indptr` i32 `[B + 1]`.
    Lengths: `kv_last_page_len` i32, this step included. fp8: FlashInfer's append copies what it is given and its `run`
    takes `k_scale` and `v_scale` as floats; here they are arrays `[1, 1]`. Source: flashinfer/page.py,
    append_paged_kv_cache; include/flashinfer/page.cuh, paged_kv_t::get_length; flashinfer/decode.py. Its form with K and V
    in two tensors is `flash_attention`'s layout.
    """
    layout = Layout(kv="page kv token head dim", layers="pointers")
    return _flashinfer(dtype, kv_heads, head_dim, page_size, layout, per_tensor(kv_cache_dtype))


@preset
def flashinfer_hnd(
    *,
    dtype: FloatName,
    kv_heads: int,
    head_dim: int,
    page_size: int = 16,
    kv_cache_dtype: KVCacheDType = "auto",
) -> Paged:
    """FlashInfer, `kv_layout="HND"`, as of 0.7: one tensor per layer; otherwise as `flashinfer_nhd`.

    `[N, 2, H, P, D]`: strides `(2*H*P*D, H*P*D, P*D, D, 1)`.
    """
    layout = Layout(kv="page kv head token dim", layers="pointers")
    return _flashinfer(dtype, kv_heads, head_dim, page_size, layout, per_tensor(kv_cache_dtype))


@preset
def flashinfer_nvfp4(
    *,
    dtype: FloatName,
    kv_heads: int,
    head_dim: int,
    page_size: int = 16,
    kv_layout: Literal["NHD", "HND"] = "NHD",
    swizzled_v_scales: bool = False,
) -> Paged:
    """FlashInfer's nvfp4 cache, as of 0.6.18: K, V and their scales in tensors of their own (its tuple form).

    NHD: codes u8 `[N, P, H, D/2]`, strides `(P*H*D/2, H*D/2, D/2, 1)`; scales e4m3 `[N, P, H, D/16]`, row-major. HND: P
    and H change places. nvfp4_quantize_append_paged_kv_cache writes both scales so; nvfp4_quantize_paged_kv_cache, for
    trtllm-gen kernels, interleaves V's by 4 tokens (`swizzled_v_scales=True`): pass them as `[N, H, P/4, D/16, 4]` (NHD:
    `[N, P/4, 4, H, D/64, 4]`), with P a multiple of 4 and D of 64. `k_global_scale` and `v_global_scale`, f32 `[1]`, are
    the append's `k_scale` and `v_scale`: values are e2m1 * e4m3 * f32. FlashInfer multiplies by a reciprocal and keeps
    -0: codes may differ in rare ties and in the sign of zero. Table and lengths as `flashinfer_nhd`. Source:
    flashinfer/page.py and include/flashinfer/page.cuh, nvfp4_append_quantize_block;
    flashinfer/quantization/fp4_quantization.py.
    """
    layout = nvfp4_layout(kv_layout, head_dim, swizzled_v_scales=swizzled_v_scales)
    return _flashinfer(dtype, kv_heads, head_dim, page_size, layout, nvfp4())


@preset
def flashinfer_mla(
    *, dtype: FloatName = "bf16", latent_dim: int = 512, rope_dim: int = 64, page_size: int = 64
) -> Latent:
    """FlashInfer's BatchMLAPagedAttentionWrapper, as of 0.6.18: latent and RoPE parts in two tensors, K only.

    Two tensors per layer, ckv `[N, P, 512]` and kpe `[N, P, 64]`: strides `(P*512, 512, 1)` and `(P*64, 64, 1)`; pass
    `ckv_cache.unsqueeze(2)` and `kpe_cache.unsqueeze(2)`. Table: `kv_indices` i32 and `kv_indptr` i32 `[B + 1]`. Lengths:
    `kv_len_arr` i32, this step included. Its fp8 form quantizes kpe too, with a scale of its own: no preset. Source:
    flashinfer/mla/_core.py, plan and run; flashinfer/page.py, append_paged_mla_kv_cache; paged_kv_mla_t in page.cuh.
    """
    return Latent(
        dtype=dtype,
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        page_size=page_size,
        layout=Layout(k="page token head dim", rope="page token head dim", layers="pointers"),
        table=CSR(dtype="i32"),
        lengths="after",
        lengths_dtype="i32",
    )


@preset
def flashinfer_v4_nvfp4(
    *, dtype: FloatName = "bf16", latent_dim: int = 448, rope_dim: int = 64, page_size: int = 64, rate: int = 1
) -> Latent:
    """FlashInfer's NVFP4 rows of DeepSeek V4 (its pull request 4955, 2026): 384 bytes a row, K and V at once.

    A tensor per layer: pass the pages' bytes, `[N, P*384]`, strides in bytes `(page bytes, 1)`. A page: P rows of 224
    bytes of e2m1, the even dim in the low nibble | 64 bf16, 352 bytes each, then 32 bytes of scales a row, 28 e4m3, one
    per 16 dims, and 4 zeros; pages lie a multiple of 16 bytes apart. P is 64, of entries (`rate`) 64 or 2. Table: page
    ids i32 `[B, max_pages]`, for append; FlashInfer's attention takes indices. Lengths: i32, this step included.
    FlashInfer keeps -0 as a code, kvgen has +0. SGLang's pull request 38646 has the same rows. Source: csrc and
    flashinfer/mla of that pull request.
    """
    quant = Quant(
        dtype="e2m1",
        scale_dtype="e4m3",
        recipe="amax",
        block=Block(dim=16),
        place="page",
        scale_pad=latent_dim // 16 + 4,
    )
    return record_v4(dtype, latent_dim, rope_dim, page_size, rate, quant, page_align=16)


def _flashinfer(
    dtype: FloatName, kv_heads: int, head_dim: int, page_size: int, layout: Layout, quant: Quant | None
) -> Paged:
    return Paged(
        dtype=dtype,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        layout=layout,
        table=CSR(dtype="i32", last_page_len=True),
        lengths="after",
        lengths_dtype="i32",
        quant=quant,
    )
