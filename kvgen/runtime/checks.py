"""The checks that a launcher makes of one array: element type, shape, device, address, strides."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

from kvgen.errors import ArgumentError
from kvgen.runtime.arrays import ITEMSIZE, ArrayView, Extent, Shape, reach


class Dims(dict[str, int]):
    """The symbolic dimensions of one call: name to size, and in `origin` name to the argument that fixed it."""

    __slots__ = ("origin",)

    def __init__(self, sizes: Mapping[str, int] | None = None, origin: str = "the cache") -> None:
        super().__init__(sizes or {})
        self.origin: dict[str, str] = dict.fromkeys(self, origin)


def check(
    array: ArrayView,
    name: str,
    *,
    dtype: str | tuple[str, ...],
    shape: tuple[int | str | None, ...],
    dims: Dims,
    field: str | None = None,
    fields: tuple[str | None, ...] = (),
    packed: int | None = None,
    strides: tuple[int | None, ...] | None = None,
    writable: bool = False,
    align: int = 1,
    device: str | None = None,
) -> Extent:
    """The extent of `array`, which must be what the kernel was generated for; raises ArgumentError where it is not.

    `dtype` is the accepted name or names. `shape` has an int where the spec fixes the size, a name ("T", or "B+1" for
    one more than B) where the call does, None where any size will do; a name takes its size from the first argument
    that has it and is then in `dims`. `field` names the spec field behind the dtype, `fields` those behind single
    dimensions (`field` where it is shorter). The last `packed` dimensions (None: all; with `strides` given: none) must
    be contiguous; `strides` has the exact element stride of a dimension, or None where any will do. Strides of
    dimensions of size 1 mean nothing and are not looked at. `align` in bytes, at least the element's own, holds for the
    address and for every stride that is neither packed nor exact. A `writable` array has no two elements in one place.
    """
    if array.dtype != dtype and (isinstance(dtype, str) or array.dtype not in dtype):
        raise _wrong_dtype(array, name, dtype, field)
    sizes = array.shape
    if sizes != shape:
        if len(sizes) != len(shape):
            raise _wrong_shape(array, name, shape, dims, f"it must have {len(shape)} dimensions", None)
        for size, want in zip(sizes, shape, strict=True):
            if size != want and want is not None and (isinstance(want, int) or dims.get(want) != size):
                _bind(array, name, shape, dims, field, fields)
                break
    if device is not None and array.device != device:
        raise ArgumentError(
            f"{name}: got an array on {array.device}; the call runs on {device}, where the cache is; "
            f"pass an array on {device}"
        )
    if writable and array.readonly:
        raise ArgumentError(f"{name}: got a read-only array; the kernel writes to it; pass a writable one")
    pointer = array.pointer
    if 0 in sizes:
        return pointer, pointer
    size = ITEMSIZE[array.dtype]
    if align < size:
        align = size
    if not pointer or pointer % align:
        raise _wrong_address(array, name, align)
    before, behind, fault = _laid_out(sizes, array.strides, size, packed, strides, align // size, writable)
    if fault is not None:
        axis, rule = fault
        raise ArgumentError(
            f"{name}: got stride {array.strides[axis]} in dimension {axis} (shape {sizes}, strides {array.strides}, in "
            f"elements); {rule}; pass a contiguous array or one of the cache's own views"
        )
    return pointer - before, pointer + behind


@functools.lru_cache(maxsize=4096)
def _laid_out(
    shape: Shape,
    strides: Shape,
    size: int,
    packed: int | None,
    exact: tuple[int | None, ...] | None,
    unit: int,
    writable: bool,
) -> tuple[int, int, tuple[int, str] | None]:
    """The reach of elements of `size` bytes, and what is wrong with their strides. `unit` is `align` in elements."""
    return *reach(shape, strides, size), _stride_fault(shape, strides, packed, exact, unit, writable)


def _stride_fault(
    shape: Shape, strides: Shape, packed: int | None, exact: tuple[int | None, ...] | None, unit: int, writable: bool
) -> tuple[int, str] | None:
    """The innermost dimension whose stride breaks a rule of `check`, and the rule."""
    rank = len(shape)
    free = rank - packed if packed is not None else 0 if exact is None else rank
    dense = 1
    for axis in range(rank - 1, -1, -1):
        stride = strides[axis]
        if shape[axis] != 1:
            want = dense if axis >= free else exact[axis] if exact is not None else None
            if want is not None:
                if stride != want:
                    return axis, f"it must be {want}: {'packed' if axis >= free else 'the layout of the spec'}"
            elif unit > 1 and stride % unit:
                return axis, f"it must be a multiple of {unit} elements"
            elif writable and abs(stride) < dense:
                return axis, f"rows that are written must not overlap: at least {dense} elements apart"
        dense *= shape[axis]
    return None


def _bind(
    array: ArrayView,
    name: str,
    shape: tuple[int | str | None, ...],
    dims: Dims,
    field: str | None,
    fields: tuple[str | None, ...],
) -> None:
    """Give the names that `shape` brings their sizes, and hold the others to theirs."""
    for axis, (size, want) in enumerate(zip(array.shape, shape, strict=True)):
        if want is None or size == want:
            continue
        where = fields[axis] if axis < len(fields) else field
        if isinstance(want, int):
            swapped = _swapped(array.shape, shape, fields)
            if swapped:
                raise _wrong_shape(array, name, shape, dims, swapped, None)
            raise _wrong_shape(array, name, shape, dims, f"dimension {axis} must be {want}", where)
        symbol, _, more = want.partition("+")
        extra = int(more or 0)
        if symbol not in dims:
            if size < extra:
                rule = f"dimension {axis} must be {want}, which is at least {extra}"
                raise _wrong_shape(array, name, shape, dims, rule, where)
            dims[symbol] = size - extra
            dims.origin[symbol] = name
        elif size != dims[symbol] + extra:
            rule = f"{dims.origin.get(symbol, 'the cache')} has {symbol} = {dims[symbol]} but {name} has {size - extra}"
            raise _wrong_shape(array, name, shape, dims, rule, where)
        dims[want] = size
        dims.origin.setdefault(want, name)


def _swapped(sizes: Shape, shape: tuple[int | str | None, ...], fields: tuple[str | None, ...]) -> str | None:
    """What is wrong where two dimensions that the spec fixes are the other way round, as in HND memory given to NHD."""
    fixed = [i for i, want in enumerate(shape) if isinstance(want, int) and i < len(fields) and fields[i]]
    for i in fixed:
        for j in fixed:
            there = list(sizes)
            there[i], there[j] = sizes[j], sizes[i]
            if i < j and sizes[i] != sizes[j] and all(there[k] == shape[k] for k in fixed):
                hnd = " (presets.flashinfer_hnd has heads before tokens)" if fields[i] == "page_size" else ""
                return (
                    f"dimensions {i} and {j} look swapped: the spec's layout has {fields[i]} {shape[i]} before {fields[j]} "
                    f"{shape[j]}; give the spec the layout of this memory{hnd}, or"
                )
    return None


def _wrong_address(array: ArrayView, name: str, align: int) -> ArgumentError:
    if not array.pointer:
        return ArgumentError(
            f"{name}: got a null address for {math.prod(array.shape)} elements; the kernel reads memory; pass an array that "
            "has some"
        )
    size = ITEMSIZE[array.dtype]
    rule = f"{array.dtype} elements have {size} bytes" if align == size else f"an access takes {align} bytes"
    return ArgumentError(
        f"{name}: got address {array.pointer:#x}, {array.pointer % align} past a multiple of {align} bytes; {rule}, so it must "
        f"be a multiple of {align}; pass an array that begins at one, such as a copy"
    )


def _wrong_dtype(array: ArrayView, name: str, dtype: str | tuple[str, ...], field: str | None) -> ArgumentError:
    valid = dtype if isinstance(dtype, str) else " or ".join(dtype)
    source = f", {field} of the spec" if field else ""
    article = "an" if valid[0] in "efi" else "a"  # an e4m3, an f32, an i32
    return ArgumentError(f"{name}: got dtype {array.dtype}; it must be {valid}{source}; pass {article} {valid} array")


def _wrong_shape(
    array: ArrayView, name: str, shape: tuple[int | str | None, ...], dims: Dims, rule: str, field: str | None
) -> ArgumentError:
    wanted = []
    for want in shape:
        if isinstance(want, str):
            symbol, _, more = want.partition("+")
            wanted.append(str(dims[symbol] + int(more or 0)) if symbol in dims else want)
        else:
            wanted.append("any" if want is None else str(want))
    source = f", {field} of the spec" if field else ""
    valid = f"({', '.join(wanted)}{',' if len(wanted) == 1 else ''})"
    mend = f"{rule}{source}; pass" if not rule.endswith(", or") else f"{rule} pass"
    return ArgumentError(f"{name}: got shape {array.shape}; {mend} shape {valid}")
