"""The tensor maps of a set, encoded before any kernel runs: what the driver refuses would otherwise show in the first launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from kvgen.errors import ArgumentError, DeviceError
from kvgen.plan.params import PoolMap
from kvgen.runtime import cuda
from kvgen.runtime.kernel import Kernel
from kvgen.runtime.kv_cache import BaseCache
from kvgen.runtime.layer_cache import LayerCache
from kvgen.runtime.memory import ordinal_of
from kvgen.runtime.pool_map import pool_plan
from kvgen.runtime.role_cache import RoleCache, TileMap
from kvgen.runtime.tensor_map import encode

if TYPE_CHECKING:
    from kvgen.tensor_map import Swizzle

_PAGES: Final = 3  # of the pools
_TOKENS: Final = 256  # of a block, where the spec leaves them open
_HEIGHT: Final = 64  # tokens of a tile, at most a page's
_SWIZZLES: Final[tuple[Swizzle, ...]] = (0, 32, 64, 128)


@dataclass(frozen=True)
class Encoded:
    """One tensor map: the kernel and parameter, or the cache, role and form, that it is `of`. `refused` is what the driver
    said of it, "" where there is a `map`."""

    of: str
    map: TileMap | None
    refused: str = ""

    @property
    def in_order(self) -> bool:
        """Whether each stride is a multiple of the one before it, which the text of cuda.h implies and GPUs do not need."""
        steps = () if self.map is None else self.map.plan.strides
        return all(low > 0 and high % low == 0 for low, high in pairwise(steps))


def encode_all(package: ModuleType, device: str) -> list[Encoded]:
    """Encode every tensor map of a generated package on `device` ("cpu", "cuda:0"): those that its kernels take, and those of
    tiles of a page that `get_key_cache` and `get_value_cache` make, in each form that the layout has. A GPU without
    tensor copies has none: the list is empty. The pools have three pages, and are freed again.

    Raises DeviceError where memory cannot be had, and not for a map that the driver refuses.
    """
    ordinal = ordinal_of(device)
    if ordinal is not None and cuda.driver().capability(ordinal) < (9, 0):
        return []
    found: list[Encoded] = []
    for kind in vars(package).values():
        if not (isinstance(kind, type) and issubclass(kind, BaseCache) and kind is not BaseCache):
            continue
        cache = kind.empty(layers=1, requests=1, pages=_PAGES, tokens=_TOKENS, device=device)
        for role in (cache.get_key_cache, cache.get_value_cache)[: len(kind.ROLES)]:
            found += _tiles(kind.__name__, role(0))
        if kind is package.Cache:
            for kernel, param in _parameters(package):
                found += _encoded(f"{kernel.entry}, {param.name}", _pool_map, param, cache[0])
    return found


def _parameters(package: ModuleType) -> Iterator[tuple[Kernel, PoolMap]]:
    for launcher in vars(package).values():
        kernel = getattr(launcher, "KERNEL", None)
        if isinstance(kernel, Kernel) and not isinstance(launcher, type):
            yield from ((kernel, p) for p in kernel.params if isinstance(p, PoolMap))


def _pool_map(param: PoolMap, layer: LayerCache) -> TileMap:
    plan = pool_plan(param, layer)
    return TileMap(plan, encode(plan, layer.device))


def _tiles(of: str, role: RoleCache) -> Iterator[Encoded]:
    from kvgen.tensor_map import chunk_elements, padded_depth

    values = role.role.values
    rows, name = min(role.layer.dims["tokens"], _HEIGHT), f"{of}, {role.role.name}"
    for swizzle in _SWIZZLES:
        depth, by = values.codes * padded_depth(values.dim, chunk_elements(values.dtype, swizzle)), f"swizzle {swizzle}"
        tile = partial(role.create_tma_tile, rows, depth, swizzle=swizzle)
        yield from _encoded(f"{name}, split, {by}", tile)
        yield from _encoded(f"{name}, folded, {by}", tile, fold=True)
        yield from _encoded(f"{name}, row-major, {by}", tile, fold=True, row_major=True)
        yield from _encoded(f"{name}, ragged, {by}", role.create_ragged_tma_tile, rows, depth, swizzle=swizzle)
        yield from _encoded(f"{name}, rope, {by}", role.create_rope_tma_tile, rows, swizzle=swizzle)
    yield from _encoded(f"{name}, gather4", role.create_gather4_tma_tile, values.dim)
    yield from _encoded(f"{name}, rope gather4", role.create_rope_gather4_tma_tile)
    yield from _encoded(f"{name}, index scales", role.create_index_scale_tma_tile, rows)
    yield from _encoded(f"{name}, scales", role.create_scale_tma_tile, rows)


def _encoded(of: str, make: Callable[..., TileMap], *arguments: Any, **named: Any) -> Iterator[Encoded]:
    try:
        yield Encoded(of, make(*arguments, **named))
    except ArgumentError:
        return  # the layout has no such map
    except DeviceError as error:
        yield Encoded(of, None, str(error))
