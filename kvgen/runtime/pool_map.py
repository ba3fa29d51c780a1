"""Tensor maps of a layer's pages, which launchers make for kernels that copy by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from kvgen.errors import ArgumentError
from kvgen.plan.params import PoolMap
from kvgen.runtime import cuda
from kvgen.runtime.layer_cache import LayerCache
from kvgen.runtime.packing import TENSOR_MAP, PackedArgs
from kvgen.runtime.params import Param

if TYPE_CHECKING:
    from kvgen.tensor_map import TensorMapPlan

_MOST = 4096  # maps that are kept: K and V of every layer of some caches


def pool_map(param: PoolMap, cache: LayerCache) -> bytes:
    """The 128 bytes of the parameter for this layer; raises ArgumentError where its pages cannot be mapped."""
    return _encoded(param, *_pages(param, cache), cache.device)


def pool_plan(param: PoolMap, cache: LayerCache) -> TensorMapPlan:
    """What those bytes say; raises ArgumentError where its pages cannot be mapped."""
    return _plan(param, *_pages(param, cache))


def _pages(param: PoolMap, cache: LayerCache) -> tuple[int, int, int, int]:
    """Where the parameter's pages begin, how many there are, the bytes from one to the next, tokens of each."""
    base, dims = param.base, cache.dims
    return cache.addresses[base], dims["pages"], dims[f"{base}_page_stride"] * cache.sizes[base], dims["tokens"]


@lru_cache(maxsize=_MOST)
def _encoded(param: PoolMap, address: int, pages: int, stride: int, tokens: int, device: str) -> bytes:
    from kvgen.runtime.tensor_map import encode

    if device != "cpu" and cuda.driver().capability(int(device.partition(":")[2])) < (9, 0):
        return bytes(TENSOR_MAP.size)
    return encode(_plan(param, address, pages, stride, tokens), device)


def _plan(param: PoolMap, address: int, pages: int, stride: int, tokens: int) -> TensorMapPlan:
    from kvgen.tensor_map import PageView, group_tile
    from kvgen.tensor_map.plan import ELEMENT_BYTES
    from kvgen.tensor_map.plan import element as element_of

    size = ELEMENT_BYTES[element_of(param.element)]
    view = PageView(
        param.element, address + param.offset, pages, stride // size, tokens, param.token_stride, param.heads,
        param.head_stride, param.dim,
    )  # fmt: skip
    try:
        return group_tile(view, param.rows, param.dim, swizzle=param.swizzle)
    except ArgumentError as error:
        raise ArgumentError(
            f"cache: got {pages} pages of {param.base}, {stride} bytes apart, which the kernel copies by tensor maps ({error}); "
            "pass a pool of at least one page, whose pages lie one behind another less than 2^40 bytes apart"
        ) from error


def layer_writer(params: Sequence[Param], args: PackedArgs) -> Callable[[LayerCache], None]:
    """A function that rewrites what of `args` depends on the layer: the cache's struct, and maps of its pages."""
    write = args.struct_writer()
    maps = [(place, p) for place, p in enumerate(params, start=1) if isinstance(p, PoolMap)]

    def write_layer(cache: LayerCache) -> None:
        write(cache.struct)
        for place, param in maps:
            args.set(place, pool_map(param, cache))

    return write_layer
