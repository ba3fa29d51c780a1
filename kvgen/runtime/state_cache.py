"""The cache object behind every generated `Cache` of states: a pool a layer, and the state of each request."""

from __future__ import annotations

from typing import ClassVar, Self

from kvgen.runtime.empty_cache import sizes_of
from kvgen.runtime.pool_cache import PoolCache


class BaseState(PoolCache):
    """What generated caches of states share; they give `BYTES`, the bytes of a state."""

    BYTES: ClassVar[int]

    @classmethod
    def empty(cls, *, layers: int, requests: int, pages: int, device: str = "cpu") -> Self:
        """A cache of `pages` states of zeros a layer on `device` ("cpu", "cuda:0"), for so many requests without a state.

        Every entry of `state_ids` is -1: whoever hands out states writes their numbers there. The arrays are NumPy's on the
        CPU, and on a GPU torch's if torch is imported, else kvgen's own with the CUDA array interface; `pools` and `state_ids`
        have them.

        Raises ArgumentError for what is no count, DeviceError where the memory cannot be had.
        """
        return cls._empty(sizes_of(layers, requests, pages, None, None), device)

    @property
    def pools(self) -> object:
        """The layers' pools `[pages, BYTES]` as they were given."""
        return self._given[0]

    @property
    def state_ids(self) -> object | None:
        """The state of each request `[B]` as it was given; None without."""
        return self._given_tables["state_ids"]
