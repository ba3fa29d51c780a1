"""vLLM's memory of a layer as the pool that kernels take, in each of its KVCacheLayouts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from kvgen.architectures import Arch
from kvgen.codegen.load import load
from kvgen.errors import ArgumentError
from kvgen.integrations.vllm.shard import Pages, Shard, kernel_set
from kvgen.runtime.arrays import ArrayView, itemsize, view
from kvgen.schema.presets.vllm import PackedOrder


@dataclass(frozen=True)
class LayerPool:
    """A layer's cache as vLLM hands it out.

    - `shard`: what the layer attends with.
    - `memory`: `[pages, kv heads, tokens of a page, 2 * head_dim]`, K then V in a row; strides are those of the order.
    - `k_scale`, `v_scale`: of an fp8 cache, f32 `[1, 1]`.
    """

    shard: Shard
    memory: Any
    k_scale: Any = None
    v_scale: Any = None


def module_of(shard: Shard, memory: Any, order: PackedOrder, arch: Sequence[Arch]) -> ModuleType:
    """The kernels of `shard` for such memory, `[pages, kv heads, tokens of a page, 2 * head_dim]`."""
    found = view(memory, "kv_cache")
    wanted = (None, shard.kv_heads, None, 2 * shard.head_dim)
    if len(found.shape) != 4 or any(n not in (None, m) for n, m in zip(wanted, found.shape, strict=True)):
        raise ArgumentError(
            f"kv_cache: got the shape {list(found.shape)}; the layer's {shard.kv_heads} heads of {shard.head_dim} dims need "
            f"[pages, {shard.kv_heads}, tokens of a page, {2 * shard.head_dim}]"
        )
    layers = _layers_beside(found) if order == "BHLNC" else 1
    return _loaded(shard, Pages(found.shape[2], order, found.shape[0], layers), tuple(arch))


@functools.cache
def _loaded(shard: Shard, pages: Pages, arch: tuple[Arch, ...]) -> ModuleType:
    """The same module for all layers that are alike: rendering it takes tens of milliseconds."""
    return load(kernel_set(shard, pages, arch))


def open_cache(module: ModuleType, shard: Shard, pools: Sequence[LayerPool], order: PackedOrder) -> Any:
    """The layers' cache without tables, over vLLM's memory. `layer_numbers` says which of its layers is whose."""
    scales = {}
    if shard.codes != "auto" and order == "BHLNC":
        raise ArgumentError(
            f"kv_cache_dtype: got {shard.kv_cache_dtype!r} in the layout BHLNC, where kvgen takes the scales of all layers in "
            "one array and vLLM has an array a layer; set VLLM_KV_CACHE_LAYOUT=LBHNC"
        )
    if shard.codes != "auto":
        scales = {"k_scale": [pool.k_scale for pool in pools], "v_scale": [pool.v_scale for pool in pools]}
    if order == "BHLNC":
        return module.Cache(_spanned([view(pool.memory, "kv_cache") for pool in pools], pools), **scales)
    return module.Cache([_axes(pool.memory, order) for pool in pools], **scales)


def layer_numbers(pools: Sequence[LayerPool], order: PackedOrder) -> tuple[int, ...]:
    """The number of each of `pools` in the cache that `open_cache` makes of them."""
    if order != "BHLNC":
        return tuple(range(len(pools)))
    found = [view(pool.memory, "kv_cache") for pool in pools]
    first, apart = min(f.pointer for f in found), _row_bytes(found[0])
    return tuple((f.pointer - first) // apart for f in found)


def _axes(memory: Any, order: PackedOrder) -> Any:
    """vLLM's view `[pages, heads, tokens, 2 * dims]` with its axes in the order of the memory, K and V apart."""
    apart = memory.reshape(*memory.shape[:3], 2, memory.shape[3] // 2)  # of the last axis alone: a view
    match order:
        case "LBNHC" | "BLNHC":
            return apart.swapaxes(1, 2)
        case "LHBNC":
            return apart.swapaxes(0, 1)
        case _:
            return apart


def _row_bytes(found: ArrayView) -> int:
    """Bytes of a head's tokens in a page."""
    return found.shape[2] * found.shape[3] * itemsize(found)


def _layers_beside(found: ArrayView) -> int:
    """Layers whose tokens of a head lie side by side in a page."""
    return found.strides[1] // (found.shape[2] * found.shape[3])


def _spanned(found: Sequence[ArrayView], pools: Sequence[LayerPool]) -> ArrayView:
    """BHLNC: the memory from the first to the last of these layers, `[pages, heads, layers, tokens, 2, dims]`.

    Raises ArgumentError where the layers do not lie in the same pages.
    """
    first = min(found, key=lambda f: f.pointer)
    layers, apart = _layers_beside(first), _row_bytes(first)
    steps = [divmod(f.pointer - first.pointer, apart) for f in found]
    if any(rest or n >= layers for n, rest in steps) or any(f.strides != first.strides for f in found):
        raise ArgumentError(
            f"kv_cache: got {len(found)} layers in the layout BHLNC that do not lie in the same pages; set "
            "VLLM_KV_CACHE_LAYOUT=LBHNC"
        )
    pages, heads, tokens, row = first.shape
    return first._replace(
        shape=(pages, heads, 1 + max(n for n, _ in steps), tokens, 2, row // 2),
        strides=(*first.strides[:2], tokens * row, row, row // 2, 1),
        owner=pools,
    )
