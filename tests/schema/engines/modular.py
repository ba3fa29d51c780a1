"""MAX."""

from __future__ import annotations

import numpy as np

from kvgen.schema import presets
from tests.schema.engines.memory import KS, Engine, K, Place, Sizes, buffer, one


def max_paged(s: Sizes) -> Engine:
    """kv_blocks[page, kv, layer, token, head, dim], row-major."""
    cache = presets.max_paged(dtype="bf16", kv_heads=s.h, head_dim=s.d, page_size=s.p)
    return Engine(cache, one(buffer(K, 2, s.n, 2, s.layers, s.p, s.h, s.d)), _max(s, 2))


def _max(s: Sizes, size: int, base: int = K) -> Place:
    body = s.p * s.h * s.d
    return lambda kv, layer, p, t, h, d: (
        base + size * (p * 2 * s.layers * body + (kv * s.layers + layer) * body + t * s.h * s.d + h * s.d + d)
    )


def max_continuous(s: Sizes) -> Engine:
    """element = lut * stride0 + tok * H * D + h * D + d in the layer's view, whose base is (0, kv, layer, 0, 0, 0)."""
    cache = presets.max_continuous(dtype="f32", kv_heads=s.h, head_dim=s.d, max_tokens=s.p)
    return Engine(cache, one(buffer(K, 4, s.n, 2, s.layers, s.p, s.h, s.d)), _max(s, 4), bits=32)


def max_paged_fp8(s: Sizes) -> Engine:
    cache = presets.max_paged_fp8(dtype="bf16", kv_heads=s.h, head_dim=s.d, page_size=s.p)
    return Engine(cache, one(buffer(K, 1, s.n, 2, s.layers, s.p, s.h, s.d)), _max(s, 1), bits=8)


def max_paged_scaled(s: Sizes) -> Engine:
    """Scale slot of dim d: d // granularity, in scales[page, kv, layer, token, head, slot]; 48 does not divide the head."""
    g = 48
    slots = -(-s.d // g)
    cache = presets.max_paged_scaled(dtype="bf16", kv_heads=s.h, head_dim=s.d, page_size=s.p, granularity=g)
    values, scales = buffer(K, 1, s.n, 2, s.layers, s.p, s.h, s.d), buffer(KS, 4, s.n, 2, s.layers, s.p, s.h, slots)
    row = s.p * s.h * slots
    return Engine(
        cache,
        lambda name, layer: scales if name == "scales" else values,
        _max(s, 1),
        lambda kv, layer, p, t, h, d: (
            KS + 4 * (p * 2 * s.layers * row + (kv * s.layers + layer) * row + t * s.h * slots + h * slots + d // g)
        ),
        bits=8,
    )


def max_nvfp4(s: Sizes) -> Engine:
    """Pool uint8 [N, 2, L, P, H, D / 2], element 2i in the low half of byte i; scales [N, 2, L, P, H, D / 16]."""
    cache = presets.max_nvfp4(dtype="bf16", kv_heads=s.h, head_dim=s.d, page_size=s.p)
    values = buffer(K, 1, s.n, 2, s.layers, s.p, s.h, s.d // 2)
    scales = buffer(KS, 1, s.n, 2, s.layers, s.p, s.h, s.d // 16)
    row = lambda kv, layer, p, t, h: (((p * 2 + kv) * s.layers + layer) * s.p + t) * s.h + h  # noqa: E731
    return Engine(
        cache,
        lambda name, layer: scales if name == "scales" else values,
        lambda kv, layer, p, t, h, d: 2 * (K + row(kv, layer, p, t, h) * (s.d // 2) + d // 2) + d % 2,
        lambda kv, layer, p, t, h, d: KS + row(kv, layer, p, t, h) * (s.d // 16) + d // 16,
        bits=4,
    )


def max_mla(s: Sizes) -> Engine:
    """blocks[page, 0, layer, token, 0, 576]."""
    return Engine(
        presets.max_mla(page_size=s.p),
        one(buffer(K, 2, s.n, 1, s.layers, s.p, 1, 576)),
        lambda kv, layer, p, t, h, d: K + 2 * (((p * s.layers + layer) * s.p + t) * 576 + d),
    )


def max_mla_fp8(s: Sizes) -> Engine:
    """Rows of 640 bytes: 512 fp8, then 64 bf16 from byte 512 on; one scale a token."""
    values, scales = buffer(K, 1, s.n, 1, s.layers, s.p, 1, 640), buffer(KS, 4, s.n, 1, s.layers, s.p, 1, 1)
    return Engine(
        presets.max_mla_fp8(page_size=s.p),
        lambda name, layer: scales if name == "scales" else values,
        lambda kv, layer, p, t, h, d: (
            K + ((p * s.layers + layer) * s.p + t) * 640 + np.where(d < 512, d, 512 + 2 * (d - 512))
        ),
        lambda kv, layer, p, t, h, d: KS + 4 * ((p * s.layers + layer) * s.p + t),
        bits=8,
    )


def max_indexer(s: Sizes) -> Engine:
    values, scales = buffer(K, 1, s.n, 1, s.layers, s.p, 1, 128), buffer(KS, 4, s.n, 1, s.layers, s.p, 1, 1)
    return Engine(
        presets.max_indexer(page_size=s.p),
        lambda name, layer: scales if name == "scales" else values,
        lambda kv, layer, p, t, h, d: K + ((p * s.layers + layer) * s.p + t) * 128 + d,
        lambda kv, layer, p, t, h, d: KS + 4 * ((p * s.layers + layer) * s.p + t),
        bits=8,
    )
