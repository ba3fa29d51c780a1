"""One layer of a cache as launchers take it: the struct of its kernels, and the memory that the struct leads to."""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.runtime.arrays import ArrayView
from kvgen.runtime.checks import Dims
from kvgen.runtime.module import Module
from kvgen.runtime.overlap import Footprint, Memory
from kvgen.runtime.packing import Bytes


class SizesKey:
    """The sizes of a step as a key: equal where all of them are. A step of other tables of the same sizes has an equal one."""

    __slots__ = ("_hash", "_items")

    def __init__(self, dims: Dims) -> None:
        self._items = tuple(sorted(dims.items()))
        self._hash = hash(self._items)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, SizesKey) and self._items == other._items)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class StepLayers:
    """What the layers of the same tensors have in common in a step.

    `dims` are the sizes, `key` the same as a key; `values` the struct's fields, pools 0; `tables` the arrays that kernels only
    read, `memory` the pools and the counts that operations write to; `footprint` is where all of them lie.
    """

    dims: Dims
    key: SizesKey
    values: list[int]
    tables: dict[str, ArrayView]
    memory: tuple[Memory, ...]
    footprint: Footprint


class LayerCache:
    """One layer of a cache, ready for launchers: `cache[layer]`.

    `struct` are the bytes of the kernels' first parameter and `kind` their size and alignment. `addresses` and `sizes` have
    the page pointers: where the layer's first page begins, and the bytes of the tensor's elements. `step` has what all layers
    share: sizes, tables, memory.
    """

    __slots__ = ("addresses", "device", "kind", "layer", "module", "sizes", "step", "struct")

    def __init__(
        self,
        module: Module,
        layer: int,
        device: str,
        step: StepLayers,
        struct: bytes,
        addresses: dict[str, int],
        sizes: dict[str, int],
        kind: Bytes,
    ) -> None:
        self.module = module
        self.layer = layer
        self.device = device
        self.step = step
        self.struct = struct
        self.addresses = addresses
        self.sizes = sizes
        self.kind = kind

    @property
    def dims(self) -> Dims:
        """The sizes of the pool and of this step."""
        return self.step.dims

    @property
    def tables(self) -> dict[str, ArrayView]:
        """The arrays that kernels only read."""
        return self.step.tables

    @property
    def memory(self) -> tuple[Memory, ...]:
        """Pools, and counts that operations write to: name, array, whether operations may write to it."""
        return self.step.memory

    @property
    def footprint(self) -> Footprint:
        """Where tables and memory lie."""
        return self.step.footprint

    def __repr__(self) -> str:
        return f"layer {self.layer} of {self.module.name}.Cache on {self.device!r}"
