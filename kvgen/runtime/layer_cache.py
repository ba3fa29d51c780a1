"""One layer of a cache as launchers take it: the struct of its kernels, and the memory that the struct leads to."""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.runtime.arrays import ArrayView
from kvgen.runtime.checks import Dims
from kvgen.runtime.module import Module
from kvgen.runtime.overlap import Footprint, Memory
from kvgen.runtime.packing import Bytes


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer of a cache, ready for launchers.

    `struct` are the bytes of the kernels' first parameter and `kind` their size and alignment; `tables` and `memory` are
    the arrays that the addresses in it belong to (`memory`: name, array, whether operations may write to it), `footprint`
    is where both lie. `addresses` and `sizes` have the page pointers: where the layer's first page begins, and the bytes of
    the tensor's elements.
    """

    module: Module
    layer: int
    device: str
    dims: Dims
    struct: bytes
    kind: Bytes
    tables: dict[str, ArrayView]
    memory: tuple[Memory, ...]
    footprint: Footprint
    addresses: dict[str, int]
    sizes: dict[str, int]
