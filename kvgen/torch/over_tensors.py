"""Caches, pages and workspaces over the tensors of a call, made once for the same addresses.

An operator gets tensors, a launcher takes a cache object. Making one for all layers costs more than a launch, so it is kept.
What is kept are addresses, shapes and strides, without references: it is right for any tensors that lie there, and it keeps
no memory alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, cast

from kvgen.errors import ArgumentError
from kvgen.runtime import BasePages, LayerCache, PlannedLauncher, PoolCache, Workspace
from kvgen.runtime.arrays import ArrayView, view
from kvgen.runtime.checks import Dims, check
from kvgen.torch.schema import a_tensor_a_layer

# So many cache objects of a set are kept. One serves all layers of a step where the pool has a layer axis; with a tensor a
# layer every layer has its own.
_KEPT: Final = 32
_KEPT_OF_LAYERS: Final = 512
_ALIGN: Final = 16  # of a workspace, in bytes

Place = tuple[object, ...]


def address_of(tensor: Any, name: str) -> ArrayView:
    """Where the tensor's elements lie, without a reference to it."""
    return ArrayView(*view(tensor, name)[:6], None)


class Kept:
    """The cache objects of one set, by the places of their tensors."""

    def __init__(self, cache: type[PoolCache]) -> None:
        self._make = cast(Callable[..., PoolCache], cache)
        self._by_layer = a_tensor_a_layer(cache)
        self._most = _KEPT_OF_LAYERS if self._by_layer else _KEPT
        self._names = [*(t.name for t in cache.TENSORS), *(t.name for t in cache.TABLES)]
        self._pools, self._longest = len(cache.TENSORS), cache.LONGEST
        self._found: dict[tuple[object, ...], PoolCache] = {}

    def over(self, tensors: Sequence[Any], prefix: str, longest: Sequence[int | None]) -> PoolCache:
        """The cache object over `tensors`, a list for a pool of a tensor a layer, without tables where there are none of them;
        `prefix` is that of their names.

        longest: the bounds of lengths that the cache takes (`LONGEST`), none for its defaults.
        """
        key = (_places(tensors), *longest)
        found = self._found.get(key) if key[0] is not None else None
        if found is None:
            given = {
                n: self._views(i, t, prefix + n) for i, (n, t) in enumerate(zip(self._names, tensors, strict=False))
            }
            found = self._make(**given, **dict(zip(self._longest, longest, strict=False)))
            if key[0] is not None:
                while len(self._found) >= self._most:
                    self._found.pop(next(iter(self._found)), None)  # the oldest
                self._found[key] = found
        return found

    def _views(self, number: int, given: Any, name: str) -> ArrayView | tuple[ArrayView, ...]:
        if isinstance(given, (list, tuple)):
            return tuple(address_of(item, f"{name}[{i}]") for i, item in enumerate(given))
        one = address_of(given, name)
        return (one,) if self._by_layer and number < self._pools else one


_KEPT_OF: Final[dict[type[PoolCache], Kept]] = {}


def kept_of(cache: type[PoolCache]) -> Kept:
    """The cache objects of a set, which all of its operators share."""
    return _KEPT_OF.setdefault(cache, Kept(cache))


def _places(tensors: Sequence[Any]) -> Place | None:
    """What tells these tensors' memory from other memory; None for tensors that need a closer look at every call."""
    found: list[object] = []
    for given in tensors:
        if isinstance(given, (list, tuple)):
            found.append(_places(given))
        elif given.requires_grad:
            return None
        else:
            found.append((given.data_ptr(), given.shape, given.stride(), given.dtype, given.device))
    return None if None in found else tuple(found)


class CacheOver:
    """Makes the cache object, or the layer of it, from the tensors among an operator's arguments."""

    def __init__(self, cache: type[PoolCache], *, whole: bool, prefix: str = "", tables: bool = True) -> None:
        self._kept, self._prefix, self._whole = kept_of(cache), prefix, whole
        self._numbered = not whole and not a_tensor_a_layer(cache)
        self._tensors = len(cache.TENSORS) + (len(cache.TABLES) if tables else 0)
        self.count = self._tensors + self._numbered

    def __call__(self, values: Sequence[Any], longest: Sequence[int | None] = ()) -> PoolCache | LayerCache:
        """The cache over `values`, its tensors in the order of the schema, and the layer behind them."""
        found = self._kept.over(values[: self._tensors], self._prefix, longest)
        if self._whole:
            return found
        return found[values[self._tensors] if self._numbered else 0]


class PagesOver:
    """Makes the pages of a pool without tables from the tensors among an operator's arguments."""

    def __init__(self, pages: type[BasePages], prefix: str) -> None:
        self._pages = cast(Callable[..., BasePages], pages)
        self._names = [t.name for t in pages.TENSORS]
        self.count = len(self._names)

    def __call__(self, values: Sequence[Any], device: str) -> BasePages:
        """The pages over `values`; those on the host belong to a call on a GPU, which reaches pinned memory."""
        first = values[0][0] if isinstance(values[0], (list, tuple)) else values[0]
        host = device != "cpu" and first.device.type == "cpu"
        return self._pages(**dict(zip(self._names, values, strict=True)), host=host)


def workspace_over(launcher: PlannedLauncher, memory: Any, cache: LayerCache) -> Workspace:
    """The workspace in the bytes of a tensor: for as many rows as it has room for.

    Raises ArgumentError for what is no u8[bytes] at 16 bytes on the cache's device, and where not even one row fits.
    """
    found = address_of(memory, "workspace")
    check(found, "workspace", dtype="u8", shape=(None,), dims=Dims(), writable=True, align=_ALIGN, device=cache.device)
    return _workspace(launcher, found, cache.dims["max_cache_length"] if launcher.SPLIT_PLAN.chunk_tokens else None)


@lru_cache(maxsize=256)
def _workspace(launcher: PlannedLauncher, memory: ArrayView, max_tokens: int | None) -> Workspace:
    def nbytes(rows: int) -> int:
        return launcher.workspace_bytes(rows, device=memory.device, max_tokens=max_tokens)

    (held,) = memory.shape
    if held < nbytes(1):
        raise ArgumentError(
            f"workspace: got {held} bytes; one row takes {nbytes(1)}; pass an array of workspace_bytes(max_rows=...) bytes"
        )
    low, high = 1, 2  # room for `low` rows, none for `high`
    while held >= nbytes(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if held >= nbytes(middle) else (low, middle)
    return launcher.workspace(low, device=memory.device, max_tokens=max_tokens, memory=memory)
