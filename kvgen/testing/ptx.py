"""PTX that some other compiler made, run on the CPU machine with NumPy arrays as its memory."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvgen import emulator
from kvgen.emulator import Buffer, Counters, Mode, Schedule
from kvgen.errors import ArgumentError
from kvgen.runtime.arrays import ArrayView
from kvgen.runtime.cpu import Memory, ranges

Extents = int | tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TiledArray:
    """An array that a kernel takes as a CUtensorMap."""

    array: NDArray[Any]
    map: emulator.TensorMap


def tensor_map(
    array: NDArray[Any],
    box: Sequence[int],
    *,
    swizzle: Literal[0, 32, 64, 128] = 0,
    element_strides: Sequence[int] = (),
    oob_fill: Literal["zero", "nan"] = "zero",
) -> TiledArray:
    """A tensor map of `array`, as cuTensorMapEncodeTiled makes it, for the arguments of `run_ptx`.

    `box` and `element_strides` count elements from the innermost dimension (the array's last) outwards, as the
    coordinates in PTX do. `swizzle` is a span in bytes. Types of one byte that the map does not know (fp8) are uint8.
    Raises ArgumentError for an array that no tensor map describes, EmulatorError for what the driver refuses.
    """
    if not isinstance(array, np.ndarray) or not array.ndim:
        raise ArgumentError(
            f"array: got {_kind(array)}; a tensor map describes memory; pass a NumPy array of 1 to 5 axes"
        )
    if array.strides[-1] != array.itemsize:
        raise ArgumentError(
            f"array: got a last axis of stride {array.strides[-1]} bytes for elements of {array.itemsize}; the elements of "
            "the innermost dimension lie next to each other; pass a contiguous array"
        )
    name = array.dtype.name if array.itemsize > 1 else "uint8"
    dims, strides = tuple(reversed(array.shape)), tuple(reversed(array.strides[:-1]))
    made = emulator.TensorMap(
        name, array.ctypes.data, dims, strides, tuple(box), tuple(element_strides), swizzle, oob_fill=oob_fill
    )
    return TiledArray(array, made)


def run_ptx(
    ptx: str,
    entry: str | None = None,
    *,
    grid: Extents = 1,
    block: Extents,
    args: Sequence[object] = (),
    shared: int = 0,
    cluster: Extents | None = None,
    memory: Sequence[NDArray[Any]] = (),
    mode: Mode = "check",
    schedule: Schedule = "ascending",
) -> Counters:
    """Run one kernel of a PTX module to its end; what it writes is in the arrays, the counters come back.

    `entry` names the kernel where the module has several. `grid`, `block` and `cluster` are extents along x, or (x, y, z).
    `args` are the kernel's parameters in order: an array is passed as its pointer, `tensor_map(...)` as a CUtensorMap, a
    NumPy scalar as its bytes, an int or float as a number of the parameter's size, bytes (a struct) as they are, None as
    a null pointer. The kernel may touch the arrays among them and those of `memory`, to which pointers in memory lead,
    and write those that NumPy lets be written; faults call them args[0] and memory[0]. `shared` is the dynamic shared
    memory in bytes. `mode` and `schedule` are those of docs/testing.md.

    Raises ArgumentError for an argument that does not fit its parameter, KernelFault for what the kernel does wrong,
    TranslateError for PTX that the CPU machine does not know, HostCompilerError without a C++ compiler, EmulatorError for
    a launch that a GPU would refuse.
    """
    library = emulator.build([ptx], mode=mode)
    names = list(library.kernels)
    if entry is None and len(names) != 1:
        raise ArgumentError(f"entry: got None; the module has {len(names)} kernels; pass one of {', '.join(names)}")
    if entry is not None and entry not in names:
        raise ArgumentError(f"entry: got {entry!r}; the module has no such kernel; pass one of {', '.join(names)}")
    kernel = library.kernels[names[0] if entry is None else entry]
    sizes = kernel.parameter_sizes
    if len(args) != len(sizes):
        raise ArgumentError(f"args: got {len(args)} values; {kernel.name} takes {len(sizes)} parameters")
    raw = [_packed(f"args[{i}]", value, size) for i, (value, size) in enumerate(zip(args, sizes, strict=True))]
    touched = [(f"args[{i}]", a.array if isinstance(a, TiledArray) else a) for i, a in enumerate(args)]
    touched += [(f"memory[{i}]", a) for i, a in enumerate(memory)]
    found = [_memory(name, a) for name, a in touched if isinstance(a, np.ndarray)]
    buffers = [Buffer(name, low, high - low, writes) for name, low, high, writes in ranges(found)]
    return kernel.launch(
        _extents("grid", grid), _extents("block", block), raw, dynamic_shared=shared, buffers=buffers, schedule=schedule,
        cluster=None if cluster is None else _extents("cluster", cluster),
    )  # fmt: skip


def _extents(name: str, given: Extents) -> tuple[int, int, int]:
    values = (given,) if isinstance(given, int) else tuple(given)
    if not 1 <= len(values) <= 3 or not all(isinstance(n, int) for n in values):
        raise ArgumentError(f"{name}: got {given!r}; it has up to three extents; pass x or (x, y, z)")
    x, y, z = (*values, 1, 1)[:3]
    return x, y, z


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _packed(name: str, value: object, size: int) -> bytes:
    """The bytes of one parameter of `size` bytes."""
    match value:
        case np.ndarray():
            data = struct.pack("<Q", value.ctypes.data)
        case TiledArray():
            data = value.map.encode()
        case None:
            data = bytes(8)
        case np.generic():
            data = value.tobytes()
        case bytes():
            data = value
        case int():
            return _integer(name, int(value), size)
        case float() if size in (4, 8):
            return struct.pack("<f" if size == 4 else "<d", value)
        case _:
            raise ArgumentError(
                f"{name}: got {_kind(value)} for a parameter of {size} bytes; pass a NumPy array or scalar, tensor_map(...), "
                "an int, a float, bytes or None"
            )
    if len(data) != size:
        raise ArgumentError(f"{name}: got {_kind(value)}, {len(data)} bytes; the parameter has {size}; pass as many")
    return data


def _integer(name: str, value: int, size: int) -> bytes:
    if size not in (1, 2, 4, 8):
        raise ArgumentError(f"{name}: got {value}; the parameter has {size} bytes and is no number; pass bytes")
    if not -(1 << 8 * size - 1) <= value < 1 << 8 * size:
        raise ArgumentError(f"{name}: got {value}; the parameter has {size} bytes; pass a number that fits")
    return (value & (1 << 8 * size) - 1).to_bytes(size, "little")


def _memory(name: str, array: NDArray[Any]) -> Memory:
    """All bytes from the array's first to its last, gaps included."""
    low, high = np.lib.array_utils.byte_bounds(array)
    view = ArrayView(low, (high - low,), (1,), "u8", "cpu", not array.flags.writeable, array)
    return Memory(name, view, array.flags.writeable)
