"""Arrays of any library as pointers, shapes and strides, and the checks a launcher makes of them.

Nothing is copied, no stream is waited for, and no array library is imported that the caller has not imported already.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from kvgen.dtypes import DTYPES
from kvgen.errors import ArgumentError

Shape = tuple[int, ...]

_ITEMSIZE: Final[dict[str, int]] = {d.name: d.bytes for d in DTYPES.values() if d.bits % 8 == 0}
_BY_NUMPY_NAME: Final[dict[str, str]] = {d.numpy_name: d.name for d in DTYPES.values() if d.bits % 8 == 0}
_BY_TYPESTR: Final[dict[str, str]] = {
    "f4": "f32", "f2": "f16", "i1": "i8", "u1": "u8", "i4": "i32", "u4": "u32", "i8": "i64", "u8": "u64"
}  # fmt: skip

_READERS: Final[dict[type, Callable[[Any, str], ArrayView]]] = {}  # a cache: the reader of each class seen

_DLPACK_HOST: Final = (1, 3)  # kDLCPU, kDLCUDAHost
_DLPACK_CUDA: Final = (2, 13)  # kDLCUDA, kDLCUDAManaged


class ArrayView(NamedTuple):
    """Where one argument's elements lie.

    `pointer` is the address of element (0, ..., 0), `strides` count elements (they may be negative or zero), `dtype` is
    a kvgen name, `device` is "cpu" or "cuda:<ordinal>". `owner` keeps the memory alive as long as the view lives.
    """

    # A named tuple and no frozen dataclass: it is built three times as fast, once per array and call.
    pointer: int
    shape: Shape
    strides: Shape
    dtype: str
    device: str
    readonly: bool
    owner: object


class Viewed:
    """Memory of kvgen's own that is passed as an array: `view` says where it lies."""

    view: ArrayView


class Dims(dict[str, int]):
    """The symbolic dimensions of one call: name to size, and in `origin` name to the argument that fixed it."""

    __slots__ = ("origin",)

    def __init__(self, sizes: Mapping[str, int] | None = None, origin: str = "the cache") -> None:
        super().__init__(sizes or {})
        self.origin: dict[str, str] = dict.fromkeys(self, origin)


def view(array: object, name: str) -> ArrayView:
    """The view of `array`, called `name` in errors.

    Reads NumPy arrays (ml_dtypes types included), torch tensors, and whatever speaks DLPack or the CUDA array interface
    (version 2 or 3). Raises ArgumentError for anything else, for an element type no kernel takes, and for strides that
    fall between elements.
    """
    kind = type(array)
    reader = _READERS.get(kind)
    if reader is None:
        reader = _READERS[kind] = _reader(kind)
    return reader(array, name)


def itemsize(array: ArrayView) -> int:
    """Bytes of one element."""
    return _ITEMSIZE[array.dtype]


@functools.lru_cache(maxsize=1024)
def contiguous_strides(shape: Shape) -> Shape:
    """C-order strides in elements."""
    strides = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def extent(array: ArrayView) -> tuple[int, int]:
    """The address range [low, high) that the view's elements lie in; empty for a view without elements."""
    low = high = array.pointer
    if 0 in array.shape:
        return low, high
    size = _ITEMSIZE[array.dtype]
    for count, stride in zip(array.shape, array.strides, strict=True):
        reach = (count - 1) * stride * size
        if reach < 0:
            low += reach
        else:
            high += reach
    return low, high + size


def nbytes(array: ArrayView) -> int:
    """Bytes from the first to the last element, gaps between rows included."""
    low, high = extent(array)
    return high - low


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
) -> None:
    """Raise ArgumentError unless `array` is what the kernel was generated for.

    `dtype` is the accepted name or names. `shape` has an int where the spec fixes the size, a name ("T", or "B+1" for
    one more than B) where the call does, None where any size will do; a name takes its size from the first argument
    that has it and is then in `dims`. `field` names the spec field behind the dtype, `fields` those behind single
    dimensions (`field` where it is shorter). The last `packed` dimensions (None: all; with `strides` given: none) must
    be contiguous; `strides` has the exact element stride of a dimension, or None where any will do. Strides of
    dimensions of size 1 mean nothing and are not looked at. `align` in bytes holds for the address and for every stride
    that is neither packed nor exact.
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
    if 0 in sizes:
        return
    if not array.pointer or array.pointer % align:
        raise ArgumentError(
            f"{name}: got address {array.pointer:#x}; it must be a multiple of {align} bytes and not null; "
            "pass an array that does not start in the middle of a row"
        )
    unit = align // _ITEMSIZE[array.dtype] if align > 1 else 1
    fault = _stride_fault(sizes, array.strides, packed, strides, unit, writable)
    if fault is not None:
        axis, rule = fault
        raise ArgumentError(
            f"{name}: got stride {array.strides[axis]} in dimension {axis} (shape {sizes}, strides {array.strides}, in "
            f"elements); {rule}; pass a contiguous array or one of the cache's own views"
        )


@functools.lru_cache(maxsize=4096)  # the same few arrays come back at every step
def _stride_fault(
    shape: Shape, strides: Shape, packed: int | None, exact: tuple[int | None, ...] | None, unit: int, writable: bool
) -> tuple[int, str] | None:
    """The innermost dimension whose stride breaks a rule of `check`, and the rule. `unit` is `align` in elements."""
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


def _wrong_dtype(array: ArrayView, name: str, dtype: str | tuple[str, ...], field: str | None) -> ArgumentError:
    valid = dtype if isinstance(dtype, str) else " or ".join(dtype)
    source = f", {field} of the spec" if field else ""
    return ArgumentError(f"{name}: got dtype {array.dtype}; it must be {valid}{source}; pass a {valid} array")


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
    return ArgumentError(f"{name}: got shape {array.shape}; {rule}{source}; pass shape {valid}")


def _reader(kind: type) -> Callable[[Any, str], ArrayView]:
    """How arrays of one class are read. An array of a library exists only if the library is loaded."""
    if kind is ArrayView:
        return lambda array, name: array
    if issubclass(kind, Viewed):
        return lambda array, name: array.view
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and issubclass(kind, numpy.ndarray):
        return _read_numpy
    if torch is not None and issubclass(kind, torch.Tensor):
        return _read_torch
    return _read_protocol


def _read_numpy(array: Any, name: str) -> ArrayView:
    pointer, readonly = array.__array_interface__["data"]
    dtype = _numpy_dtype(array.dtype)
    if dtype is None:
        raise _unsupported(name, array.dtype.name if array.dtype.isnative else f"{array.dtype} (not native order)")
    strides = _element_strides(array.strides, array.dtype.itemsize, name)
    return ArrayView(pointer, array.shape, strides, dtype, "cpu", readonly, array)


def _read_torch(tensor: Any, name: str) -> ArrayView:
    # Through the tensor's own attributes: DLPack refuses tensors that require a gradient, cuda.core refuses fp8 over
    # DLPack, and both are slower.
    device = _torch_device(tensor.device)
    if device is None or tensor.layout != sys.modules["torch"].strided:
        raise ArgumentError(
            f"{name}: got a {tensor.layout} tensor on {tensor.device}; kernels read strided memory of the CPU or of an "
            "NVIDIA GPU; pass a dense tensor on cpu or cuda"
        )
    dtype = _torch_dtype(tensor.dtype)
    if dtype is None:
        raise _unsupported(name, str(tensor.dtype))
    return ArrayView(tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), dtype, device, False, tensor)


def _read_protocol(array: Any, name: str) -> ArrayView:
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _read_dlpack(array, name)
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is not None:
        return _read_cuda_interface(array, interface, name)
    raise ArgumentError(
        f"{name}: got {type(array).__name__}; it must be an array; pass a NumPy array, a torch tensor, or an object "
        "with DLPack or the CUDA array interface"
    )


def _read_dlpack(array: Any, name: str) -> ArrayView:
    kind, ordinal = (int(number) for number in array.__dlpack_device__())
    if kind not in _DLPACK_HOST and kind not in _DLPACK_CUDA:
        raise ArgumentError(
            f"{name}: got an array on DLPack device type {kind}; kernels run on the CPU (1) or an NVIDIA GPU (2); "
            "pass an array there"
        )
    try:
        found = _strided_memory_view().from_dlpack(array, stream_ptr=-1)
        element = found.dtype  # read on demand, and refused only then
    except (BufferError, TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"{name}: got a {type(array).__name__} that cannot be read over DLPack ({error}); it must be a dense array "
            "of a type DLPack knows; pass 8-bit floats as a torch tensor or a NumPy array"
        ) from error
    dtype = _numpy_dtype(element)
    if dtype is None:
        raise _unsupported(name, element.name)
    shape = tuple(found.shape)
    strides = tuple(found.strides) if found.strides is not None else contiguous_strides(shape)
    device = "cpu" if kind in _DLPACK_HOST else f"cuda:{ordinal}"
    # The DLPack capsule may own the memory, not the exporter: the strided view keeps both.
    return ArrayView(found.ptr, shape, strides, dtype, device, found.readonly, found)


def _read_cuda_interface(array: Any, interface: Mapping[str, Any], name: str) -> ArrayView:
    # cuda.core's reader would do, but it refuses the element types of ml_dtypes, which have no typestr of their own.
    if interface.get("mask") is not None:
        raise ArgumentError(f"{name}: got a masked array; kernels read every element; pass one without a mask")
    typestr = str(interface["typestr"])
    dtype = _BY_TYPESTR.get(typestr[1:])
    if typestr[1] == "V":
        dtype = _BY_NUMPY_NAME.get(str(getattr(array, "dtype", "")))
    if dtype is None or typestr[0] == ">":
        raise _unsupported(name, typestr)
    shape = tuple(interface["shape"])
    byte_strides = interface.get("strides")
    if byte_strides is None:
        strides = contiguous_strides(shape)
    else:
        strides = _element_strides(tuple(byte_strides), int(typestr[2:]), name)
    pointer, readonly = interface["data"]
    from kvgen.runtime import cuda

    device = f"cuda:{cuda.driver().pointer_device(pointer)}"
    return ArrayView(pointer, shape, strides, dtype, device, readonly, array)


def _unsupported(name: str, dtype: str) -> ArgumentError:
    return ArgumentError(
        f"{name}: got dtype {dtype}; it must be one of {', '.join(_ITEMSIZE)}; pass 4-bit and other packed elements as "
        "the uint8 array that holds them"
    )


@functools.lru_cache(maxsize=128)
def _numpy_dtype(dtype: Any) -> str | None:
    """The kvgen name of a NumPy dtype, by its name: ml_dtypes need not be imported to know its types."""
    return _BY_NUMPY_NAME.get(dtype.name) if dtype.isnative else None


@functools.lru_cache(maxsize=1024)
def _element_strides(strides: Shape, size: int, name: str) -> Shape:
    if any(stride % size for stride in strides):
        raise ArgumentError(
            f"{name}: got strides of {strides} bytes; they must be multiples of the {size}-byte element; "
            "pass an array that is no field of a record"
        )
    return tuple(stride // size for stride in strides)


@functools.lru_cache(maxsize=64)
def _torch_dtype(dtype: Any) -> str | None:
    return _BY_NUMPY_NAME.get(str(dtype).removeprefix("torch."))


@functools.lru_cache(maxsize=64)
def _torch_device(device: Any) -> str | None:
    kind = str(device.type)
    if kind == "cuda":
        return f"cuda:{device.index}"
    return "cpu" if kind == "cpu" else None


@functools.cache
def _strided_memory_view() -> Any:
    return importlib.import_module("cuda.core.utils").StridedMemoryView
