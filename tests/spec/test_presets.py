"""Every preset's element addresses against a formula written from the engine's own convention."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvgen.expr import evaluate
from kvgen.spec import presets
from kvgen.spec.cache import Continuous, Paged
from kvgen.spec.table import CSR, Dense, Indirect, PerKV

Ints = NDArray[np.int64]
# Pages, layers, tokens a page, heads, head dim: all different, so that a swapped pair of axes shows.
N, L, P, H, D = 5, 2, 4, 3, 16
SIZE = {"kv_heads": H, "head_dim": D, "page_size": P}


@dataclass(frozen=True)
class Engine:
    """An engine's memory, written down by hand.

    `view(kv, layer)` is the tensor that a user passes for K (kv = 0) or V of a layer: dimensions in the order of the
    spec's axes, elements numbered by their place in the engine's buffer. `place(kv, layer, page, token, head, dim)` is
    the engine's own formula for that place. `pages` counts the page ids that the formula knows.
    """

    cache: Paged | Continuous
    view: Callable[[int, int], Ints]
    place: Callable[[int, int, Ints, Ints, Ints, Ints], Ints]
    pages: int = N
    roles: int = 2


def buffer(*shape: int) -> Ints:
    return np.arange(math.prod(shape), dtype=np.int64).reshape(shape)


def trt_view(layer: int) -> Ints:
    block = H * P * D
    return buffer(N * L * 2 * block)[2 * layer * block :].reshape(-1, H, P, D)


ENGINES: dict[str, Engine] = {
    # kv_blocks[page, kv, layer, token, head, dim], row-major.
    "max_paged": Engine(
        presets.max_paged(dtype="bf16", **SIZE),
        lambda kv, layer: buffer(N, 2, L, P, H, D),
        lambda kv, layer, p, t, h, d: p * (2 * L * P * H * D) + (kv * L + layer) * P * H * D + t * H * D + h * D + d,
    ),
    # blocks[lut[b], kv, layer, token, head, dim]: element = lut * stride0 + tok * H * D + h * D + d in the layer's view.
    "max_continuous": Engine(
        presets.max_continuous(dtype="bf16", kv_heads=H, head_dim=D, max_tokens=P),
        lambda kv, layer: buffer(N, 2, L, P, H, D),
        lambda kv, layer, p, t, h, d: p * (2 * L * P * H * D) + (kv * L + layer) * P * H * D + t * H * D + h * D + d,
    ),
    # key_cache, value_cache = kv_cache.unbind(0); key_cache[block, offset, head, dim].
    "vllm": Engine(
        presets.vllm(dtype="bf16", **SIZE),
        lambda kv, layer: buffer(2, N, P, H, D),
        lambda kv, layer, p, t, h, d: kv * N * P * H * D + p * P * H * D + t * H * D + h * D + d,
    ),
    # The same logical tensor, allocated as [2, blocks, heads, block_size, dim] and permuted for the user.
    "vllm_hnd": Engine(
        presets.vllm_hnd(dtype="bf16", **SIZE),
        lambda kv, layer: buffer(2, N, H, P, D).transpose(0, 1, 3, 2, 4).transpose(0, 1, 3, 2, 4),
        lambda kv, layer, p, t, h, d: kv * N * H * P * D + p * H * P * D + h * P * D + t * D + d,
    ),
    "vllm_interleaved": Engine(
        presets.vllm_interleaved(dtype="bf16", **SIZE),
        lambda kv, layer: buffer(N, 2, P, H, D),
        lambda kv, layer, p, t, h, d: p * 2 * P * H * D + kv * P * H * D + t * H * D + h * D + d,
    ),
    # Memory [blocks, block_size, heads, 2 * dim]: a head's K is the first half of its row, V the second.
    "vllm_packed": Engine(
        presets.vllm_packed(dtype="bf16", **SIZE),
        lambda kv, layer: buffer(N, P, H, 2 * D).transpose(0, 2, 1, 3).transpose(0, 2, 1, 3).reshape(N, P, H, 2, D),
        lambda kv, layer, p, t, h, d: p * P * H * 2 * D + t * H * 2 * D + h * 2 * D + kv * D + d,
    ),
    # reshape_and_cache: key_cache[block, head, dim / x, offset, dim % x] with x = 8; value_cache[block, head, dim, offset].
    "vllm_xpacked": Engine(
        presets.vllm_xpacked(dtype="f16", **SIZE),
        lambda kv, layer: buffer(N, H, D, P) if kv else buffer(N, H, D // 8, P, 8),
        lambda kv, layer, p, t, h, d: p * H * D * P + h * D * P + (d * P + t if kv else d // 8 * P * 8 + t * 8 + d % 8),
    ),
    # paged_kv_t::get_elem_offset with its strides for NHD; V begins one page body after K in the single tensor.
    "flashinfer_nhd": Engine(
        presets.flashinfer_nhd(dtype="bf16", **SIZE),
        lambda kv, layer: buffer(N, 2, P, H, D),
        lambda kv, layer, p, t, h, d: kv * (P * H * D) + p * (2 * P * H * D) + h * D + t * (H * D) + d,
    ),
    "flashinfer_hnd": Engine(
        presets.flashinfer_hnd(dtype="bf16", **SIZE),
        lambda kv, layer: buffer(N, 2, H, P, D),
        lambda kv, layer, p, t, h, d: kv * (P * H * D) + p * (2 * P * H * D) + h * (P * D) + t * D + d,
    ),
    # Offsets count K or V blocks of one layer: block * L * 2 + kv, from the layer's own start. Here `page` is that offset.
    "tensorrt_llm": Engine(
        presets.tensorrt_llm(dtype="bf16", **SIZE),
        lambda kv, layer: trt_view(layer),
        lambda kv, layer, p, t, h, d: 2 * layer * H * P * D + p * H * P * D + h * P * D + t * D + d,
        pages=(N - 1) * L * 2 + 2,
    ),
    # k_buffer[layer][slot, head, dim], and a v_buffer of the same shape.
    "sglang": Engine(
        presets.sglang(dtype="bf16", kv_heads=H, head_dim=D),
        lambda kv, layer: buffer(N, H, D)[:, None],
        lambda kv, layer, p, t, h, d: p * H * D + h * D + d,
    ),
    # k_cache[block, offset, 0, dim]: rows of 576.
    "flashmla": Engine(
        presets.flashmla(),
        lambda kv, layer: buffer(N, 64, 1, 576),
        lambda kv, layer, p, t, h, d: p * 64 * 576 + t * 576 + d,
        roles=1,
    ),
    # k_cache[page, offset, head, dim], v_cache[page, offset, head, dim_v] with a dim_v of its own.
    "flash_attention": Engine(
        presets.flash_attention(dtype="bf16", v_head_dim=8, **SIZE),
        lambda kv, layer: buffer(N, P, H, 8 if kv else D),
        lambda kv, layer, p, t, h, d: ((p * P + t) * H + h) * (8 if kv else D) + d,
    ),
}


def functions() -> dict[str, Callable[..., Any]]:
    found = inspect.getmembers(presets, inspect.isfunction)
    return {n: f for n, f in found if f.__module__ == presets.__name__ and not n.startswith("_")}


def test_every_preset_has_an_engine_here() -> None:
    assert set(functions()) == set(ENGINES)


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_addresses_are_the_engines_own(name: str) -> None:
    engine = ENGINES[name]
    cache = engine.cache
    tokens = cache.page_tokens
    assert tokens is not None
    for kv in range(engine.roles):
        region = cache.regions[min(kv, len(cache.regions) - 1)]
        dims = cache.v_dim if kv else cache.head_dim
        axes = [a.name for a in region.axes]
        for layer in range(L):
            view = engine.view(kv, layer)
            assert view.ndim == len(axes)
            for want, got in zip(region.shape, view.shape, strict=True):
                assert isinstance(want, str) or want == got
            steps = {a: s // view.itemsize for a, s in zip(axes, view.strides, strict=True)}
            page, token, head, dim = np.indices((engine.pages, tokens, cache.kv_heads, dims))
            inside = evaluate(region.offset(), {"token": token, "head": head, "dim": dim})
            start = int(view[(0,) * view.ndim])
            place = start + page * steps["page"] + inside
            if "kv" in steps:
                place = place + kv * steps["kv"]
            if "layer" in steps:
                place = place + layer * steps["layer"]
            want_place = engine.place(kv, layer, page, token, head, dim)
            np.testing.assert_array_equal(place, np.broadcast_to(want_place, place.shape))


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_a_tensor_per_layer_unless_it_has_a_layer_axis(name: str) -> None:
    cache = ENGINES[name].cache
    for region in cache.regions:
        assert ("layer" in {a.name for a in region.axes}) == (cache.layout.layers == "axis")
    assert (cache.layout.layers == "axis") == name.startswith("max_")


@pytest.mark.parametrize(
    ("name", "table", "index", "lengths", "lengths_dtype"),
    [
        ("max_paged", Dense, "u32", "before", "u32"),
        ("max_continuous", Dense, "u32", "before", "u32"),
        ("vllm", Dense, "i32", "after", "i32"),
        ("vllm_hnd", Dense, "i32", "after", "i32"),
        ("vllm_interleaved", Dense, "i32", "after", "i32"),
        ("vllm_packed", Dense, "i32", "after", "i32"),
        ("vllm_xpacked", Dense, "i32", "after", "i32"),
        ("flashinfer_nhd", CSR, "i32", "after", "i32"),
        ("flashinfer_hnd", CSR, "i32", "after", "i32"),
        ("tensorrt_llm", PerKV, "i32", "after", "i32"),
        ("sglang", Indirect, "i32", "after", "i64"),
        ("flashmla", Dense, "i32", "after", "i32"),
        ("flash_attention", Dense, "i32", "before", "i32"),
    ],
)
def test_tables_and_lengths(name: str, table: type, index: str, lengths: str, lengths_dtype: str) -> None:
    cache = ENGINES[name].cache
    assert type(cache.page_table) is table
    assert (cache.page_table.dtype, cache.lengths, cache.lengths_dtype) == (index, lengths, lengths_dtype)
    assert cache.page_table.id_multiplier == 1
    if isinstance(cache.page_table, CSR):
        assert cache.page_table.last_page_len
    if isinstance(cache.page_table, Indirect):
        assert cache.page_table.request_dtype == "i64"


def test_signatures_are_keyword_only_and_documented() -> None:
    for name, function in functions().items():
        kinds = {p.kind for p in inspect.signature(function).parameters.values()}
        assert kinds == {inspect.Parameter.KEYWORD_ONLY}, name
        doc = inspect.getdoc(function) or ""
        assert "strides" in doc, name


def test_x_is_16_bytes_in_every_dtype() -> None:
    for dtype, x in (("f32", 4), ("f16", 8), ("bf16", 8)):
        cache = presets.vllm_xpacked(dtype=dtype, kv_heads=1, head_dim=64)  # type: ignore[arg-type]
        assert cache.layout.k == f"page head dim/{x} token dim%{x}"


def test_max_continuous_leaves_the_tokens_to_the_pool() -> None:
    cache = presets.max_continuous(dtype="bf16", kv_heads=2, head_dim=8)
    assert cache.page_tokens is None
    assert cache.regions[0].shape == ("pages", 2, "layers", "tokens", 2, 8)
