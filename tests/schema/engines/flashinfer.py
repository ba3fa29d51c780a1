"""FlashInfer and TensorRT-LLM."""

from __future__ import annotations

import numpy as np

from kvgen.schema import presets
from tests.schema.engines.memory import KS, VS, Engine, Ints, K, Sizes, V, buffer, footer, one


def flashinfer_nhd(s: Sizes) -> Engine:
    """paged_kv_t::get_elem_offset with its strides for NHD; V begins one page body after K in the single tensor."""
    cache = presets.flashinfer_nhd(dtype="bf16", kv_heads=s.h, head_dim=s.d, page_size=s.p, kv_cache_dtype="fp8_e4m3")
    body = s.p * s.h * s.d
    return Engine(
        cache,
        one(buffer(K, 1, s.n, 2, s.p, s.h, s.d)),
        lambda kv, layer, p, t, h, d: K + kv * body + p * 2 * body + h * s.d + t * s.h * s.d + d,
        bits=8,
    )


def flashinfer_hnd(s: Sizes) -> Engine:
    cache = presets.flashinfer_hnd(dtype="bf16", kv_heads=s.h, head_dim=s.d, page_size=s.p)
    body = s.p * s.h * s.d
    return Engine(
        cache,
        one(buffer(K, 2, s.n, 2, s.h, s.p, s.d)),
        lambda kv, layer, p, t, h, d: K + 2 * (kv * body + p * 2 * body + h * s.p * s.d + t * s.d + d),
    )


def flashinfer_nvfp4(s: Sizes) -> Engine:
    """k_sf_out = page * stride_page + entry * stride_n + head * stride_h + block, of [N, P, H, D / 16]; V's alike."""
    cache = presets.flashinfer_nvfp4(dtype="bf16", kv_heads=s.h, head_dim=s.d, page_size=s.p)
    starts = {"k_pool": K, "v_pool": V, "k_scales": KS, "v_scales": VS}
    return Engine(
        cache,
        lambda name, layer: buffer(starts[name], 1, s.n, s.p, s.h, s.d // (2 if "pool" in name else 16)),
        lambda kv, layer, p, t, h, d: 2 * ((V if kv else K) + ((p * s.p + t) * s.h + h) * (s.d // 2) + d // 2) + d % 2,
        lambda kv, layer, p, t, h, d: (VS if kv else KS) + ((p * s.p + t) * s.h + h) * (s.d // 16) + d // 16,
        bits=4,
    )


def flashinfer_nvfp4_swizzled(s: Sizes) -> Engine:
    """NHD: V's scales reshaped to [N, P / 4, 4, H, 4, S / 4], permuted (0, 1, 4, 3, 5, 2), and shaped back."""
    cache = presets.flashinfer_nvfp4(dtype="bf16", kv_heads=s.h, head_dim=s.d, page_size=s.p, swizzled_v_scales=True)
    linear = flashinfer_nvfp4(s)
    size = s.d // 16
    # Which linear place each byte of the swizzled tensor came from, and so where each linear place went.
    before = np.arange(s.n * s.p * s.h * size).reshape(s.n, s.p // 4, 4, s.h, 4, size // 4)
    after = np.argsort(before.transpose(0, 1, 4, 3, 5, 2).reshape(-1))

    def scale(kv: int, layer: int, p: Ints, t: Ints, h: Ints, d: Ints) -> Ints:
        place = ((p * s.p + t) * s.h + h) * size + d // 16
        return VS + after[place] if kv else KS + place

    def view(name: str, layer: int) -> Ints:
        found = linear.view(name, layer)
        return found.reshape(s.n, s.p // 4, 4, s.h, size // 4, 4) if name == "v_scales" else found

    return Engine(cache, view, linear.value, scale, bits=4)


def flashinfer_mla(s: Sizes) -> Engine:
    """ckv_cache[page, offset, 512], kpe_cache[page, offset, 64]."""
    ckv, kpe = buffer(K, 2, s.n, s.p, 512)[:, :, None], buffer(V, 2, s.n, s.p, 64)[:, :, None]
    return Engine(
        presets.flashinfer_mla(page_size=s.p),
        lambda name, layer: kpe if name == "rope_pool" else ckv,
        lambda kv, layer, p, t, h, d: np.where(
            d < 512, K + 2 * ((p * s.p + t) * 512 + d), V + 2 * ((p * s.p + t) * 64 + d - 512)
        ),
    )


def tensorrt_llm(s: Sizes) -> Engine:
    """Offsets count K or V blocks of one layer: block * L * 2 + kv, from the layer's own start; `page` is that offset."""
    cache = presets.tensorrt_llm(dtype="bf16", kv_heads=s.h, head_dim=s.d, page_size=s.p, kv_cache_dtype="int8")
    block = s.h * s.p * s.d
    return Engine(
        cache,
        lambda name, layer: buffer(K, 1, s.n * s.layers * 2 * block)[2 * layer * block :].reshape(-1, s.h, s.p, s.d),
        lambda kv, layer, p, t, h, d: K + 2 * layer * block + p * block + h * s.p * s.d + t * s.d + d,
        pages=(s.n - 1) * s.layers * 2 + 2,
        bits=8,
    )


def tensorrt_llm_nvfp4(s: Sizes) -> Engine:
    """quantizeAndWriteFP4KVCache: V's scale at (token / 4) * 4 * S + s * 4 + token % 4 within its head, K's linear."""
    cache = presets.tensorrt_llm_nvfp4(dtype="bf16", kv_heads=s.h, head_dim=s.d, page_size=s.p)
    size = s.d // 16
    block, scales = s.h * s.p * s.d // 2, s.h * s.p * size

    def view(name: str, layer: int) -> Ints:
        if name == "pool":
            return buffer(K, 1, s.n * s.layers * 2 * block)[2 * layer * block :].reshape(-1, s.h, s.p, s.d // 2)
        found = buffer(KS, 1, s.n * s.layers * 2 * scales)[2 * layer * scales :]
        return found.reshape(-1, s.h, s.p, size) if name == "k_scales" else found.reshape(-1, s.h, s.p // 4, size, 4)

    def scale(kv: int, layer: int, p: Ints, t: Ints, h: Ints, d: Ints) -> Ints:
        inside = t // 4 * 4 * size + d // 16 * 4 + t % 4 if kv else t * size + d // 16
        return KS + 2 * layer * scales + p * scales + h * s.p * size + inside

    return Engine(
        cache,
        view,
        lambda kv, layer, p, t, h, d: 2 * (2 * layer * block + p * block + (h * s.p + t) * (s.d // 2) + d // 2) + d % 2,
        scale,
        pages=(s.n - 1) * s.layers * 2 + 2,
        bits=4,
    )


def flashinfer_v4_nvfp4(s: Sizes) -> Engine:
    """page_size rows of 224 bytes of codes | 64 bf16, then 28 e4m3 and 4 bytes a row."""
    view, value, scale = footer(s.p, 448, 4, 64, 16, 32, 16)
    return Engine(presets.flashinfer_v4_nvfp4(page_size=s.p), view, value, scale, pages=3, bits=4)
