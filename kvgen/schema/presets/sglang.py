"""SGLang."""

from __future__ import annotations

from typing import Literal

from kvgen.layout.dtypes import FloatName
from kvgen.schema.cache import Latent, Paged
from kvgen.schema.cache_fields import Layout
from kvgen.schema.preset_call import preset
from kvgen.schema.presets.quants import KVCacheDType, fp4_block16, mixed_pow2, per_tensor, record_v4
from kvgen.schema.quant import Block, Quant
from kvgen.schema.rate import block_entries
from kvgen.schema.tables import Dense, Indirect

SLOTS = Indirect(dtype="i32", request_dtype="i64")


@preset
def sglang(
    *, dtype: FloatName, kv_heads: int, head_dim: int, kv_cache_dtype: KVCacheDType | Literal["fp4_e2m1"] = "auto"
) -> Paged:
    """SGLang's MHATokenToKVPool (2025 and 2026): a slot a token, found through `req_to_token`.

    Two tensors per layer, K and V `[slots, H, D]`, strides `(H*D, D, 1)`; slot 0 takes the writes of padded tokens.
    The spec's tensors have a token axis of extent 1: pass `buffer.unsqueeze(1)`. Table: `req_to_token` i32
    `[requests, max_context]`, read at row `req_pool_indices` i64 `[B]`. Lengths: `seq_lens` i64, this step included.
    fp8 (buffers are u8): codes are x / scale, cast; pass the layer's `k_scale` and `v_scale`, or 1.0, as `[1, 1]`; torch's
    cast does not saturate, kvgen's does. "fp4_e2m1" (MHATokenToKVPoolFP4): codes u8 `[slots, H, D/2]`, and a power of two
    per 16 dims as its e8m0 byte, u8 `[slots, H*D/16]`: pass `k_scale_buffer.view(-1, 1, H, D // 16)` and V's as `k_scales`
    and `v_scales`. SGLang computes in the model's dtype, rounds ties away from zero and keeps -0: codes may differ in
    ties, and scales where amax / 6 rounds to a power of two. Source: python/sglang/srt/mem_cache/memory_pool.py,
    ReqToTokenPool and MHATokenToKVPool._create_buffers and set_kv_buffer; ScheduleBatch, whose prepare_for_extend makes
    the last two; python/sglang/srt/layers/quantization/kvfp4_tensor.py, FP4MXBlock16KVQuantizeUtil.
    """
    quant = fp4_block16() if kv_cache_dtype == "fp4_e2m1" else per_tensor(kv_cache_dtype)
    return Paged(
        dtype=dtype,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=1,
        layout=Layout(k="page token head dim", v="page token head dim", layers="pointers"),
        table=SLOTS,
        lengths="after",
        lengths_dtype="i64",
        quant=quant,
    )


@preset
def sglang_mla(*, dtype: FloatName = "bf16", latent_dim: int = 512, rope_dim: int = 64, fp8: bool = False) -> Latent:
    """SGLang's MLATokenToKVPool (2025 and 2026): latent rows, a slot a token, K only.

    A tensor per layer, `[slots, 1, 576]`: strides `(576, 576, 1)`; pass `buffer.unsqueeze(1)`. Slot 0, table and lengths
    as `sglang`. `fp8`: rows of e4m3 (u8 buffers), cast without a scale, RoPE part included; torch's cast does not saturate,
    kvgen's does. Source: python/sglang/srt/mem_cache/memory_pool.py, MLATokenToKVPool, set_kv_buffer and
    set_mla_kv_buffer.
    """
    return _slots(dtype, latent_dim, rope_dim, Quant(dtype="e4m3") if fp8 else None, quant_rope=fp8)


@preset
def sglang_mla_fp8(*, dtype: FloatName = "bf16", latent_dim: int = 512, rope_dim: int = 64) -> Latent:
    """SGLang's fp8 rows for sparse attention (its NSA backend, 2025 and 2026): 656 bytes a slot, scales amax / 448.

    A tensor per layer, u8 `[slots, 1, 656]`: strides in bytes `(656, 656, 1)`; pass `buffer.unsqueeze(1)`. A row: 512
    e4m3 | 4 f32 scales, one per 128 | 64 bf16. Slot 0, table and lengths as `sglang`. An all-zero block becomes NaN in
    SGLang, 0 here. Source: python/sglang/srt/layers/attention/nsa/quant_k_cache.py, _quantize_k_cache_slow;
    NSATokenToKVPool (DSATokenToKVPool in 0.5.23), kv_cache_dim.
    """
    quant = Quant(dtype="e4m3", scale_dtype="f32", block=Block(dim=128), place="row")
    return _slots(dtype, latent_dim, rope_dim, quant, quant_rope=False)


@preset
def sglang_v4(
    *, dtype: FloatName = "bf16", latent_dim: int = 448, rope_dim: int = 64, page_tokens: int = 256, rate: int = 1
) -> Latent:
    """SGLang's rows of DeepSeek V4 (2026): FlashMLA's 584 bytes, amax at 1e-4 or more.

    A tensor per layer: pass the pages' bytes, `[N, P*584]`, strides in bytes `(page bytes, 1)`, the first a multiple of
    576. Pages are of 256 tokens: 256 rows of the window, 64 entries of 4 tokens (`rate`), 2 of 128. Table: page ids i32
    `[B, max_pages]`, which SGLang derives from `req_to_token` (slot / 256). Lengths as `sglang`. Source:
    python/sglang/jit_kernel/csrc/deepseek_v4/store.cuh and c_plan.cuh (kPageBytes).
    """
    quant, page = mixed_pow2(amax_min=1e-4), block_entries(page_tokens, rate)
    align = latent_dim + 2 * rope_dim
    return record_v4(dtype, latent_dim, rope_dim, page, rate, quant, page_align=align, lengths_dtype="i64")


@preset
def sglang_v4_fp4(
    *, dtype: FloatName = "bf16", latent_dim: int = 448, rope_dim: int = 64, page_tokens: int = 256, rate: int = 1
) -> Latent:
    """SGLang's MXFP4 rows of DeepSeek V4 (2026): 368 bytes, scales in the row.

    A tensor per layer, u8 `[N, P, 1, 368]`: strides in bytes `(P*368, 368, 368, 1)`. A row: 224 bytes of e2m1, the even
    dim in the low nibble | 14 e8m0, one per 32 dims | 2 zeros | 64 bf16. amax at 6 * 2^-126 or more. Pages, table,
    lengths and `rate` as `sglang_v4`. Source: SGLang's pull requests 32741 and 37136 to 37138.
    """
    quant = Quant(
        dtype="e2m1",
        scale_dtype="e8m0",
        recipe="pow2",
        block=Block(dim=32),
        place="row",
        scale_pad=16,
        amax_min=6 * 2.0**-126,
    )
    page = block_entries(page_tokens, rate)
    return record_v4(dtype, latent_dim, rope_dim, page, rate, quant, page_align=None, lengths_dtype="i64")


@preset
def sglang_indexer(
    *,
    dtype: FloatName = "bf16",
    head_dim: int = 128,
    page_size: int = 64,
    recipe: Literal["pow2", "amax"] = "pow2",
    rate: int = 1,
) -> Paged:
    """SGLang's K cache of DeepSeek-V3.2's indexer (2026): a page is its codes, then its scales. K only.

    A tensor per layer, `index_k_with_scale_buffer` u8 `[N, P*128 + P*4]` with P = 64: strides in bytes `(P*132, 1)`. A
    page: P*128 e4m3 | P f32. Table: page ids i32 `[B, max_pages]`, which SGLang derives from `req_to_token` (slot /
    64). Lengths as `sglang`. `recipe`: "pow2", as DeepSeek's models ask; "amax", what SGLang's own writer of V4 keeps. Both
    count amax as 1e-4 at least. `rate`: keys of so many tokens, P of them a page. Source:
    python/sglang/jit_kernel/csrc/deepseek_v4/store.cuh; python/sglang/srt/mem_cache/memory_pool.py, NSATokenToKVPool
    (DSATokenToKVPool in 0.5.23).
    """
    block = Block(dim=min(128, head_dim))
    quant = Quant(dtype="e4m3", scale_dtype="f32", block=block, recipe=recipe, amax_min=1e-4, place="page")
    return Paged(
        dtype=dtype,
        kv_heads=1,
        head_dim=head_dim,
        page_size=page_size,
        rate=rate,
        layout=Layout(kv="page token head dim", layers="pointers"),
        table=Dense(dtype="i32"),
        lengths="after",
        lengths_dtype="i64",
        stores="k",
        quant=quant,
    )


def _slots(dtype: FloatName, latent_dim: int, rope_dim: int, quant: Quant | None, *, quant_rope: bool) -> Latent:
    return Latent(
        dtype=dtype,
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        page_size=1,
        layout=Layout(k="page token head dim", layers="pointers"),
        table=SLOTS,
        lengths="after",
        lengths_dtype="i64",
        quant=quant,
        quant_rope=quant_rope,
    )
