"""What kernels take, at run time: what a call brings, checked against kvgen.plan.params and turned into what is packed."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Final, Protocol

from kvgen.errors import ArgumentError
from kvgen.plan.params import Array, Count, Pool, Scalar, Size, TensorMap
from kvgen.runtime.arrays import ArrayView, Extent, itemsize, view
from kvgen.runtime.checks import Dims, check
from kvgen.runtime.module import Module
from kvgen.runtime.packing import TENSOR_MAP, Bytes, ParamKind

_RANGES: Final = {
    "i32": (-(2**31), 2**31 - 1), "u32": (0, 2**32 - 1), "i64": (-(2**63), 2**63 - 1), "u64": (0, 2**64 - 1),
}  # fmt: skip
_F32_MAX: Final = 3.4028235677973366e38  # what rounds to a finite f32 lies below

# Parameters that many kernels take, as generated tables name them.
ERRORS: Final = Array("errors", "u64", (1,), access="inout", optional=True)
NUM_ROWS: Final = Size("num_rows", "u32", "T")
ROW_OFFSETS: Final = Array("row_offsets", "i32", ("B+1",), field="index_dtype")
SPLIT_SIZES: Final = tuple(Size(name, "u32", name) for name in ("num_sm_parts", "max_rows", "max_chunks", "max_slots"))
WORKSPACE: Final = Array("workspace", "u8", ("W",), access="inout", align=16)


@dataclass(slots=True)
class Call:
    """One call while its arguments are taken: the sizes known so far, the device, and memory that arguments lead to
    (name, array, whether the kernel writes to it) besides the cache's own and the arrays."""

    dims: Dims
    device: str
    memory: list[tuple[str, ArrayView, bool]]
    module: Module | None = None


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


def check_array(param: Array, array: ArrayView, dims: Dims, device: str) -> Extent:
    """The extent of `array`; raises ArgumentError unless it fits. Binds the dimension names."""
    return check(
        array,
        param.name,
        dtype=param.dtype,
        shape=param.shape,
        dims=dims,
        field=param.field,
        fields=param.fields or (None,) * len(param.shape),
        packed=len(param.shape) - int(param.strided) if param.strided else None,
        writable=param.access != "in",
        align=param.align,
        device=device,
    )


def size_of(param: Size, dims: Dims) -> int:
    """The number that follows; raises ArgumentError where it is too large for the kernel."""
    number = math.prod(dims[name] for name in param.value.split("*"))
    if param.dtype == "u32" and number >= 2**32:
        name = dims.origin.get(param.value.split("*")[-1], "cache")
        raise ArgumentError(f"{name}: got {param.value} = {number}; kernels count it in 32 bits; pass less than 2^32")
    return number


def take(param: Scalar | Count | TensorMap | Struct, given: Any, call: Call) -> int | float | bytes:
    """What the kernel gets for `given`; raises ArgumentError for what is none of its kind. A number and a count are dimensions
    from then on, which may size the grid."""
    if isinstance(param, Scalar):
        return _scalar(param, given, call)
    if isinstance(param, Count):
        return _count(param, given, call)
    if isinstance(param, TensorMap):
        return _tensor_map(param, given)
    return param.take(given, call)


def _scalar(param: Scalar, given: Any, call: Call) -> int | float:
    whole = param.dtype != "f32"
    numbers: Any = Integral if whole else Real
    if isinstance(given, bool) or not isinstance(given, numbers):
        kind = "an int" if whole else "a float"
        raise ArgumentError(f"{param.name}: got {given!r}; the kernel takes {param.dtype}; pass {kind}")
    if not whole:
        try:
            number = float(given)
        except OverflowError:  # a whole number past f64
            number = _F32_MAX
        if _F32_MAX <= abs(number) < float("inf"):
            raise ArgumentError(
                f"{param.name}: got {given!r}; the kernel takes f32; pass at most 3.4028235e38, or an infinity"
            )
        return number
    low, high = _RANGES[param.dtype]
    value = int(given)
    if not low <= value <= high:
        raise ArgumentError(
            f"{param.name}: got {value}; the kernel takes {param.dtype}; pass a number from {low} to {high}"
        )
    if param.most is not None and not (0 <= value <= param.most and value % param.multiple == 0):
        steps = f"a multiple of {param.multiple} " if param.multiple > 1 else ""
        raise ArgumentError(
            f"{param.name}: got {value}; the operation takes {steps}from 0 to {param.most}; pass one of these"
        )
    call.dims[param.name] = value
    return value


def _count(param: Count, given: Any, call: Call) -> int:
    call.dims[param.name] = number = 0 if call.dims[param.rows] == 0 else _counted(param, given)
    call.dims.origin[param.name] = param.name
    for dim in param.max_count if number else ():
        if number * param.rows_each > call.dims[dim]:
            takes = f", which takes {number * param.rows_each} rows" if param.rows_each > 1 else ""
            raise ArgumentError(
                f"{param.name}: got {number}{takes}; {call.dims.origin.get(dim, 'the call')} has {call.dims[dim]} rows; "
                f"pass at most {call.dims[dim] // param.rows_each}"
            )
    return number


def _counted(param: Count, given: Any) -> int:
    if given is not None and not issubclass(type(given), (Real, str)):  # an array, or what cannot be read as one
        array = view(given, param.name)
        if array.device != "cpu" or math.prod(array.shape) != 1 or array.dtype not in _RANGES:
            raise ArgumentError(
                f"{param.name}: got {array.dtype}{list(array.shape)} on {array.device}; it sizes the launch, so it is read "
                "here; pass an int or a host array of one whole number, or use the form of the operation that takes it on "
                "the device"
            )
        word = ctypes.string_at(array.pointer, itemsize(array))
        given = int.from_bytes(word, "little", signed=array.dtype[0] == "i")
    if isinstance(given, bool) or not isinstance(given, Integral) or not 0 <= int(given) < 2**63:
        raise ArgumentError(f"{param.name}: got {given!r}; it counts rows; pass an int from 0 on")
    return int(given)


def _tensor_map(param: TensorMap, given: object) -> bytes:
    data = given if isinstance(given, bytes) else getattr(given, "data", None)
    if not isinstance(data, bytes) or len(data) != TENSOR_MAP.size:
        got = f"{len(data)} bytes" if isinstance(data, bytes) else type(given).__name__
        raise ArgumentError(
            f"{param.name}: got {got}; it must be a tensor map of {TENSOR_MAP.size} bytes; pass what "
            "kvgen.runtime.tensor_map.encode() returns"
        )
    return data


Param = Array | Size | Scalar | Count | TensorMap | Struct


def kinds_of(params: Sequence[Param | Pool]) -> tuple[ParamKind, ...]:
    """How each of them is packed."""
    return tuple(_kind(p) for p in params)


def _kind(param: Param | Pool) -> ParamKind:
    if isinstance(param, TensorMap):
        return TENSOR_MAP
    if isinstance(param, (Array, Pool)):
        return "ptr"
    return param.dtype if isinstance(param, (Size, Scalar, Count)) else param.kind
