"""FlashMLA and FlashAttention."""

from __future__ import annotations

from typing import Literal

from kvgen.layout.dtypes import FloatName
from kvgen.schema.cache import Latent, Paged
from kvgen.schema.cache_fields import Layout
from kvgen.schema.preset_call import preset
from kvgen.schema.presets.quants import fp4_amax, mixed_pow2, mxfp8, record_v4
from kvgen.schema.quant import Block, Quant
from kvgen.schema.ragged import Ragged
from kvgen.schema.tables import Dense

ROWS = Layout(k="page token head dim", layers="pointers")


@preset
def flashmla(*, dtype: FloatName = "bf16", latent_dim: int = 512, rope_dim: int = 64, page_size: int = 64) -> Latent:
    """FlashMLA's dense decode (2026): latent rows of 576 in pages of 64, K only.

    A tensor per layer, `[N, 64, 1, 576]`: strides `(64*576, 576, 576, 1)`; V is the row's first 512 elements. Table:
    `block_table` i32 `[B, max_blocks]`. Lengths: `cache_seqlens` i32, this step included. Source:
    flash_mla/flash_mla_interface.py, flash_mla_with_kvcache; csrc/api/dense_decode.h (a page holds 64 tokens).
    """
    return Latent(
        dtype=dtype,
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        page_size=page_size,
        layout=ROWS,
        table=Dense(dtype="i32"),
        lengths="after",
        lengths_dtype="i32",
    )


@preset
def flashmla_fp8(
    *, dtype: FloatName = "bf16", latent_dim: int = 512, rope_dim: int = 64, page_size: int = 64
) -> Latent:
    """FlashMLA's fp8 rows for sparse decode (2025-09, as of 2026-04): 656 bytes a token, scales powers of two.

    A tensor per layer, u8 `[N, P, 1, 656]`: strides in bytes `(P*656, 656, 656, 1)`. A row: 512 e4m3 | 4 f32 scales, one
    per 128 | 64 bf16. Table and lengths as `flashmla`; its sparse kernel takes token indices `block * P + offset` instead.
    As FlashMLA's own quantizer, it keeps amax / 448 at 1e-4 or more, so that no scale is below 2^-13; readers do not care.
    Source: flash_mla/flash_mla_interface.py, flash_mla_with_kvcache; csrc/api/sparse_decode.h; tests/quant.py,
    V32_FP8Sparse.
    """
    return Latent(
        dtype=dtype,
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        page_size=page_size,
        layout=ROWS,
        table=Dense(dtype="i32"),
        lengths="after",
        lengths_dtype="i32",
        quant=Quant(dtype="e4m3", scale_dtype="f32", block=Block(dim=128), recipe="pow2", scale_min=1e-4, place="row"),
    )


@preset
def flashmla_v4(
    *, dtype: FloatName = "bf16", latent_dim: int = 448, rope_dim: int = 64, page_size: int = 64, rate: int = 1
) -> Latent:
    """FlashMLA's rows of DeepSeek V4 (2026-04 to 2026-09-10, the last for Hopper): 584 bytes a row, K and V at once.

    A tensor per layer. A page: P rows of 448 e4m3 | 64 bf16, 576 bytes each, then 8 bytes of scales a row, 7 e8m0 and a
    zero; pages lie a multiple of 576 bytes apart. FlashMLA's shape `[N, P, 1, 584]` names the bytes of a page, not its
    rows: pass `cache.flatten(1)`, `[N, P*584]`, strides in bytes `(page bytes, 1)`. Indices are `page * P + offset`; P
    may be any. Table and lengths as `flashmla`, for append. `rate`: entries of so many tokens in place of rows, P of
    them a page. As FlashMLA's own quantizer it keeps amax / 448 at 1e-4 or more; engines' writers keep amax there
    (`vllm_v4`). Source: csrc/api/sparse_decode.h and tests/quant.py of FlashMLA@9241ae3, ModelType::V4.
    """
    quant = mixed_pow2(scale_min=1e-4)
    return record_v4(dtype, latent_dim, rope_dim, page_size, rate, quant, page_align=latent_dim + 2 * rope_dim)


@preset
def flashmla_v41(
    *,
    dtype: FloatName = "bf16",
    latent_dim: int = 448,
    rope_dim: int = 64,
    page_size: int = 64,
    rate: int = 1,
    place: Literal["page", "row"] = "row",
) -> Latent:
    """FlashMLA's MXFP8 rows of DeepSeek V4.1: 528 bytes a row, the part that RoPE rotated quantized as well; K and V at once.

    A tensor per layer. `place` "row" (FlashMLA of 2026-09-30): u8 `[N, P, 1, 528]`, strides in bytes `(P*528, 528, 528,
    1)`; a row is 512 e4m3 | 16 e8m0, one per 32. "page" (2026-09-10): P rows of 512 e4m3, then 16 e8m0 a row, pages a
    multiple of 512 bytes apart; pass `cache.flatten(1)`, `[N, P*528]`. Neither is for Hopper. Indices, table, lengths,
    `rate` and floor as `flashmla_v4`. Source: FlashMLA@2e5429f and @07a1089, tests/quant.py, ModelType::V41.
    """
    align = latent_dim + rope_dim if place == "page" else None
    quant = mxfp8(place, scale_min=1e-4)
    return record_v4(dtype, latent_dim, rope_dim, page_size, rate, quant, page_align=align, quant_rope=True)


@preset
def flashmla_v41_fp4(
    *,
    dtype: FloatName = "bf16",
    latent_dim: int = 448,
    rope_dim: int = 64,
    page_size: int = 64,
    rate: int = 1,
    place: Literal["page", "row"] = "row",
) -> Latent:
    """FlashMLA's FP4 entries of DeepSeek V4.1: 288 bytes a row, the part that RoPE rotated quantized as well; K and V at once.

    A tensor per layer. `place` "row" (FlashMLA of 2026-09-30): u8 `[N, P, 1, 288]`, strides in bytes `(P*288, 288, 288,
    1)`; a row is 256 bytes of e2m1, the even dim in the low nibble | 32 e4m3, amax / 6 at 2^-9 or more, one per 16 dims.
    "page" (2026-09-10): P rows of 256 bytes, then 32 e4m3 a row, pages a multiple of 256 bytes apart; pass
    `cache.flatten(1)`, `[N, P*288]`. Neither is for Hopper. The window beside such entries is `flashmla_v41`. Blocks
    with NaN or infinity are other bytes than FlashMLA's writer makes (docs/quantization.md). Indices, table, lengths and
    `rate` as `flashmla_v4`. Source: FlashMLA@2e5429f and @07a1089, tests/quant.py, ModelType::V41_FP4.
    """
    align = (latent_dim + rope_dim) // 2 if place == "page" else None
    quant = fp4_amax(place)
    return record_v4(dtype, latent_dim, rope_dim, page_size, rate, quant, page_align=align, quant_rope=True)


@preset
def flash_attention(
    *, dtype: FloatName, kv_heads: int, head_dim: int, v_head_dim: int | None = None, page_size: int = 256
) -> Paged:
    """FlashAttention's flash_attn_with_kvcache with a page table (2 and 3): K and V in tensors of their own.

    Two tensors per layer, K `[N, P, H, D]` and V `[N, P, H, Dv]` (3 only: Dv != D), strides `(P*H*D, H*D, D, 1)`.
    FlashAttention 2 wants a `page_size` that is a multiple of 256, 3 takes any. Table: `page_table` (2:
    `block_table`) i32 `[B, max_blocks]`. Lengths: `cache_seqlens` i32, tokens before this step, which is what the
    function takes where it also appends k and v. Source: hopper/flash_attn_interface.py and
    flash_attn/flash_attn_interface.py.
    """
    return Paged(
        dtype=dtype,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        page_size=page_size,
        layout=Layout(k="page token head dim", v="page token head dim", layers="pointers"),
        table=Dense(dtype="i32"),
        lengths_dtype="i32",
    )


@preset
def flash_attention_varlen(
    *,
    dtype: FloatName,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    row_elements: int | None = None,
) -> Ragged:
    """FlashAttention's flash_attn_varlen_func (2 and 3) without a page table: no cache, requests one after another.

    Two tensors per layer, K `[T, H, D]` and V `[T, H, Dv]` (3 only: Dv != D) for T tokens of all requests, strides
    `(H*D, D, 1)`. `row_elements`: rows are so many elements apart, as views of a fused projection are, q | k | v of
    (q_heads + 2 * H) * D (flash_attn_varlen_qkvpacked_func has 3 * H * D). Offsets: `cu_seqlens_k` i32 `[B + 1]` is `kv_offsets`;
    queries are another sequence's, `cu_seqlens_q` their `row_offsets`. Also what FlashInfer's
    BatchPrefillWithRaggedKVCacheWrapper takes (`kv_indptr`), and encoders and cross attention. Source:
    hopper/flash_attn_interface.py and flash_attn/flash_attn_interface.py.
    """
    return Ragged(
        dtype=dtype,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        lengths_dtype="i32",
        row_elements=row_elements,
    )
