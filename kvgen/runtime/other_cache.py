"""A layer of a cache of another spec, as a kernel takes it beside its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvgen.errors import ArgumentError
from kvgen.runtime.kv_cache import BaseCache
from kvgen.runtime.layer_cache import LayerCache
from kvgen.runtime.packing import Bytes
from kvgen.runtime.params import Call
from kvgen.runtime.pool_cache import PoolCache


@dataclass(frozen=True, slots=True)
class OtherCache:
    """A layer of a cache of another spec, which the kernel reads: kvgen.plan.params.OtherCache with the class at hand.

    `table` is the class with the cache's machine data, `cache` the one that callers make caches of. `window` is how many tokens
    of a request are asked for at most (0: all). Without `tables` only its pages are read.

    With tables it gives the dimension `<name>_tokens`: tokens of a request that it may hold.
    """

    name: str
    table: type[BaseCache]
    window: int = 0
    optional: bool = False
    tables: bool = True

    @property
    def cache(self) -> type[PoolCache]:
        """The class of the caches that a call may bring."""
        return self.table.CALLED or self.table

    @property
    def kind(self) -> Bytes:
        """The struct's size and alignment."""
        return self.table.struct_kind()

    def take(self, given: Any, call: Call) -> bytes:
        """The layer's struct; raises ArgumentError for anything but a layer of that cache, with tables of the same batch."""
        module = self.table.MODULE
        if not isinstance(given, LayerCache) or given.module is not module:
            got = (
                f"a layer of a cache of {given.module.name}" if isinstance(given, LayerCache) else type(given).__name__
            )
            raise ArgumentError(
                f"{self.name}: got {got}; it must be a layer of {module.name}; pass {module.name}(...)[layer]"
            )
        if given.device != call.device:
            raise ArgumentError(
                f"{self.name}: got a cache on {given.device}; the call runs on {call.device}; pass one there"
            )
        call.memory += [(f"{self.name}.{name}", array, False) for name, array, _ in given.memory]
        call.memory += [(f"{self.name}.{name}", array, False) for name, array in given.tables.items()]
        if not self.tables:
            return given.struct
        if given.dims["B"] != call.dims["B"]:
            raise ArgumentError(
                f"{self.name}: got a batch of {given.dims['B']} requests; the cache has {call.dims['B']}; pass tables of the "
                "same requests"
            )
        most = given.dims["max_cache_length"]
        call.dims[f"{self.name}_tokens"] = min(most, self.window) if self.window else most
        call.dims.origin[f"{self.name}_tokens"] = self.name
        return given.struct
