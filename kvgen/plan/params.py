"""Parameters: what a kernel takes behind the cache, and the fields of the cache's struct.

One vocabulary for everybody who speaks of them: operations make these, the C signature, the launcher's signature and docstring
are written from them, a generated launcher holds them, and the runtime checks arguments against them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvgen.layout.dtypes import dtype as element

Access = Literal["in", "out", "inout"]


@dataclass(frozen=True, slots=True)
class Array:
    """An array that the call brings, as a pointer; in the cache's struct a page table or lengths.

    `shape` has numbers and dimension names ("T" rows, "B" requests ...). `align` is the pointer's alignment in bytes;
    `strided` leaves the first axis's stride free, 2 also the second one's. `untrusted` marks device data that may hold
    anything. `field` names the spec field behind the dtype and `fields` those behind the axes, for error messages.
    `in_place` names arguments and tables of the cache that an array which is written may be, element for element: the
    kernel has read each element before it writes it, and nobody else reads it. Any other overlap is refused. An
    argument with `rows` is not looked at where that dimension is 0.
    `c_name` is its name in C where that is another.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    access: Access = "in"
    align: int = 1
    strided: bool | Literal[2] = False
    optional: bool = False
    field: str | None = None
    fields: tuple[str | None, ...] = ()
    in_place: tuple[str, ...] = ()
    rows: str = ""
    untrusted: bool = False
    doc: str = ""
    c_name: str = ""

    @property
    def declaration(self) -> str:
        """The parameter in the kernel's C signature, the field in the struct."""
        return f"{'const ' if self.access == 'in' else ''}{element(self.dtype).c}* {self.c_name or self.name}"


@dataclass(frozen=True, slots=True)
class Pool:
    """The address of the layer's own memory of a role ("k", "v" ...): a field of the cache's struct only, which is one for
    kernels that write to it and kernels that do not."""

    name: str
    dtype: str = "u8"
    doc: str = ""

    @property
    def declaration(self) -> str:
        """The field in the struct."""
        return f"{element(self.dtype).c}* {self.name}"


@dataclass(frozen=True, slots=True)
class Size:
    """A number that follows from the arguments: a size, a stride "k.stride" (the second axis's: "k.row_stride"), or a product
    of sizes, "B*S"."""

    name: str
    dtype: Literal["u32", "i64"]
    value: str
    doc: str = ""
    c_name: str = ""

    @property
    def declaration(self) -> str:
        """The parameter in the kernel's C signature, the field in the struct."""
        return f"{element(self.dtype).c} {self.c_name or self.name}"


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number that the call brings: a multiple of `multiple`, at most `most` where that is given; then none is negative."""

    name: str
    dtype: Literal["f32", "i32", "u32", "i64", "u64"]
    optional: bool = False
    doc: str = ""
    c_name: str = ""
    most: int | None = None
    multiple: int = 1

    @property
    def declaration(self) -> str:
        """The parameter in the kernel's C signature."""
        return f"{element(self.dtype).c} {self.c_name or self.name}"


@dataclass(frozen=True, slots=True)
class Count:
    """A count on the host, an int or an array of one, which sizes the grid: it is a dimension by its name.

    Where the call has no rows, dimension `rows`, it is not looked at: callers without rows have none. It counts `rows_each` rows
    a unit, of which the dimensions `max_count` have enough.
    """

    name: str
    rows: str = "T"
    max_count: tuple[str, ...] = ()
    rows_each: int = 1
    optional: bool = False
    doc: str = ""
    dtype: Literal["i64"] = "i64"

    @property
    def declaration(self) -> str:
        """The parameter in the kernel's C signature."""
        return f"{element(self.dtype).c} {self.name}"


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor map that the call brings, by value: 128 bytes, or an object with them as `data`."""

    name: str
    optional: bool = False
    doc: str = ""

    @property
    def declaration(self) -> str:
        """The parameter in the kernel's C signature."""
        return f"const __grid_constant__ TensorMap {self.name}"


@dataclass(frozen=True, slots=True)
class PoolMap(TensorMap):
    """A tensor map of a layer's pages, which the launcher makes: copies bring groups of 8 tokens of one head (kvgen.tensor_map's
    group_tile), `rows` tokens a tile.

    The pages are those of pointer `base`, from `offset` bytes on: `heads` heads of `dim` elements, strides in elements, or
    bytes that hold two. On a device without tensor copies it is zeros.
    """

    base: str = ""
    element: str = ""
    heads: int = 0
    dim: int = 0
    token_stride: int = 0
    head_stride: int = 0
    rows: int = 0
    offset: int = 0
    swizzle: Literal[32, 64, 128] = 128


@dataclass(frozen=True, slots=True)
class PagePool:
    """The pages of every layer of a pool, by value: the cache's own, or an `argument`'s.

    `pointers` are page pointers, of which there is room for `layers` layers; `together` are (pointer, other, bytes): pages of
    `other` lie so many bytes behind those of the pointer. `writes`: the kernel stores to them.
    """

    name: str
    pointers: tuple[str, ...]
    layers: int
    together: tuple[tuple[str, str, int], ...] = ()
    argument: bool = False
    writes: bool = False
    optional: bool = False
    doc: str = ""

    @property
    def declaration(self) -> str:
        """The parameter in the kernel's C signature."""
        return f"const __grid_constant__ PagePool {self.name}"


@dataclass(frozen=True, slots=True)
class OtherCache:
    """A layer of another cache, by value, which the kernel reads: of class `cache` of the generated module, in C of namespace
    `space`.

    `window`: of a request's tokens at most so many are asked for, the last ones; 0: all. Without `tables` its pages alone
    are read, by places that the call names: it may have any tables, or none.
    """

    name: str
    cache: str
    window: int = 0
    optional: bool = False
    doc: str = ""
    space: str = "source"
    tables: bool = True

    @property
    def declaration(self) -> str:
        """The parameter in the kernel's C signature."""
        return f"const __grid_constant__ {self.space}::Cache {self.name}"


Param = Array | Size | Scalar | Count | TensorMap | PagePool | OtherCache
Field = Pool | Array | Size


def is_argument(param: Param) -> bool:
    """The parameter is an argument of the launcher."""
    return not isinstance(param, Size | PoolMap) and (not isinstance(param, PagePool) or param.argument)
