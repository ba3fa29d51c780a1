"""A case: one launch of one operation, its call, and all memory before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.scene import LAYER, Scene
from kvgen.reference import Rows, cache_rows
from kvgen.schema.kernel_set import Op

Raw = NDArray[Any]
Pools = dict[str, Raw | list[Raw]]


def span(array: Raw) -> int:
    """Bytes from an array's first element to the end of its last one, gaps included."""
    if not array.size:
        return 0
    reach: int = sum((n - 1) * step for n, step in zip(array.shape, array.strides, strict=True))
    return reach + array.itemsize


@dataclass(frozen=True)
class Other:
    """A cache besides the set's own that a call takes: the same workload in it, and the tables of its class."""

    scene: Scene
    tables: Mapping[str, Raw] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """One operation's arguments over a scene: `tables` of the cache, `arrays` by name, and `numbers`; `rows` of new tokens, of
    copied ones, of queries, or of ids or pairs of pages. The arrays have `total` rows, padding included; those of request b
    begin at `begins[b]`. `others` are further caches, by argument."""

    op: Op
    scene: Scene
    launcher: Any
    tables: dict[str, Raw]
    arrays: Mapping[str, Raw]
    rows: int
    total: int = 0
    begins: tuple[int, ...] = ()
    numbers: Mapping[str, int] = field(default_factory=dict)
    others: Mapping[str, Other] = field(default_factory=dict)


@dataclass
class Contents:
    """The memory of a launch by name: the cache's tensors, its tables, the call's arrays; that of other caches, by argument."""

    pools: Pools
    tables: dict[str, Raw]
    arrays: dict[str, Raw]
    others: dict[str, Contents] = field(default_factory=dict)

    def flat(self) -> dict[str, Raw]:
        """Every array by a name of its own: tensors of one layer are `name[layer]`."""
        found: dict[str, Raw] = {}
        for name, pool in self.pools.items():
            if isinstance(pool, list):
                found |= {f"{name}[{i}]": array for i, array in enumerate(pool)}
            else:
                found[name] = pool
        found |= {f"{name} of the cache": array for name, array in self.tables.items()}
        for argument, other in self.others.items():
            found |= {f"{argument}.{name}": array for name, array in other.flat().items()}
        return found | self.arrays

    def over(self, flat: Mapping[str, Any]) -> Contents:
        """A memory like this one over other arrays, which `flat` has by its names."""
        return self._over(flat, "")

    def _over(self, flat: Mapping[str, Any], prefix: str) -> Contents:
        def pool(name: str, like: Raw | list[Raw]) -> Any:
            if isinstance(like, list):
                return [flat[f"{prefix}{name}[{i}]"] for i in range(len(like))]
            return flat[f"{prefix}{name}"]

        return Contents(
            {name: pool(name, like) for name, like in self.pools.items()},
            {name: flat[f"{prefix}{name} of the cache"] for name in self.tables},
            {name: flat[f"{prefix}{name}"] for name in self.arrays},
            {name: other._over(flat, f"{prefix}{name}.") for name, other in self.others.items()},
        )

    def copy(self) -> Contents:
        """A memory like this one over copies of all arrays."""
        return self.over({name: array.copy() for name, array in self.flat().items()})

    def rows(self, scene: Scene, layer: int = LAYER) -> tuple[Rows, ...]:
        """The oracle's K and V of a layer, by default that which operations work on."""
        return cache_rows(scene.kv, {**self.pools, **self.tables}, layer)


@dataclass
class Case:
    """One launch of one operation: the call, and the memory before it. `fault`: what is wrong with the data, "" for nothing."""

    batch: str
    fault: str
    call: Call
    before: Contents
    numbers: dict[str, int]
    """The call's arguments that are numbers."""

    @property
    def scene(self) -> Scene:
        """The cache with the batch in it."""
        return self.call.scene


def arrays_of(pools: Mapping[str, Raw | list[Raw]]) -> list[Raw]:
    """The arrays of all tensors."""
    return [array for pool in pools.values() for array in (pool if isinstance(pool, list) else [pool])]


def random_like(like: Raw, rng: np.random.Generator) -> Raw:
    """Random bytes in the shape and strides of an array."""
    raw = rng.integers(0, 256, span(like), np.uint8)
    return np.ndarray(like.shape, like.dtype, raw.data, strides=like.strides)
