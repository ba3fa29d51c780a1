"""Pages of every layer of a pool: what operations that move whole pages take, and pools of memory without tables."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from kvgen.errors import ArgumentError, DeviceError
from kvgen.plan import params
from kvgen.runtime.arrays import extent
from kvgen.runtime.module import Module
from kvgen.runtime.overlap import Memory
from kvgen.runtime.packing import Bytes
from kvgen.runtime.params import Call
from kvgen.runtime.pool_cache import PoolCache
from kvgen.runtime.pool_tensors import PoolLayers, Tensor, pool_layers


class LayerPages(NamedTuple):
    """One layer's pages: where the first one begins and how many bytes the next one lies on, by page pointer."""

    addresses: dict[str, int]
    strides: dict[str, int]
    pages: int
    scale_pages: int
    tokens: int


class BasePages:
    """Memory of a cache's layout, any number of pages, no page table; generated classes give `MODULE` and `TENSORS`.

    `host`: the arrays lie in pinned host memory that kernels of a GPU reach.
    """

    MODULE: ClassVar[Module]
    TENSORS: ClassVar[tuple[Tensor, ...]]
    PAGE_TOKENS: ClassVar[int | None]

    def __init__(self, pools: Sequence[object], host: bool = False) -> None:
        self.host, self.given = host, tuple(pools)
        self.pool_layers = pool_layers(self.TENSORS, pools, self.PAGE_TOKENS)
        self.device = self.pool_layers[0].views[0].device
        self.memory: list[Memory] = [memory for each in self.pool_layers for memory in each.memory]
        self.layers = [layer for each in self.pool_layers for layer in self._layers(each)]

    def _layers(self, pool: PoolLayers) -> list[LayerPages]:
        """The layers that these tensors hold."""
        dims = pool.dims
        strides = {p: dims[f"{p}_page_stride"] * size for p, size in pool.sizes.items()}
        scale_pages = dims.get("scale_pages", dims["pages"])
        found_by_values = any("scale_pages" in t.shape and not t.own_table for t in self.TENSORS)
        pages = min(dims["pages"], scale_pages) if found_by_values else dims["pages"]
        return [LayerPages(addresses, strides, pages, scale_pages, dims["tokens"]) for addresses in pool.addresses]

    def __repr__(self) -> str:
        return f"{self.MODULE.name}.{type(self).__name__}({len(self.layers)} layers, {self.device!r})"

    def reachable(self, device: str) -> int:
        """Make sure that kernels on `device` reach the memory; what to add to its addresses there."""
        if self.device == device:
            return 0
        name = self.memory[0][0] if self.memory else "pages"
        if not self.host or self.device != "cpu":
            raise ArgumentError(
                f"{name}: got an array on {self.device}; the call runs on {device}, where the cache is; pass memory of that "
                "GPU, or pinned host memory with host=True"
            )
        from kvgen.runtime import cuda

        moved = set()
        for name, array, _ in self.memory:
            low, high = extent(array)
            try:
                moved |= {
                    cuda.driver().mapped(p, int(device.partition(":")[2])) - p for p in (low, high - 1) if high > low
                }
            except DeviceError as error:
                raise ArgumentError(
                    f"{name}: got pageable host memory ({error}); kernels reach pinned and mapped memory alone; pass "
                    "tensor.pin_memory() of torch, or register the array's memory with cudaHostRegister"
                ) from error
        if len(moved) > 1:
            raise ArgumentError(
                f"{name}: got host memory that the GPU sees at several distances; kernels add one offset; pin all of it alike"
            )
        return moved.pop() if moved else 0


def layers_of(pool: PoolCache | BasePages) -> list[LayerPages]:
    """The pages of every layer."""
    if isinstance(pool, BasePages):
        return pool.layers
    found = []
    for layer in pool:
        strides = {p: layer.dims[f"{p}_page_stride"] * size for p, size in layer.sizes.items() if p in layer.addresses}
        pages = layer.dims["pages"]
        scales = layer.dims.get("scale_pages", pages)
        found.append(LayerPages(layer.addresses, strides, pages, scales, layer.dims["tokens"]))
    return found


class PagePool(params.PagePool):
    """kvgen.plan.params.PagePool, taken from a call and packed."""

    __slots__ = ()

    @property
    def kind(self) -> Bytes:
        """Its size: addresses, strides, and counts of layers, pages, scale pages and tokens."""
        return Bytes(8 * len(self.pointers) * (self.layers + 1) + 16, 8)

    def take(self, given: Any, call: Call) -> bytes:
        """The pool of the call's; raises ArgumentError for what is none of this set's."""
        layers = call.dims["all_layers"]
        if not isinstance(given, (BasePages, PoolCache)) or given.MODULE is not call.module:
            got = f"pages of {given.MODULE.name}" if isinstance(given, (BasePages, PoolCache)) else type(given).__name__
            name = call.module.name if call.module is not None else "the set"
            raise ArgumentError(
                f"{self.name}: got {got}; it must be memory of this set's layout; pass {name}.Pages(...) or {name}.Cache(...)"
            )
        found = layers_of(given)
        if len(found) != layers:
            raise ArgumentError(
                f"{self.name}: got {len(found)} layers; the cache has {layers}; pass pages of as many layers"
            )
        if found and found[0].tokens != call.dims["tokens"]:
            raise ArgumentError(
                f"{self.name}: got blocks of {found[0].tokens} tokens; the cache's hold {call.dims['tokens']}; pass blocks of "
                "the same size"
            )
        if isinstance(given, BasePages):
            offset = given.reachable(call.device)
            call.memory += [(f"{self.name}.{n}", array, w and self.writes) for n, array, w in given.memory]
        else:
            if given.device != call.device:
                raise ArgumentError(
                    f"{self.name}: got a cache on {given.device}; the call runs on {call.device}; pass one there"
                )
            offset = 0
            memory = {n: (f"{self.name}.{n}", array, w and self.writes) for x in given for n, array, w in x.memory}
            call.memory += memory.values()
        return self.pack(found, offset)

    def pack(self, found: Sequence[LayerPages], offset: int = 0) -> bytes:
        """The struct's bytes; raises ArgumentError where it cannot say what the layers are."""
        if len(found) > self.layers:
            raise ArgumentError(
                f"cache: got {len(found)} layers; the operation was generated for at most {self.layers}; raise max_layers in "
                "the spec"
            )
        first = found[0]
        for number, layer in enumerate(found):
            for base in self.pointers:
                if layer.strides[base] != first.strides[base]:
                    raise ArgumentError(
                        f"{base}: got pages {layer.strides[base]} bytes apart in layer {number} and {first.strides[base]} in "
                        "layer 0; one launch copies pages of all layers; pass tensors with the same strides"
                    )
            if layer.tokens != first.tokens:
                raise ArgumentError(
                    f"{self.pointers[0]}: got blocks of {layer.tokens} tokens in layer {number} and of {first.tokens} in layer "
                    "0; pass tensors of the same shape"
                )
            for low, high, nbytes in self.together:
                distance = layer.addresses[high] - layer.addresses[low]
                if distance != nbytes:
                    raise ArgumentError(
                        f"{low}: got K and V {distance} bytes apart in layer {number}; they alternate inside a page, which is "
                        f"copied as one block; pass a tensor whose kv axis has stride {nbytes} bytes"
                    )
        missing = [0] * (self.layers - len(found))
        addresses = [a for b in self.pointers for a in (*(x.addresses[b] + offset for x in found), *missing)]
        counts = (len(found), min(x.pages for x in found), min(x.scale_pages for x in found), first.tokens)
        text = f"<{len(addresses)}Q{len(self.pointers)}q4I"
        return struct.pack(text, *addresses, *(first.strides[b] for b in self.pointers), *counts)
