"""What kernels take, at run time: the parameters of a launch and the fields of the cache's struct."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Final, Literal, Protocol

from kvgen.errors import ArgumentError
from kvgen.runtime.arrays import ArrayView, Extent, itemsize, view
from kvgen.runtime.checks import Dims, check
from kvgen.runtime.module import Module
from kvgen.runtime.packing import TENSOR_MAP, Bytes, ParamKind

_RANGES: Final = {
    "i32": (-(2**31), 2**31 - 1), "u32": (0, 2**32 - 1), "i64": (-(2**63), 2**63 - 1), "u64": (0, 2**64 - 1),
}  # fmt: skip
_F32_MAX: Final = 3.4028235677973366e38  # what rounds to a finite f32 lies below


@dataclass(slots=True)
class Call:
    """One call while its arguments are taken: the sizes known so far, the device, and memory that arguments lead to
    (name, array, whether the kernel writes to it) besides the cache's own and the arrays."""

    dims: Dims
    device: str
    memory: list[tuple[str, ArrayView, bool]]
    module: Module | None = None


@dataclass(frozen=True, slots=True)
class Array:
    """An array: see kvgen.plan.kernel.Param, whose run-time half this is."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    access: Literal["in", "out", "inout"] = "in"
    align: int = 1
    strided: bool = False
    optional: bool = False
    field: str | None = None
    fields: tuple[str | None, ...] = ()
    in_place: tuple[str, ...] = ()
    rows: str = ""

    def check(self, array: ArrayView, dims: Dims, device: str) -> Extent:
        """The extent of `array`; raises ArgumentError unless it fits. Binds the dimension names."""
        return check(
            array,
            self.name,
            dtype=self.dtype,
            shape=self.shape,
            dims=dims,
            field=self.field,
            fields=self.fields or (None,) * len(self.shape),
            packed=len(self.shape) - 1 if self.strided else None,
            writable=self.access != "in",
            align=self.align,
            device=device,
        )


@dataclass(frozen=True, slots=True)
class Pool:
    """The address of the layer's memory of a role ("k", "v"); a field of the cache's struct only."""

    name: str


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number that follows from the arguments: a size, a stride, or a product of sizes, "B*S"."""

    name: str
    dtype: Literal["u32", "i64"]
    value: str

    def number(self, dims: Dims) -> int:
        """Its value; raises ArgumentError where it is too large for the kernel."""
        number = math.prod(dims[name] for name in self.value.split("*"))
        if self.dtype == "u32" and number >= 2**32:
            name = dims.origin.get(self.value.split("*")[-1], "cache")
            raise ArgumentError(
                f"{name}: got {self.value} = {number}; kernels count it in 32 bits; pass less than 2^32"
            )
        return number


@dataclass(frozen=True, slots=True)
class Number:
    """A number that the call brings."""

    name: str
    dtype: Literal["f32", "i32", "u32", "i64", "u64"]
    optional: bool = False

    def take(self, given: Any, call: Call) -> int | float:
        """`given` as the kernel gets it; raises ArgumentError for what is no such number."""
        whole = self.dtype != "f32"
        numbers: Any = Integral if whole else Real
        if isinstance(given, bool) or not isinstance(given, numbers):
            kind = "an int" if whole else "a float"
            raise ArgumentError(f"{self.name}: got {given!r}; the kernel takes {self.dtype}; pass {kind}")
        if not whole:
            try:
                number = float(given)
            except OverflowError:  # a whole number past f64
                number = _F32_MAX
            if _F32_MAX <= abs(number) < float("inf"):
                raise ArgumentError(
                    f"{self.name}: got {given!r}; the kernel takes f32; pass at most 3.4028235e38, or an infinity"
                )
            return number
        low, high = _RANGES[self.dtype]
        value = int(given)
        if not low <= value <= high:
            raise ArgumentError(
                f"{self.name}: got {value}; the kernel takes {self.dtype}; pass a number from {low} to {high}"
            )
        call.dims[self.name] = value  # it may size the grid
        return value


@dataclass(frozen=True, slots=True)
class Count:
    """A count on the host, an int or an array of one, which sizes the grid: it is a dimension by its name.

    Where the call has no rows, dimension `rows`, it is not looked at: callers without rows have none. It counts `each` rows
    a unit, of which the dimensions `most` have enough.
    """

    name: str
    rows: str = "T"
    most: tuple[str, ...] = ()
    each: int = 1
    optional: bool = False
    dtype: Literal["i64"] = "i64"

    def take(self, given: Any, call: Call) -> int:
        """The number; raises ArgumentError for what is no count."""
        call.dims[self.name] = number = 0 if call.dims[self.rows] == 0 else self._read(given)
        call.dims.origin[self.name] = self.name
        for dim in self.most if number else ():
            if number * self.each > call.dims[dim]:
                takes = f", which takes {number * self.each} rows" if self.each > 1 else ""
                raise ArgumentError(
                    f"{self.name}: got {number}{takes}; {call.dims.origin.get(dim, 'the call')} has {call.dims[dim]} rows; "
                    f"pass at most {call.dims[dim] // self.each}"
                )
        return number

    def _read(self, given: Any) -> int:
        if given is not None and not issubclass(type(given), (Real, str)):  # an array, or what cannot be read as one
            array = view(given, self.name)
            if array.device != "cpu" or math.prod(array.shape) != 1 or array.dtype not in _RANGES:
                raise ArgumentError(
                    f"{self.name}: got {array.dtype}{list(array.shape)} on {array.device}; it sizes the launch, so it is read "
                    "here; pass an int or a host array of one whole number, or use the form of the operation that takes it on "
                    "the device"
                )
            word = ctypes.string_at(array.pointer, itemsize(array))
            given = int.from_bytes(word, "little", signed=array.dtype[0] == "i")
        if isinstance(given, bool) or not isinstance(given, Integral) or not 0 <= int(given) < 2**63:
            raise ArgumentError(f"{self.name}: got {given!r}; it counts rows; pass an int from 0 on")
        return int(given)


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor map that the call brings: 128 bytes, or an object with them as `data`."""

    name: str
    optional: bool = False

    def take(self, given: object, call: Call) -> bytes:
        """Its bytes; raises ArgumentError for anything else."""
        data = given if isinstance(given, bytes) else getattr(given, "data", None)
        if not isinstance(data, bytes) or len(data) != TENSOR_MAP.size:
            got = f"{len(data)} bytes" if isinstance(data, bytes) else type(given).__name__
            raise ArgumentError(
                f"{self.name}: got {got}; it must be a tensor map of {TENSOR_MAP.size} bytes; pass what "
                "kvgen.runtime.tensor_map.encode() returns"
            )
        return data


class Struct(Protocol):
    """A struct that the call brings by value: pages of a pool, another cache."""

    @property
    def name(self) -> str: ...

    @property
    def optional(self) -> bool: ...

    @property
    def kind(self) -> Bytes: ...

    def take(self, given: Any, call: Call) -> bytes:
        """Its bytes; raises ArgumentError for what is no such thing."""
        ...


Param = Array | Scalar | Number | Count | TensorMap | Struct


def kinds_of(params: Sequence[Param | Pool]) -> tuple[ParamKind, ...]:
    """How each of them is packed."""
    return tuple(_kind(p) for p in params)


def _kind(param: Param | Pool) -> ParamKind:
    if isinstance(param, TensorMap):
        return TENSOR_MAP
    if isinstance(param, (Array, Pool)):
        return "ptr"
    return param.dtype if isinstance(param, (Scalar, Number, Count)) else param.kind
