"""vLLM."""

from __future__ import annotations

from kvgen.schema import presets
from kvgen.schema.presets.quants import TurboQuant
from tests.schema.engines.memory import Engine, Ints, K, Place, Sizes, V, buffer, footer, one, row656


def vllm(s: Sizes) -> Engine:
    """key_cache, value_cache = kv_cache.unbind(0); key_cache[block, offset, head, dim]."""
    cache = presets.vllm(dtype="bf16", kv_heads=s.h, head_dim=s.d, page_size=s.p)
    body = s.p * s.h * s.d
    return Engine(
        cache,
        one(buffer(K, 2, 2, s.n, s.p, s.h, s.d)),
        lambda kv, layer, p, t, h, d: K + 2 * (kv * s.n * body + p * body + t * s.h * s.d + h * s.d + d),
    )


def vllm_hnd(s: Sizes) -> Engine:
    """The same logical tensor, allocated as [2, blocks, heads, block_size, dim], fp8."""
    cache = presets.vllm_hnd(dtype="bf16", kv_heads=s.h, head_dim=s.d, page_size=s.p, kv_cache_dtype="fp8_e5m2")
    users = buffer(K, 1, 2, s.n, s.h, s.p, s.d).transpose(0, 1, 3, 2, 4)
    body = s.p * s.h * s.d
    return Engine(
        cache,
        one(users.transpose(0, 1, 3, 2, 4)),
        lambda kv, layer, p, t, h, d: K + kv * s.n * body + p * body + h * s.p * s.d + t * s.d + d,
        bits=8,
    )


def vllm_interleaved(s: Sizes) -> Engine:
    cache = presets.vllm_interleaved(dtype="bf16", kv_heads=s.h, head_dim=s.d, page_size=s.p, kv_cache_dtype="fp8_e4m3")
    body = s.p * s.h * s.d
    return Engine(
        cache,
        one(buffer(K, 1, s.n, 2, s.p, s.h, s.d)),
        lambda kv, layer, p, t, h, d: K + p * 2 * body + kv * body + t * s.h * s.d + h * s.d + d,
        bits=8,
    )


def vllm_packed(s: Sizes) -> Engine:
    """Memory [blocks, block_size, heads, 2 * dim]: a head's K is the first half of its row, V the second."""
    cache = presets.vllm_packed(dtype="f32", kv_heads=s.h, head_dim=s.d, page_size=s.p)
    users = buffer(K, 4, s.n, s.p, s.h, 2 * s.d).transpose(0, 2, 1, 3)
    return Engine(
        cache,
        one(users.transpose(0, 2, 1, 3).reshape(s.n, s.p, s.h, 2, s.d)),
        lambda kv, layer, p, t, h, d: K + 4 * (((p * s.p + t) * s.h + h) * 2 * s.d + kv * s.d + d),
        bits=32,
    )


def _ordered(s: Sizes, order: str, users: Ints, place: Place, **totals: int) -> Engine:
    cache = presets.vllm_packed(dtype="bf16", kv_heads=s.h, head_dim=s.d, page_size=s.p, order=order, **totals)  # type: ignore[arg-type]
    return Engine(cache, one(users), place)


def vllm_packed_heads_first(s: Sizes) -> Engine:
    """LBHNC: a layer's memory is [blocks, heads, block_size, 2 * dim]."""
    users = buffer(K, 2, s.n, s.h, s.p, 2, s.d)
    return _ordered(
        s, "LBHNC", users, lambda kv, layer, p, t, h, d: K + 2 * ((((p * s.h + h) * s.p + t) * 2 + kv) * s.d + d)
    )


def vllm_packed_heads_outermost(s: Sizes) -> Engine:
    """LHBNC: a layer's memory is [heads, blocks, block_size, 2 * dim], its view [blocks, heads, ...]."""
    users = buffer(K, 2, s.h, s.n, s.p, 2, s.d)
    return _ordered(
        s,
        "LHBNC",
        users,
        lambda kv, layer, p, t, h, d: K + 2 * ((((h * s.n + p) * s.p + t) * 2 + kv) * s.d + d),
        total_pages=s.n,
    )


def vllm_packed_layers_inside(s: Sizes) -> Engine:
    """BHLNC: [blocks, heads, layers, block_size, 2 * dim]."""
    users = buffer(K, 2, s.n, s.h, s.layers, s.p, 2, s.d)
    return _ordered(
        s,
        "BHLNC",
        users,
        lambda kv, layer, p, t, h, d: K + 2 * (((((p * s.h + h) * s.layers + layer) * s.p + t) * 2 + kv) * s.d + d),
        total_layers=s.layers,
    )


def vllm_packed_per_token_head(s: Sizes) -> Engine:
    """_ensure_scale_caches: [K | K's scale | V | V's scale] per head and slot, scales f32; LBHNC."""
    cache = presets.vllm_packed(
        dtype="bf16",
        kv_heads=s.h,
        head_dim=s.d,
        page_size=s.p,
        order="LBHNC",
        kv_cache_dtype="int8_per_token_head",
    )
    row = 2 * (s.d + 4)

    def slot(kv: int, p: Ints, t: Ints, h: Ints) -> Ints:
        return K + ((p * s.h + h) * s.p + t) * row + kv * (s.d + 4)

    return Engine(
        cache,
        one(buffer(K, 1, s.n, s.h, s.p, row)),
        lambda kv, layer, p, t, h, d: slot(kv, p, t, h) + d,
        lambda kv, layer, p, t, h, d: slot(kv, p, t, h) + s.d,
        bits=8,
    )


def vllm_turboquant(s: Sizes) -> Engine:
    """slot_base + [K fp8 | V nibbles | V's scale, least value]: [blocks, block_size, heads, slot]."""
    cache = presets.vllm_turboquant(dtype="bf16", kv_heads=s.h, head_dim=s.d, page_size=s.p)
    slot = s.d + s.d // 2 + 4

    def base(p: Ints, t: Ints, h: Ints) -> Ints:
        return K + ((p * s.p + t) * s.h + h) * slot

    return Engine(
        cache,
        one(buffer(K, 1, s.n, s.p, s.h, slot)),
        lambda kv, layer, p, t, h, d: 2 * (base(p, t, h) + s.d + d // 2) + d % 2 if kv else base(p, t, h) + d,
        lambda kv, layer, p, t, h, d: base(p, t, h) + s.d + s.d // 2 + 0 * d,
        bits=4,
    )


def vllm_turboquant_4bit(s: Sizes) -> Engine:
    """slot_base + [K nibbles | norm | V nibbles | scale, least value]."""
    return _turboquant(s, "turboquant_4bit_nc", 4, 4)


def vllm_turboquant_k3v4(s: Sizes) -> Engine:
    """The same with K in 3 bits: bit 3 * dim of the row, _tq_decode_stage1's mse_bit_off."""
    return _turboquant(s, "turboquant_k3v4_nc", 3, 4)


def vllm_turboquant_3bit(s: Sizes) -> Engine:
    """K and V in 3 bits."""
    return _turboquant(s, "turboquant_3bit_nc", 3, 3)


def _turboquant(s: Sizes, name: TurboQuant, k_bits: int, v_bits: int) -> Engine:
    cache = presets.vllm_turboquant(dtype="bf16", kv_heads=s.h, head_dim=s.d, page_size=s.p, kv_cache_dtype=name)
    key = s.d * k_bits // 8 + 2
    slot = key + s.d * v_bits // 8 + 4

    def base(p: Ints, t: Ints, h: Ints) -> Ints:
        return K + ((p * s.p + t) * s.h + h) * slot

    return Engine(
        cache,
        one(buffer(K, 1, s.n, s.p, s.h, slot)),
        lambda kv, layer, p, t, h, d: 8 * (base(p, t, h) + kv * key) + d * (v_bits if kv else k_bits),
        lambda kv, layer, p, t, h, d: base(p, t, h) + (slot - 4 if kv else key - 2) + 0 * d,
        bits=1,
    )


def vllm_xpacked(s: Sizes) -> Engine:
    """reshape_and_cache: key_cache[block, head, dim / x, offset, dim % x], x = 8; value_cache[block, head, dim, offset]."""
    return _xpacked(s, 2)


def vllm_xpacked_fp8(s: Sizes) -> Engine:
    """x = 16 / sizeof(cache_t)."""
    return _xpacked(s, 1)


def _xpacked(s: Sizes, size: int) -> Engine:
    kind = "auto" if size == 2 else "fp8_e4m3"
    cache = presets.vllm_xpacked(dtype="f16", kv_heads=s.h, head_dim=s.d, page_size=s.p, kv_cache_dtype=kind)  # type: ignore[arg-type]
    x = 16 // size
    keys, values = buffer(K, size, s.n, s.h, s.d // x, s.p, x), buffer(V, size, s.n, s.h, s.d, s.p)

    def place(kv: int, layer: int, p: Ints, t: Ints, h: Ints, d: Ints) -> Ints:
        if kv:
            return V + size * (p * s.h * s.d * s.p + h * s.d * s.p + d * s.p + t)
        return K + size * (p * s.h * s.d * s.p + h * s.d * s.p + d // x * s.p * x + t * x + d % x)

    return Engine(cache, lambda name, layer: values if name == "v_pool" else keys, place, bits=8 * size)


def vllm_nvfp4(s: Sizes) -> Engine:
    """Pages [K_data | K_scale | V_data | V_scale]; swizzle_scale_offset for V's scales; HND."""
    cache = presets.vllm_nvfp4(dtype="bf16", kv_heads=s.h, head_dim=s.d, page_size=s.p)
    data, scale = s.h * s.p * s.d // 2, s.h * s.p * s.d // 16
    pages = buffer(K, 1, s.n, 2 * (data + scale))

    def view(name: str, layer: int) -> Ints:
        start = (data + scale) * name.startswith("v")
        if name.endswith("pool"):
            return pages[:, start : start + data].reshape(s.n, s.h, s.p, s.d // 2)
        found = pages[:, start + data : start + data + scale].reshape(s.n, s.h, s.p, s.d // 16)
        return found if name == "k_scales" else found.reshape(s.n, s.h, s.p // 4, s.d // 16, 4)

    return Engine(
        cache,
        view,
        lambda kv, layer, p, t, h, d: (
            2 * (p * 2 * (data + scale) + kv * (data + scale) + (h * s.p + t) * (s.d // 2) + d // 2) + d % 2
        ),
        lambda kv, layer, p, t, h, d: (
            p * 2 * (data + scale)
            + kv * (data + scale)
            + data
            + h * s.p * (s.d // 16)
            + swizzled_in_tile(kv, t, d // 16, s)
        ),
        bits=4,
    )


def swizzled_in_tile(kv: int, t: Ints, g: Ints, s: Sizes) -> Ints:
    """Within [P, S]: K linear; V's swizzled_t * S + swizzled_s, vLLM's swizzle_scale_offset."""
    scale_dim = s.d // 16
    if not kv:
        return t * scale_dim + g
    group = scale_dim // 4
    return (t // 4 * 4 + g // group) * scale_dim + g % group * 4 + t % 4


def vllm_mla(s: Sizes) -> Engine:
    """concat_and_cache_mla: block * block_stride + offset * entry_stride + i, the RoPE part from 512 on; fp8."""
    return Engine(
        presets.vllm_mla(page_size=s.p, kv_cache_dtype="fp8_e4m3"),
        one(buffer(K, 1, s.n, s.p, 576)[:, :, None]),
        lambda kv, layer, p, t, h, d: K + p * s.p * 576 + t * 576 + d,
        bits=8,
    )


def vllm_mla_fp8(s: Sizes) -> Engine:
    return Engine(
        presets.vllm_mla_fp8(page_size=s.p), one(buffer(K, 1, s.n, s.p, 656)[:, :, None]), *row656(s.p), bits=8
    )


def vllm_v4(s: Sizes) -> Engine:
    """fused_compress_quant_cache.py: 576 bytes a token, then 8 bytes of scales a token, blocks of ceil(584 P / 576) * 576."""
    view, value, scale = footer(s.p, 448, 8, 64, 64, 8, 576)
    return Engine(presets.vllm_v4(block_tokens=128 * s.p, rate=128), view, value, scale, pages=3, bits=8)


def vllm_v41(s: Sizes) -> Engine:
    """kv_mxfp8: 512 codes a token, then 16 scale bytes a token."""
    view, value, scale = footer(s.p, 512, 8, 0, 32, 16, 512)
    return Engine(presets.vllm_v41(block_tokens=s.p), view, value, scale, pages=3, bits=8)


def vllm_v41_fp4(s: Sizes) -> Engine:
    """nvfp4_ds_mla: 256 bytes of codes a token, then 32 scale bytes a token."""
    view, value, scale = footer(s.p, 512, 4, 0, 16, 32, 512)
    return Engine(presets.vllm_v41_fp4(block_tokens=2 * s.p, rate=2), view, value, scale, pages=3, bits=4)


def vllm_indexer_fp4(s: Sizes) -> Engine:
    """64 bytes of codes a key, then 4 scale bytes a key."""
    stride = s.p * 68
    return Engine(
        presets.vllm_indexer_fp4(page_size=s.p),
        one(buffer(K, 1, s.n, stride)),
        lambda kv, layer, p, t, h, d: 2 * (K + p * stride + t * 64) + d,
        lambda kv, layer, p, t, h, d: K + p * stride + s.p * 64 + t * 4 + d // 32,
        bits=4,
    )


def vllm_indexer(s: Sizes) -> Engine:
    """indexer_k_quant_and_cache_kernel: dst_offset, and dst_scale_idx in bytes, with cache_block_stride = P * 132."""
    cache = presets.vllm_indexer(page_size=s.p)
    stride = s.p * 132
    return Engine(
        cache,
        one(buffer(K, 1, s.n, s.p, 132).reshape(s.n, -1)),
        lambda kv, layer, p, t, h, d: K + p * stride + t * 128 + d,
        lambda kv, layer, p, t, h, d: K + p * stride + s.p * 128 + (t * 128 + d // 128 * 128) * 4 // 128,
        bits=8,
    )
