"""vLLM."""

from __future__ import annotations

from typing import Literal

from kvgen.errors import SpecError
from kvgen.layout.dtypes import FloatName
from kvgen.layout.dtypes import dtype as element
from kvgen.schema.cache import Latent, Paged
from kvgen.schema.cache_fields import Layout
from kvgen.schema.preset_call import preset
from kvgen.schema.presets.quants import (
    TURBOQUANT,
    KVCacheDType,
    PerTokenHead,
    TurboQuant,
    fp4_amax,
    mixed_pow2,
    mxfp8,
    nvfp4,
    per_tensor,
    per_token_head,
    record_v4,
    turboquant,
)
from kvgen.schema.quant import Block, Quant
from kvgen.schema.rate import block_entries
from kvgen.schema.tables import Dense


@preset
def vllm(
    *,
    dtype: FloatName,
    kv_heads: int,
    head_dim: int,
    page_size: int = 16,
    kv_cache_dtype: KVCacheDType = "auto",
) -> Paged:
    """vLLM V1, FlashAttention backend, NHD: releases before its pull request 44455 (2026) packed K beside V.

    A tensor per layer, `[2, N, P, H, D]`: strides `(N*P*H*D, P*H*D, H*D, D, 1)`. Table: `block_table` i32
    `[B, max_blocks]`; `slot_mapping` i64 `[T]` for `Append(rows="slots")`. Lengths: `seq_lens` i32, this step included.
    The GPU model runner's block tables where they stay: `.model_copy(update={"table": Mapped()})`.
    fp8: codes are x / scale, cast (saturating); pass `layer._k_scale` and `layer._v_scale` as `[1, 1]`. Source:
    vllm/v1/attention/backends/flash_attn.py, FlashAttentionBackend.get_kv_cache_shape and get_kv_cache_stride_order;
    vllm/v1/worker/block_table.py, BlockTable; csrc/cache_kernels.cu, reshape_and_cache_flash_kernel.
    """
    layout = Layout(kv="kv page token head dim", layers="pointers")
    return _vllm(dtype, kv_heads, head_dim, page_size, layout, per_tensor(kv_cache_dtype))


@preset
def vllm_hnd(
    *,
    dtype: FloatName,
    kv_heads: int,
    head_dim: int,
    page_size: int = 16,
    kv_cache_dtype: KVCacheDType = "auto",
) -> Paged:
    """vLLM V1, FlashAttention backend with its cache layout set to HND; otherwise as `vllm`.

    A tensor per layer: vLLM's view is `[2, N, P, H, D]`, memory is `[2, N, H, P, D]`: pass
    `cache.permute(0, 1, 3, 2, 4)`, strides `(N*H*P*D, H*P*D, P*D, D, 1)`. Source: the same file, stride order
    (0, 1, 3, 2, 4).
    """
    layout = Layout(kv="kv page head token dim", layers="pointers")
    return _vllm(dtype, kv_heads, head_dim, page_size, layout, per_tensor(kv_cache_dtype))


@preset
def vllm_interleaved(
    *,
    dtype: FloatName,
    kv_heads: int,
    head_dim: int,
    page_size: int = 16,
    kv_cache_dtype: KVCacheDType = "auto",
) -> Paged:
    """vLLM V1, FlashInfer backend, NHD, before pull request 44455: K and V of a block side by side.

    A tensor per layer, `[N, 2, P, H, D]`: strides `(2*P*H*D, P*H*D, H*D, D, 1)`. Table, lengths and fp8 as `vllm`. Source:
    vllm/v1/attention/backends/flashinfer.py, FlashInferBackend.get_kv_cache_shape.
    """
    layout = Layout(kv="page kv token head dim", layers="pointers")
    return _vllm(dtype, kv_heads, head_dim, page_size, layout, per_tensor(kv_cache_dtype))


PackedOrder = Literal["LBNHC", "BLNHC", "LBHNC", "BLHNC", "LHBNC", "BHLNC"]

_PACKED: dict[PackedOrder, Layout] = {
    "LBNHC": Layout(kv="page token head kv dim", layers="pointers"),
    "BLNHC": Layout(kv="page token head kv dim", layers="pointers"),
    "LBHNC": Layout(kv="page head token kv dim", layers="pointers"),
    "BLHNC": Layout(kv="page head token kv dim", layers="pointers"),
    "LHBNC": Layout(kv="head page token kv dim", layers="pointers"),
    "BHLNC": Layout(kv="page head layer token kv dim"),
}


@preset
def vllm_packed(
    *,
    dtype: FloatName,
    kv_heads: int,
    head_dim: int,
    page_size: int = 16,
    kv_cache_dtype: KVCacheDType | PerTokenHead = "auto",
    order: PackedOrder = "LBNHC",
    total_pages: int | None = None,
    total_layers: int | None = None,
) -> Paged:
    """vLLM V1 since its pull request 44455 (2026): a head's V follows its K in one row of 2*D.

    vLLM's view of a layer is `[N, H, P, 2*D]` whatever the order of the memory, which its KVCacheLayout names: L layers, B
    blocks, N tokens of a block, H heads, C a row; strides are that order's. A tensor per layer: pass
    `cache.unflatten(-1, (2, D))`, for LBNHC and BLNHC with `permute(0, 2, 1, 3, 4)`, for LBHNC and BLHNC as it is (heads
    first, as NIXL's transfers want them), for LHBNC with `transpose(0, 1)` and `total_pages`, the blocks of the cache. For
    BHLNC pass all layers in one tensor `[N, H, L, P, 2, D]`, with `total_layers`. Table, lengths and fp8 as `vllm`.

    With "int8_per_token_head" or "fp8_per_token_head" (its pull request 38378) an f32 scale follows the codes of each
    head's K and V, a row of 2*(D+4) bytes: pass the cache as u8, `cache.view(torch.uint8)`, permuted as above but not
    unflattened, `[N, P, H, 2*(D+4)]` with LBNHC. vLLM multiplies by 1 / scale and rounds int8 codes half away from
    zero; kvgen divides and rounds to even, so that codes may differ by one in rare ties.

    Source: pull request 44455 and RFC 42082; get_kv_cache_shape `(N, H, P, 2*D)`, KVCacheLayout;
    vllm/v1/attention/backends/triton_attn.py, _ensure_scale_caches;
    vllm/v1/attention/ops/triton_reshape_and_cache_flash.py, _reshape_cache_per_token_head (0.32).
    """
    totals = {"total_pages": total_pages, "total_layers": total_layers}
    if kv_cache_dtype == "int8_per_token_head" or kv_cache_dtype == "fp8_per_token_head":
        return _vllm(dtype, kv_heads, head_dim, page_size, _PACKED[order], per_token_head(kv_cache_dtype), **totals)
    quant = per_tensor(kv_cache_dtype)
    return _vllm(dtype, kv_heads, head_dim, page_size, _PACKED[order], quant, **totals)


@preset
def vllm_turboquant(
    *,
    dtype: FloatName,
    kv_heads: int,
    head_dim: int,
    page_size: int = 16,
    kv_cache_dtype: TurboQuant = "turboquant_k8v4",
) -> Paged:
    """vLLM V1's turboquant caches (its pull request 38479, 2026): K and V of unlike width in one row a token and head.

    A tensor per layer, u8 `[N, P, H, S]`, strides `(P*H*S, H*S, S, 1)`; vLLM's view of it is `[N, H, P, S]`: pass
    `cache.transpose(1, 2)`. A row, S bytes where D is 128:

    - "turboquant_k8v4", 196: D e4m3 of K, cast | D/2 bytes of V in 4 bits | f16 scale and f16 least value of V.
    - "turboquant_4bit_nc", 134: D/2 bytes of K in 4 bits | f16 norm of K | V as above.
    - "turboquant_k3v4_nc", 118: 3*D/8 bytes of K in 3 bits | f16 norm | V as above.
    - "turboquant_3bit_nc", 102: K in 3 bits | f16 norm | 3*D/8 bytes of V in 3 bits | f16 scale and least value.

    Codes lie from a byte's lowest bit up. V is code * scale + least. K of the "_nc" caches is norm * c / |c|, c what the
    row's codes stand for: the centroids of vLLM's solver, for rows after the Hadamard transform, D a power of two:
    store them with `Append(rows="slots", hadamard="qk")`, which transforms q alike. Table and lengths as `vllm`. vLLM divides V
    by its scale before that is rounded to f16: codes of V may differ by one near ties. Below compute capability 8.9 vLLM
    stores e4m3 K as fp8e4b15, which kvgen has not, and on gfx950 pages in another order.

    Source: vllm/model_executor/layers/quantization/turboquant/config.py, TurboQuantConfig, and centroids.py;
    vllm/v1/attention/ops/triton_turboquant_store.py and triton_turboquant_decode.py (0.33).
    """
    if kv_cache_dtype not in TURBOQUANT:
        raise SpecError(f"kv_cache_dtype: got {kv_cache_dtype!r}; it must be one of {', '.join(map(repr, TURBOQUANT))}")
    keys, values = turboquant(kv_cache_dtype, head_dim)
    return Paged(
        dtype=dtype,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        layout=Layout(kv="page token head kv dim", layers="pointers"),
        table=Dense(dtype="i32"),
        lengths="after",
        lengths_dtype="i32",
        k_quant=keys,
        v_quant=values,
    )


@preset
def vllm_xpacked(
    *,
    dtype: FloatName,
    kv_heads: int,
    head_dim: int,
    page_size: int = 16,
    kv_cache_dtype: KVCacheDType = "auto",
) -> Paged:
    """vLLM's own paged_attention_v1 and v2 kernels: K in groups of x elements, 16 bytes of the cache; V transposed.

    Two tensors per layer: K `[N, H, D/x, P, x]`, strides `(H*D*P, D*P, P*x, x, 1)`; V `[N, H, D, P]`, strides
    `(H*D*P, D*P, P, 1)`. Table: `block_tables` i32 `[B, max_blocks]`. Lengths: `seq_lens` i32, this step included. fp8 as
    `vllm`, with x = 16. Source: vllm/attention/ops/paged_attn.py, PagedAttention.split_kv_cache;
    csrc/cache_kernels.cu, reshape_and_cache_kernel; csrc/attention/attention_kernels.
    """
    quant = per_tensor(kv_cache_dtype)
    x = 16 // (quant.codes if quant else element(dtype)).bytes
    layout = Layout(k=f"page head dim/{x} token dim%{x}", v="page head dim token", layers="pointers")
    return _vllm(dtype, kv_heads, head_dim, page_size, layout, quant)


@preset
def vllm_nvfp4(
    *,
    dtype: FloatName,
    kv_heads: int,
    head_dim: int,
    page_size: int = 16,
    kv_layout: Literal["NHD", "HND"] = "HND",
    swizzled_v_scales: bool = True,
) -> Paged:
    """vLLM V1's nvfp4 cache (2026): a page is K codes | K scales | V codes | V scales.

    Pass four views of a layer's u8 cache (`nvfp4_kv_cache_split_views`), HND: codes `[N, H, P, D/2]` and scales
    `[N, H, P, D/16]`, strides `(page bytes, P*D/2, D/2, 1)` and `(page bytes, P*D/16, D/16, 1)`. V's scales are the
    trtllm-gen kernel's, 4 tokens interleaved: pass them as `[N, H, P/4, D/16, 4]` (NHD: `[N, P/4, 4, H, D/64, 4]`), a
    `.view` of the same bytes; from compute capability 12 on they are linear (`swizzled_v_scales=False`). Needs P a
    multiple of 4 and D of 64 where swizzled. `k_global_scale` and `v_global_scale` are `layer._k_scale` and `_v_scale`,
    f32 `[1]`. Table and lengths as `vllm`. vLLM divides by approximate reciprocals: codes may differ in rare ties.
    Source: csrc/libtorch_stable/nvfp4_kv_cache_kernels.cu, swizzle_scale_offset and reshape_and_cache_nvfp4_dispatch.
    """
    layout = nvfp4_layout(kv_layout, head_dim, swizzled_v_scales=swizzled_v_scales)
    return _vllm(dtype, kv_heads, head_dim, page_size, layout, nvfp4())


def nvfp4_layout(kv_layout: Literal["NHD", "HND"], head_dim: int, *, swizzled_v_scales: bool) -> Layout:
    """K, V and the scales of each in tensors of their own; V's scales linear or as trtllm-gen kernels read them."""
    axes = "page token head dim" if kv_layout == "NHD" else "page head token dim"
    quarter = max(1, head_dim // 64)
    swizzled = {
        "HND": "page head token/4 dim token%4",
        "NHD": f"page token/4 dim/{quarter} head dim%{quarter} token%4",
    }[kv_layout]
    return Layout(k=axes, v=axes, scales=axes, v_scales=swizzled if swizzled_v_scales else None, layers="pointers")


@preset
def vllm_mla(
    *,
    dtype: FloatName = "bf16",
    latent_dim: int = 512,
    rope_dim: int = 64,
    page_size: int = 64,
    kv_cache_dtype: KVCacheDType = "auto",
) -> Latent:
    """vLLM V1's latent cache: rows of 512 + 64, K only.

    A tensor per layer, `[N, P, 576]`: strides `(P*576, 576, 1)`; pass `cache.unsqueeze(2)`. Table and lengths as `vllm`.
    fp8: the whole row, RoPE part included, with one scale: `layer._k_scale` as `[1, 1]`. Source: csrc/cache_kernels.cu,
    concat_and_cache_mla_kernel.
    """
    quant = per_tensor(kv_cache_dtype)
    return _mla(dtype, latent_dim, rope_dim, page_size, quant, quant_rope=quant is not None)


@preset
def vllm_mla_fp8(
    *, dtype: FloatName = "bf16", latent_dim: int = 512, rope_dim: int = 64, page_size: int = 64
) -> Latent:
    """vLLM V1's `fp8_ds_mla` (2025 and 2026): 656 bytes a token, FlashMLA's rows with scales amax / 448.

    A tensor per layer, u8 `[N, P, 656]`: strides in bytes `(P*656, 656, 1)`; pass `cache.unsqueeze(2)`. A row: 512 e4m3 |
    4 f32 scales, one per 128, at least the smallest normal number | 64 bf16. Table and lengths as `vllm`. Source:
    vllm/v1/attention/backends/mla/flashmla_sparse.py; csrc/cache_kernels.cu, concat_and_cache_ds_mla_kernel.
    """
    quant = Quant(dtype="e4m3", scale_dtype="f32", block=Block(dim=128), scale_min=2.0**-126, place="row")
    return _mla(dtype, latent_dim, rope_dim, page_size, quant, quant_rope=False)


@preset
def vllm_v4(
    *,
    dtype: FloatName = "bf16",
    latent_dim: int = 448,
    rope_dim: int = 64,
    block_tokens: int | None = None,
    rate: int = 1,
) -> Latent:
    """vLLM V1's rows of DeepSeek V4 (2026): FlashMLA's 584 bytes, amax at 1e-4 or more.

    A tensor per layer: pass `cache.flatten(1)`, `[N, P*584]`, strides in bytes `(page bytes, 1)`; the first is what a
    block has in the slab of all caches, a multiple of 576. Rows of the window (`rate` 1) have pages of 64 tokens;
    entries of 4 and of 128 tokens have 64 and 2 in a block of 256. `block_tokens` None: those; a page has block_tokens
    / rate entries. Table and lengths as `vllm`: one table a group of caches, in blocks; lengths count tokens. Source:
    vllm/models/deepseek_v4 and its fused_compress_quant_cache.py; csrc,
    fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert.
    """
    page = block_entries(block_tokens or (64 if rate == 1 else 256), rate)
    quant, align = mixed_pow2(amax_min=1e-4), latent_dim + 2 * rope_dim
    return record_v4(dtype, latent_dim, rope_dim, page, rate, quant, page_align=align)


@preset
def vllm_v41(
    *,
    dtype: FloatName = "bf16",
    latent_dim: int = 448,
    rope_dim: int = 64,
    block_tokens: int | None = None,
    rate: int = 1,
) -> Latent:
    """vLLM V1's MXFP8 rows of DeepSeek V4.1 (2026-09, compute capability 10): 528 bytes, scales behind their page.

    As `vllm_v4` with FlashMLA's footer of 2026-09-10 (`flashmla_v41(place="page")`): `[N, P*528]`, strides in bytes
    `(page bytes, 1)`, pages a multiple of 512 bytes apart; the window has pages of 32 tokens, a block 128 entries. On
    compute capability 9 and 12, and on ROCm, vLLM stores V4.1 as `vllm_v4`. Source: vLLM's pull request 56893;
    vllm/models/deepseek_v41.
    """
    page = block_entries(block_tokens or (32 if rate == 1 else 128 * rate), rate)
    quant, align = mxfp8("page", amax_min=1e-4), latent_dim + rope_dim
    return record_v4(dtype, latent_dim, rope_dim, page, rate, quant, page_align=align, quant_rope=True)


@preset
def vllm_v41_fp4(
    *,
    dtype: FloatName = "bf16",
    latent_dim: int = 448,
    rope_dim: int = 64,
    block_tokens: int | None = None,
    rate: int = 1,
) -> Latent:
    """vLLM V1's `nvfp4_ds_mla` (2026-09): entries of DeepSeek V4.1 in 288 bytes, scales behind their page.

    `flashmla_v41_fp4(place="page")` in blocks of 128 entries: `[N, P*288]`, strides in bytes `(page bytes, 1)`, pages a
    multiple of 512 bytes apart, as those of the window (`vllm_v41`) in the same slab. Source: vLLM's pull request 57344.
    """
    page, align = block_entries(block_tokens or 128 * rate, rate), latent_dim + rope_dim
    return record_v4(dtype, latent_dim, rope_dim, page, rate, fp4_amax("page"), page_align=align, quant_rope=True)


@preset
def vllm_indexer_fp4(*, dtype: FloatName = "bf16", head_dim: int = 128, page_size: int = 64, rate: int = 1) -> Paged:
    """vLLM V1's K cache of DeepSeek V4's indexer in MXFP4 (2026): 68 bytes a key. K only.

    A tensor per layer, `[N, P*68]`, strides in bytes `(page bytes, 1)`: P*64 bytes of e2m1, the even dim in the low
    nibble, then 4 e8m0 a key, one per 32 dims; amax at 6 * 2^-126 or more. `rate` and the rest as `vllm_indexer`.
    Source: vLLM's pull request 48993; DeepGEMM, fp8_fp4_paged_mqa_logits.
    """
    block = Block(dim=min(32, head_dim))
    quant = Quant(dtype="e2m1", scale_dtype="e8m0", recipe="pow2", block=block, place="page", amax_min=6 * 2.0**-126)
    return _indexer(dtype, head_dim, page_size, rate, quant)


@preset
def vllm_indexer(
    *,
    dtype: FloatName = "bf16",
    head_dim: int = 128,
    page_size: int = 64,
    recipe: Literal["pow2", "amax"] = "pow2",
    rate: int = 1,
) -> Paged:
    """vLLM V1's K cache of DeepSeek-V3.2's indexer (2025 and 2026): a page is its codes, then its scales. K only.

    A tensor per layer: vLLM's is u8 `[N, P, D + 4*D/128]`, a page P*D e4m3 | P*D/128 f32; pass `cache.flatten(1)`,
    `[N, P*(D + D/32)]` with P a multiple of 4: strides in bytes `(page bytes, 1)`. `recipe`: "pow2" where the model's
    scale_fmt is ue8m0 (DeepSeek's is), else "amax"; amax counts as 1e-4 at least. `rate`: keys of so many tokens, P of
    them a page (V4: 4, pages of 64 keys). Table and lengths as `vllm`. Source:
    csrc/cache_kernels.cu, indexer_k_quant_and_cache_kernel; vllm/v1/attention/backends/mla/indexer.py
    (pages of 64 on CUDA).
    """
    block = Block(dim=min(128, head_dim))
    quant = Quant(dtype="e4m3", scale_dtype="f32", block=block, recipe=recipe, amax_min=1e-4, place="page")
    return _indexer(dtype, head_dim, page_size, rate, quant)


def _indexer(dtype: FloatName, head_dim: int, page_size: int, rate: int, quant: Quant) -> Paged:
    return Paged(
        dtype=dtype,
        kv_heads=1,
        head_dim=head_dim,
        page_size=page_size,
        rate=rate,
        layout=Layout(kv="page token head dim", layers="pointers"),
        table=Dense(dtype="i32"),
        lengths="after",
        lengths_dtype="i32",
        stores="k",
        quant=quant,
    )


def _vllm(
    dtype: FloatName,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    layout: Layout,
    quant: Quant | None,
    total_pages: int | None = None,
    total_layers: int | None = None,
) -> Paged:
    return Paged(
        dtype=dtype,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        layout=layout,
        table=Dense(dtype="i32"),
        lengths="after",
        lengths_dtype="i32",
        quant=quant,
        total_pages=total_pages,
        total_layers=total_layers,
    )


def _mla(
    dtype: FloatName, latent_dim: int, rope_dim: int, page_size: int, quant: Quant | None, *, quant_rope: bool
) -> Latent:
    return Latent(
        dtype=dtype,
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        page_size=page_size,
        layout=Layout(k="page token head dim", layers="pointers"),
        table=Dense(dtype="i32"),
        lengths="after",
        lengths_dtype="i32",
        quant=quant,
        quant_rope=quant_rope,
    )
