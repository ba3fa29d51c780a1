"""Dynamo's KV block manager: every block is contiguous, its dimensions in the order of a KvBlockLayout."""

from __future__ import annotations

from kvgen.schema import presets
from tests.schema.engines.memory import Engine, K, Sizes, buffer, one


def kvbm_universal(s: Sizes) -> Engine:
    """UniversalTP: a block is [nh, nl, no, nt, hd]."""
    sizes = {"kv_heads": s.h, "head_dim": s.d, "page_size": s.p, "total_layers": s.layers}
    cache = presets.kvbm_universal(dtype="bf16", **sizes, kv_cache_dtype="fp8_e4m3")
    return Engine(
        cache,
        one(buffer(K, 1, s.n, s.h, s.layers, 2, s.p, s.d)),
        lambda kv, layer, p, t, h, d: K + ((((p * s.h + h) * s.layers + layer) * 2 + kv) * s.p + t) * s.d + d,
        bits=8,
    )


def kvbm_operational(s: Sizes) -> Engine:
    """OperationalNHD: a block is [nl, no, nt, nh, hd]."""
    cache = presets.kvbm_operational(dtype="bf16", kv_heads=s.h, head_dim=s.d, page_size=s.p)
    return Engine(
        cache,
        one(buffer(K, 2, s.n, s.layers, 2, s.p, s.h, s.d)),
        lambda kv, layer, p, t, h, d: K + 2 * (((((p * s.layers + layer) * 2 + kv) * s.p + t) * s.h + h) * s.d + d),
    )


def kvbm_operational_hnd(s: Sizes) -> Engine:
    """OperationalHND: a block is [nl, no, nh, nt, hd]."""
    cache = presets.kvbm_operational(dtype="f16", kv_heads=s.h, head_dim=s.d, page_size=s.p, order="HND")
    return Engine(
        cache,
        one(buffer(K, 2, s.n, s.layers, 2, s.h, s.p, s.d)),
        lambda kv, layer, p, t, h, d: K + 2 * (((((p * s.layers + layer) * 2 + kv) * s.h + h) * s.p + t) * s.d + d),
    )
