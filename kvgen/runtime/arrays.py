"""Arrays of any library as pointers, shapes and strides.

Nothing is copied, no stream is waited for, and no array library is imported that the caller has not imported already.
"""

from __future__ import annotations

import functools
import importlib
import sys
import traceback
from collections.abc import Callable, Mapping
from operator import index
from typing import Any, Final, NamedTuple, Protocol

from kvgen.errors import ArgumentError, DeviceError, KvgenError
from kvgen.layout.dtypes import DTYPES

Shape = tuple[int, ...]
Extent = tuple[int, int]  # the addresses [low, high) that elements lie in

ITEMSIZE: Final[dict[str, int]] = {d.name: d.bytes for d in DTYPES.values() if d.bits % 8 == 0}
_BY_NUMPY_NAME: Final[dict[str, str]] = {d.numpy_name: d.name for d in DTYPES.values() if d.bits % 8 == 0}
_BY_TYPESTR: Final[dict[str, str]] = {
    "f4": "f32", "f2": "f16", "i1": "i8", "u1": "u8", "i4": "i32", "u4": "u32", "i8": "i64", "u8": "u64"
}  # fmt: skip

_READERS: Final[dict[type, Callable[[Any, str], ArrayView]]] = {}  # a cache: the reader of each class seen

_DLPACK_HOST: Final = (1, 3)  # kDLCPU, kDLCUDAHost
_DLPACK_CUDA: Final = (2, 13)  # kDLCUDA, kDLCUDAManaged
_INTERFACE_VERSIONS: Final = (2, 3)


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

    def raw(self) -> tuple[int, object]:
        """Its address, and all else that the check of an argument looks at."""
        return self.view[0], self.view[1:6]


class SupportsDLPack(Protocol):
    """Arrays of NumPy, torch, JAX, CuPy and others."""

    def __dlpack__(self, *, stream: Any = ...) -> Any:
        """A DLPack capsule of the array."""
        ...


class SupportsCudaArrayInterface(Protocol):
    """Arrays of CuPy, Numba and others, in a GPU's memory."""

    @property
    def __cuda_array_interface__(self) -> Any:
        """Address, shape, strides and type of the array, in a GPU's memory."""
        ...


# What launchers take as an array.
ArrayLike = SupportsDLPack | SupportsCudaArrayInterface | Viewed | ArrayView


def view(array: object, name: str) -> ArrayView:
    """The view of `array`, called `name` in errors.

    Reads NumPy arrays (ml_dtypes types included), torch tensors, and whatever speaks DLPack or the CUDA array interface
    (version 2 or 3). Raises ArgumentError for anything else, for an element type no kernel takes, for strides that fall
    between elements, and where the array's own protocol fails or says what no array can be.
    """
    kind = type(array)
    reader = _READERS.get(kind)
    if reader is None:
        reader = _READERS[kind] = _reader(kind)
    try:
        return reader(array, name)
    except KvgenError:
        raise
    except Exception as error:  # a stranger's code runs here: anything may come out of it
        said = traceback.format_exception_only(error)[-1].strip()
        raise ArgumentError(
            f"{name}: got a {kind.__name__} that cannot be read as an array ({said}); its pointer, shape, strides and dtype "
            "must be there; pass a NumPy array, a torch tensor, or an object whose DLPack or CUDA array interface works"
        ) from error


@functools.cache
def _cuda() -> Any:
    return importlib.import_module("kvgen.runtime.cuda")


def itemsize(array: ArrayView) -> int:
    """Bytes of one element."""
    return ITEMSIZE[array.dtype]


@functools.lru_cache(maxsize=1024)
def contiguous_strides(shape: Shape) -> Shape:
    """C-order strides in elements."""
    strides = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def extent(array: ArrayView) -> Extent:
    """The address range [low, high) that the view's elements lie in; empty for a view without elements."""
    before, behind = reach(array.shape, array.strides, ITEMSIZE[array.dtype])
    return array.pointer - before, array.pointer + behind


@functools.lru_cache(maxsize=4096)  # the same few arrays come back at every step
def reach(shape: Shape, strides: Shape, size: int) -> tuple[int, int]:
    """How many bytes elements take before the first one's address and from it on."""
    if 0 in shape:
        return 0, 0
    before, behind = 0, size
    for count, stride in zip(shape, strides, strict=True):
        reach = (count - 1) * stride * size
        if reach < 0:
            before -= reach
        else:
            behind += reach
    return before, behind


def nbytes(array: ArrayView) -> int:
    """Bytes from the first to the last element, gaps between rows included."""
    low, high = extent(array)
    return high - low


def _reader(kind: type) -> Callable[[Any, str], ArrayView]:
    """How arrays of one class are read. An array of a library exists only if the library is loaded."""
    if kind is ArrayView:
        return lambda array, name: array
    if issubclass(kind, Viewed):
        return lambda array, name: array.view
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and issubclass(kind, numpy.ndarray):
        if kind is numpy.ndarray:
            return _read_numpy
        base = numpy.ndarray  # whatever a subclass says of itself
        return lambda array, name: _read_numpy(base.view(array, base), name)
    if torch is not None and issubclass(kind, torch.Tensor):
        return _refuse_traced if kind.__module__.startswith("torch._subclasses.") else _read_torch
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
    torch = sys.modules["torch"]
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            f"{name}: got a tensor that requires a gradient; kernels have no backward, so its gradient would silently be wrong; "
            f"pass {name}.detach(), or call under torch.no_grad()"
        )
    device = _torch_device(tensor.device)
    if device is None or tensor.layout != torch.strided:
        raise ArgumentError(
            f"{name}: got a {tensor.layout} tensor on {tensor.device}; kernels read strided memory of the CPU or of an "
            "NVIDIA GPU; pass a dense tensor on cpu or cuda"
        )
    dtype = _torch_dtype(tensor.dtype)
    if dtype is None:
        raise _unsupported(name, str(tensor.dtype))
    return ArrayView(tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), dtype, device, False, tensor)


def _refuse_traced(tensor: Any, name: str) -> ArrayView:
    raise ArgumentError(
        f"{name}: got a {type(tensor).__name__}, with which torch traces a program; it has no memory; call the operators of "
        "kvgen.torch.register(...), which torch.compile and torch.export can trace"
    )


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
    kind, ordinal = (index(number) for number in array.__dlpack_device__())
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
    size = ITEMSIZE[dtype]
    steps = tuple(n * size for n in found.strides) if found.strides is not None else None
    shape = tuple(found.shape)
    strides, before, behind = _places(shape, steps, size, name)
    if not before <= found.ptr <= 2**64 - behind:
        raise _impossible(found.ptr, shape, strides, name)
    device = "cpu" if kind in _DLPACK_HOST else f"cuda:{ordinal}"
    # The DLPack capsule may own the memory, not the exporter: the strided view keeps both.
    return ArrayView(found.ptr, shape, strides, dtype, device, found.readonly, found)


def _read_cuda_interface(array: Any, interface: Mapping[str, Any], name: str) -> ArrayView:
    # cuda.core's reader would do, but it refuses the element types of ml_dtypes, which have no typestr of their own.
    if interface["version"] not in _INTERFACE_VERSIONS:
        raise ArgumentError(
            f"{name}: got version {interface['version']!r} of the CUDA array interface; its fields mean what versions 2 and 3 "
            "say; pass an array of those, or one with DLPack"
        )
    if interface.get("mask") is not None:
        raise ArgumentError(f"{name}: got a masked array; kernels read every element; pass one without a mask")
    typestr = str(interface["typestr"])
    dtype = _BY_TYPESTR.get(typestr[1:])
    if typestr[1] == "V":
        dtype = _BY_NUMPY_NAME.get(str(getattr(array, "dtype", "")))
        if dtype is not None and typestr[2:] != str(ITEMSIZE[dtype]):
            dtype = None
    if dtype is None or typestr[0] == ">":
        raise _unsupported(name, typestr)
    shape, steps = tuple(map(index, interface["shape"])), interface.get("strides")
    if steps is not None:
        steps = tuple(map(index, steps))
    strides, before, behind = _places(shape, steps, ITEMSIZE[dtype], name)
    address, readonly = interface["data"]
    pointer = index(address)
    if not before <= pointer <= 2**64 - behind:
        raise _impossible(pointer, shape, strides, name)
    try:
        ordinal = _cuda().driver().pointer_device(pointer)
    except DeviceError as error:
        if "CUDA_ERROR_INVALID_VALUE" not in str(error):  # what an earlier kernel did, and no fault of this array
            raise
        raise ArgumentError(
            f"{name}: got address {pointer:#x}, which the driver does not know ({error}); kernels reach memory that it gave "
            "out; pass an array on a GPU"
        ) from error
    return ArrayView(pointer, shape, strides, dtype, f"cuda:{ordinal}", bool(readonly), array)


@functools.lru_cache(maxsize=1024)
def _places(shape: Shape, steps: Shape | None, size: int, name: str) -> tuple[Shape, int, int]:
    """Strides in elements and the reach of elements whose strides are `steps` bytes, None where they are contiguous."""
    strides = contiguous_strides(shape) if steps is None else _element_strides(steps, size, name)
    if len(strides) != len(shape) or (shape and min(shape) < 0):
        raise ArgumentError(
            f"{name}: got shape {shape} and strides {strides} (in elements); sizes are not negative, and each has a stride; "
            "pass an array whose protocol says so"
        )
    return strides, *reach(shape, strides, size)


def _impossible(pointer: int, shape: Shape, strides: Shape, name: str) -> ArgumentError:
    return ArgumentError(
        f"{name}: got address {pointer:#x} with shape {shape} and strides {strides} (in elements); that leaves 64 bits; pass an "
        "array whose protocol says where its memory is"
    )


def _unsupported(name: str, dtype: str) -> ArgumentError:
    return ArgumentError(
        f"{name}: got dtype {dtype}; it must be one of {', '.join(ITEMSIZE)}; pass 4-bit and other packed elements as "
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
