"""vLLM's memory in each KVCacheLayout as kvgen's pools: where K, V and every token lie. No kernel runs."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kvgen.errors import ArgumentError
from kvgen.integrations.vllm.pools import LayerPool, layer_numbers, module_of, open_cache
from kvgen.integrations.vllm.shard import ORDERS, Shard
from kvgen.schema.presets.vllm import PackedOrder

LAYERS, PAGES, HEADS, TOKENS, DIM = 3, 5, 2, 16, 32
SHARD = Shard(4, HEADS, DIM, "f32", 0.25)
SIZES = {"L": LAYERS, "B": PAGES, "H": HEADS, "N": TOKENS, "C": 2 * DIM}


def memory(order: str) -> list[np.ndarray]:
    """vLLM's view of each layer, `[B, H, N, C]`, of memory whose axes are in this order; each element is its own place."""
    whole = np.arange(np.prod([SIZES[a] for a in order]), dtype=np.float32).reshape([SIZES[a] for a in order])
    return list(whole.transpose([order.index(a) for a in "LBHNC"]))


def places(order: PackedOrder, views: list[np.ndarray]) -> list[tuple[int, ...]]:
    """Addresses of the first K and V of each layer, and steps in elements from page to page and token to token."""
    pools = [LayerPool(SHARD, view) for view in views]
    cache = open_cache(module_of(SHARD, views[0], order, ("sm_80",)), SHARD, pools, order)
    found = []
    for number in layer_numbers(pools, order):
        layer = cache[number]
        k, v = cache.get_key_cache(number), cache.get_value_cache(number)
        assert k.shape[-1] == v.shape[-1] == DIM
        found.append((layer.addresses["k"], layer.addresses["v"], layer.step.dims["k_page_stride"]))
    return found


@pytest.mark.parametrize("order", ORDERS)
def test_where_layers_begin(order: PackedOrder) -> None:
    views = memory(order)
    wanted = []
    for view in views:
        first = view.__array_interface__["data"][0]
        wanted.append((first, first + 4 * DIM, view.strides[0] // 4))
    assert places(order, views) == wanted


@pytest.mark.parametrize("order", ORDERS)
def test_some_of_the_layers(order: PackedOrder) -> None:
    """Layers of two kinds lie in the same memory: each kind has its own, in any order."""
    views = memory(order)
    both = places(order, [views[2], views[1]])
    assert both == [places(order, [views[n]])[0] for n in (2, 1)]


@pytest.mark.parametrize("order", ORDERS)
def test_the_view_of_another_layout_is_refused(order: PackedOrder) -> None:
    """Compile-time strides of heads and tokens are the memory's; blocks and layers may lie in either order."""
    alike = {"LBNHC": "BLNHC", "LBHNC": "BLHNC"}
    for other in ORDERS:
        same = (
            {order, other} == {other, alike.get(other)} or {order, other} == {order, alike.get(order)} or order == other
        )
        if same or order == "BHLNC":  # whose strides say how many layers there are
            continue
        with pytest.raises(ArgumentError, match="stride"):
            places(order, memory(other))


def test_layers_of_bhlnc_that_lie_apart_are_refused() -> None:
    with pytest.raises(
        ArgumentError, match=r"^kv_cache: got 2 layers in the layout BHLNC that do not lie in the same pages"
    ):
        places("BHLNC", [memory("BHLNC")[0], memory("BHLNC")[1]])


def test_memory_of_other_heads_is_refused() -> None:
    with pytest.raises(
        ArgumentError,
        match=re.escape(
            "kv_cache: got the shape [5, 2, 16, 32]; the layer's 2 heads of 32 dims need [pages, 2, tokens"
        ),
    ):
        module_of(SHARD, memory("LBHNC")[0][..., :DIM], "LBHNC", ("sm_80",))


def test_scales_of_bhlnc_are_refused() -> None:
    shard = Shard(4, HEADS, DIM, "bf16", 0.25, kv_cache_dtype="fp8")
    views = [view.astype(np.uint8) for view in memory("LBHNC")]
    one = np.ones((1, 1), np.float32)
    pools = [LayerPool(shard, view, one, one) for view in views]
    with pytest.raises(ArgumentError, match=r"^kv_cache_dtype: got 'fp8' in the layout BHLNC"):
        open_cache(module_of(shard, views[0], "LBHNC", ("sm_80",)), shard, pools, "BHLNC")
