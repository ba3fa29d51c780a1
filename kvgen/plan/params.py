"""Parameters: what a kernel takes behind the cache, and the fields of the cache's struct."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from kvgen.layout.dtypes import DType

Access = Literal["in", "out", "inout"]
Brought = Literal["", "scalar", "count", "tensor_map", "pages", "cache"]
_STRUCTS: Final = {"tensor_map": "TensorMap", "pages": "PagePool", "cache": "source::Cache"}


@dataclass(frozen=True)
class Param:
    """One parameter of a kernel, or one field of the cache's struct.

    An array has a `shape` of numbers and dimension names ("T" rows, "B" requests ...); a scalar has none and takes the
    run-time quantity called `value`, or is `brought` by the call: a number, a count that sizes the grid (an int or a host
    array of one), a tensor map, the pages of another pool, another cache. `align` is the pointer's
    alignment in bytes; `strided` leaves the first axis's stride free. `untrusted` marks device data that may hold
    anything. `field` names the spec field behind the dtype and `fields` those behind the axes, for error messages. A field
    of shape ("pool",) is the layer's own memory of a role. `in_place` names arguments and tables of the cache that an array
    which is written may be, element for element: the kernel has read each element before it writes it, and nobody else reads
    it. Any other overlap is refused. A count of `each` rows a unit is at most what the dimensions `most` have; an argument
    with `rows` is not looked at where that dimension is 0.
    """

    name: str
    dtype: DType
    shape: tuple[int | str, ...] | None = None
    access: Access = "in"
    value: str = ""
    align: int = 1
    strided: bool = False
    optional: bool = False
    untrusted: bool = False
    doc: str = ""
    field: str = ""
    fields: tuple[str | None, ...] = ()
    brought: Brought = ""
    in_place: tuple[str, ...] = ()
    most: tuple[str, ...] = ()
    each: int = 1
    rows: str = ""

    @property
    def declaration(self) -> str:
        """The parameter in the kernel's C signature, the field in the struct."""
        if self.brought in _STRUCTS:
            return f"const __grid_constant__ {_STRUCTS[self.brought]} {self.name}"
        if self.shape is None:
            return f"{self.dtype.c} {self.name}"
        qualifier = "const " if self.access == "in" else ""
        return f"{qualifier}{self.dtype.c}* {self.name}"


@dataclass(frozen=True, kw_only=True)
class CacheParam(Param):
    """A second cache, by value: a layer of class `class_name` of the generated module. `window`: of its requests' tokens at
    most so many are moved, the last ones; 0: all."""

    class_name: str
    window: int = 0
