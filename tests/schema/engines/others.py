"""SGLang, FlashMLA, FlashAttention, lmdeploy and KIVI."""

from __future__ import annotations

from kvgen.schema import presets
from kvgen.schema.cache import Cache
from tests.schema.engines.memory import KS, VS, Engine, Ints, K, Sizes, V, buffer, footer, inline, one, row656


def sglang(s: Sizes) -> Engine:
    """k_buffer[layer][slot, head, dim], and a v_buffer of the same shape."""
    cache = presets.sglang(dtype="bf16", kv_heads=s.h, head_dim=s.d, kv_cache_dtype="fp8_e4m3")
    return Engine(
        cache,
        lambda name, layer: buffer(V if name == "v_pool" else K, 1, s.n, s.h, s.d)[:, None],
        lambda kv, layer, p, t, h, d: (V if kv else K) + p * s.h * s.d + h * s.d + d,
        bits=8,
    )


def sglang_fp4(s: Sizes) -> Engine:
    """k_buffer[layer][slot, head, dim / 2], k_scale_buffer[layer][slot, (head * D + dim) / 16]; the same of V."""
    cache = presets.sglang(dtype="bf16", kv_heads=s.h, head_dim=s.d, kv_cache_dtype="fp4_e2m1")
    width, groups = s.d // 2, s.d // 16

    def view(name: str, layer: int) -> Ints:
        if name.endswith("pool"):
            return buffer(V if name == "v_pool" else K, 1, s.n, s.h, width)[:, None]
        return buffer(VS if name == "v_scales" else KS, 1, s.n, s.h * groups).reshape(s.n, 1, s.h, groups)

    return Engine(
        cache,
        view,
        lambda kv, layer, p, t, h, d: 2 * ((V if kv else K) + (p * s.h + h) * width + d // 2) + d % 2,
        lambda kv, layer, p, t, h, d: (VS if kv else KS) + p * s.h * groups + (h * s.d + d) // 16,
        bits=4,
    )


def sglang_mla(s: Sizes) -> Engine:
    return Engine(
        presets.sglang_mla(),
        one(buffer(K, 2, s.n, 1, 576)[:, None]),
        lambda kv, layer, p, t, h, d: K + 2 * (p * 576 + d),
    )


def sglang_mla_fp8(s: Sizes) -> Engine:
    return Engine(presets.sglang_mla_fp8(), one(buffer(K, 1, s.n, 1, 656)[:, None]), *row656(1), bits=8)


def sglang_indexer(s: Sizes) -> Engine:
    """buf[page, : P * 128] fp8; buf[page, P * 128 :].view(float32) scales."""
    return Engine(
        presets.sglang_indexer(page_size=s.p),
        one(buffer(K, 1, s.n, s.p * 132)),
        lambda kv, layer, p, t, h, d: K + p * s.p * 132 + t * 128 + d,
        lambda kv, layer, p, t, h, d: K + p * s.p * 132 + s.p * 128 + 4 * t,
        bits=8,
    )


def flashmla(s: Sizes) -> Engine:
    """k_cache[block, offset, 0, dim]: rows of 576."""
    return Engine(
        presets.flashmla(),
        one(buffer(K, 2, s.n, 64, 1, 576)),
        lambda kv, layer, p, t, h, d: K + 2 * (p * 64 * 576 + t * 576 + d),
    )


def flashmla_fp8(s: Sizes) -> Engine:
    """quantize_k_cache allocates block_size + 1 rows a block and hands out the first block_size: padded pages."""
    padded = buffer(K, 1, s.n, s.p + 1, 656)[:, : s.p].reshape(s.n, s.p, 1, 656)
    value, scale = row656(s.p)
    return Engine(
        presets.flashmla_fp8(page_size=s.p),
        one(padded),
        lambda kv, layer, p, t, h, d: value(kv, layer, p, t, h, d) + p * 656,
        lambda kv, layer, p, t, h, d: scale(kv, layer, p, t, h, d) + p * 656,
        bits=8,
    )


def flashmla_v4(s: Sizes) -> Engine:
    """tests/quant.py, MODEL1: block_size rows of 448 e4m3 | 64 bf16, then 7 e8m0 and a pad byte a row, blocks aligned to 576."""
    view, value, scale = footer(s.p, 448, 8, 64, 64, 8, 576)
    return Engine(presets.flashmla_v4(page_size=s.p), view, value, scale, pages=3, bits=8)


def flashmla_v41(s: Sizes) -> Engine:
    """tests/quant.py of 2026-09-30: a row is 512 e4m3 | 16 e8m0."""
    view, value, scale = inline(512, 8, 0, 32, 16, s.p)
    return Engine(presets.flashmla_v41(page_size=s.p), view, value, scale, pages=3, bits=8)


def flashmla_v41_footer(s: Sizes) -> Engine:
    """tests/quant.py of 2026-09-10: block_size rows of 512 e4m3, then 16 e8m0 a row, blocks aligned to 512."""
    view, value, scale = footer(s.p, 512, 8, 0, 32, 16, 512)
    return Engine(presets.flashmla_v41(page_size=s.p, place="page"), view, value, scale, pages=3, bits=8)


def flashmla_v41_fp4(s: Sizes) -> Engine:
    """tests/quant.py of 2026-09-30: a row is 256 bytes of codes | 32 e4m3."""
    view, value, scale = inline(512, 4, 0, 16, 32, s.p)
    return Engine(presets.flashmla_v41_fp4(page_size=s.p), view, value, scale, pages=3, bits=4)


def flashmla_v41_fp4_footer(s: Sizes) -> Engine:
    """tests/quant.py of 2026-09-10: block_size rows of 256 bytes of codes, then 32 e4m3 a row, blocks aligned to 256."""
    view, value, scale = footer(s.p, 512, 4, 0, 16, 32, 256)
    return Engine(presets.flashmla_v41_fp4(page_size=s.p, place="page"), view, value, scale, pages=3, bits=4)


def sglang_v4(s: Sizes) -> Engine:
    """store.cuh: kPageBytes = ceil_align(584 * page_size, 576)."""
    view, value, scale = footer(s.p, 448, 8, 64, 64, 8, 576)
    return Engine(presets.sglang_v4(page_tokens=4 * s.p, rate=4), view, value, scale, pages=3, bits=8)


def sglang_v4_fp4(s: Sizes) -> Engine:
    """A row is 224 bytes of codes | 14 e8m0 | 2 | 64 bf16."""
    view, value, scale = inline(448, 4, 64, 32, 16, s.p)
    return Engine(presets.sglang_v4_fp4(page_tokens=s.p), view, value, scale, pages=3, bits=4)


def flash_attention(s: Sizes) -> Engine:
    """k_cache[page, offset, head, dim], v_cache[page, offset, head, dim_v] with a dim_v of its own."""
    cache = presets.flash_attention(dtype="bf16", kv_heads=s.h, head_dim=s.d, v_head_dim=8, page_size=s.p)
    return Engine(
        cache,
        lambda name, layer: buffer(V, 2, s.n, s.p, s.h, 8) if name == "v_pool" else buffer(K, 2, s.n, s.p, s.h, s.d),
        lambda kv, layer, p, t, h, d: (V if kv else K) + 2 * (((p * s.p + t) * s.h + h) * (8 if kv else s.d) + d),
    )


def flash_attention_varlen(s: Sizes) -> Engine:
    """k[token, head, dim], v[token, head, dim_v]: a row a token of any request."""
    cache = presets.flash_attention_varlen(dtype="bf16", kv_heads=s.h, head_dim=s.d, v_head_dim=8)
    return Engine(
        cache,
        lambda name, layer: buffer(V, 2, s.n, s.h, 8) if name == "v_pool" else buffer(K, 2, s.n, s.h, s.d),
        lambda kv, layer, p, t, h, d: (V if kv else K) + 2 * ((p * s.h + h) * (8 if kv else s.d) + d),
    )


def lmdeploy_int8(s: Sizes) -> Engine:
    """mem_pool[layer, block, bytes] cut into K, V, K's and V's (scale, zero), each rounded up to 256 bytes."""
    return _lmdeploy(s, presets.lmdeploy_int8(dtype="f16", kv_heads=s.h, head_dim=s.d, page_size=s.p), (8, 8), 2)


def lmdeploy_int4(s: Sizes) -> Engine:
    """The same with two elements a byte: i in the low nibble, i + D / 2 in the high one."""
    return _lmdeploy(s, presets.lmdeploy_int4(dtype="f16", kv_heads=s.h, head_dim=s.d, page_size=s.p), (4, 4), 2)


def lmdeploy_turboquant(s: Sizes) -> Engine:
    """K as int4, V with four elements a byte, i, i + D / 4, i + D / 2, i + 3 D / 4, and one number beside them."""
    return _lmdeploy(s, presets.lmdeploy_turboquant(dtype="f16", kv_heads=s.h, head_dim=s.d, page_size=s.p), (4, 2), 1)


def _lmdeploy(s: Sizes, cache: Cache, bits: tuple[int, int], v_numbers: int) -> Engine:
    rows, widths, numbers = s.p * s.h, [s.d * n // 8 for n in bits], (2, v_numbers)
    sizes = [rows * widths[0], rows * widths[1], rows * 2 * numbers[0], rows * 2 * numbers[1]]
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + -(-size // 256) * 256)
    parts = ("k_pool", "v_pool", "k_scales", "v_scales")

    def view(name: str, layer: int) -> Ints:
        at = parts.index(name)
        blocks = buffer(K, 1, s.layers, s.n, ends[-1])[layer, :, ends[at] : ends[at] + sizes[at]]
        return blocks.reshape(s.n, s.p, s.h, -1) if at < 2 else blocks[:, ::2].reshape(s.n, s.p, s.h, numbers[at - 2])

    def value(kv: int, layer: int, p: Ints, t: Ints, h: Ints, d: Ints) -> Ints:
        byte = (layer * s.n + p) * ends[-1] + ends[kv] + (t * s.h + h) * widths[kv] + d % widths[kv]
        return byte if bits[kv] == 8 else 8 * byte + d // widths[kv] * bits[kv]

    def scales(kv: int, layer: int, p: Ints, t: Ints, h: Ints, d: Ints) -> Ints:
        return (layer * s.n + p) * ends[-1] + ends[2 + kv] + (t * s.h + h) * 2 * numbers[kv] + 0 * d

    return Engine(cache, view, value, scales, bits=8 if bits == (8, 8) else 1)


def kivi(s: Sizes) -> Engine:
    """Scales per group of tokens, head and channel for K; per token, head and group of channels for V."""
    g, half, size = 4, s.d // 2, 2
    cache = presets.kivi(dtype="bf16", kv_heads=s.h, head_dim=s.d, group_size=g, page_size=s.p)
    shapes = {
        "k_pool": (K, 1, s.p, s.h, half),
        "v_pool": (V, 1, s.p, s.h, half),
        "k_scales": (KS, size, s.p // g, s.h, 2 * s.d),
        "v_scales": (VS, size, s.p, s.h, 2 * s.d // g),
    }

    def view(name: str, layer: int) -> Ints:
        start, itemsize, *shape = shapes[name]
        return buffer(start, itemsize, s.n, s.layers, *shape)

    def scale(kv: int, layer: int, p: Ints, t: Ints, h: Ints, d: Ints) -> Ints:
        page = p * s.layers + layer
        if kv:
            return VS + size * (((page * s.p + t) * s.h + h) * 2 * s.d // g + 2 * (d // g))
        return KS + size * (((page * (s.p // g) + t // g) * s.h + h) * 2 * s.d + 2 * d)

    return Engine(
        cache,
        view,
        lambda kv, layer, p, t, h, d: (
            2 * ((V if kv else K) + (((p * s.layers + layer) * s.p + t) * s.h + h) * half + d // 2) + d % 2
        ),
        scale,
        bits=4,
    )
