"""Sets for the launchers' tests, their generated packages, device arrays without a device, and a driver that takes notes."""

from __future__ import annotations

import importlib
import sys
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kvgen import Continuous, KernelSet, Layout, Paged, ops
from kvgen.codegen.emit import render_all, write_file
from kvgen.errors import DeviceError
from kvgen.runtime import cuda, packing
from kvgen.schema.loader import LoadedSet

Raw = NDArray[Any]
PACKAGE = "kvgen_launcher_tests"
BF16 = np.dtype(ml_dtypes.bfloat16)
SETS = (
    KernelSet(
        name="paged",
        q_heads=4,
        cache=Paged(dtype="bf16", kv_heads=2, head_dim=16, page_size=4),
        ops=(ops.Append(), ops.Gather(), ops.Decode(split="balanced"), ops.Decode(name="fixed", split="invariant")),
    ),
    KernelSet(
        name="apart",
        q_heads=2,
        cache=Paged(
            dtype="f32",
            kv_heads=2,
            head_dim=8,
            v_head_dim=4,
            page_size=4,
            layout=Layout(k="page token head dim", v="page token head dim", layers="pointers"),
            lengths="after",
            lengths_dtype="i32",
        ),
        ops=(ops.Append(), ops.Append(name="append_slots", rows="slots"), ops.Decode()),
        arch=("sm_80", "sm_100f"),
    ),
    KernelSet(
        name="interleaved",
        q_heads=2,
        cache=Paged(dtype="f32", kv_heads=2, head_dim=8, page_size=4, layout="layer page token head kv dim"),
        ops=(ops.Gather(),),
    ),
    KernelSet(
        name="blocks",
        q_heads=2,
        cache=Continuous(dtype="f16", kv_heads=1, head_dim=8, max_tokens=6),
        ops=(ops.Append(),),
    ),
)


@cache
def _root() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix=PACKAGE)
    for file in render_all([LoadedSet(s, "tests/support/launching.py", "") for s in SETS]).values():
        write_file(Path(folder.name) / PACKAGE, file)
    sys.path.insert(0, folder.name)
    return folder


@cache
def package(name: str) -> ModuleType:
    """The generated package of a set."""
    _root()
    return importlib.import_module(f"{PACKAGE}.{name}")


def zeros(*shape: int, dtype: Any = BF16) -> Raw:
    """Zeros at an address divisible by 64."""
    kind = np.dtype(dtype)
    raw = np.zeros(int(np.prod(shape)) * kind.itemsize + 64, np.uint8)
    return np.ndarray(shape, kind, raw.data, -raw.ctypes.data % 64)


def i32(*values: int) -> Raw:
    """An index array of the default type."""
    return np.array(values, np.int32)


class DeviceArray:
    """What CuPy's arrays say of themselves; nobody reads the memory."""

    def __init__(
        self, shape: tuple[int, ...], dtype: Any, pointer: int, *, strides: tuple[int, ...] | None = None
    ) -> None:
        self.dtype = np.dtype(dtype)
        typestr = f"|V{self.dtype.itemsize}" if self.dtype == BF16 else self.dtype.str
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": typestr, "data": (pointer, False), "version": 3, "strides": strides
        }  # fmt: skip


def on_device(array: Raw, pointer: int) -> DeviceArray:
    """A device array like `array`."""
    return DeviceArray(array.shape, array.dtype, pointer)


@dataclass(eq=False)
class NotingDriver:
    """A driver that writes down launches. Addresses from 2^40 on are the second GPU's."""

    launches: list[dict[str, Any]] = field(default_factory=list)
    loaded: list[tuple[bytes, str, int]] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    shared: dict[str, int] = field(default_factory=dict)  # more than 48 KB of it, by kernel

    def current_device(self) -> int:
        return 0

    def capability(self, device: int) -> tuple[int, int]:
        return (9, 0)

    def multiprocessors(self, device: int) -> int:
        return 132

    def pointer_device(self, pointer: int) -> int:
        return pointer >> 40

    def mapped(self, pointer: int, device: int) -> int:
        raise DeviceError("cuPointerGetAttribute: got CUDA_ERROR_INVALID_VALUE; invalid argument")

    def load(self, cubin: bytes, entry: str, device: int) -> object:
        self.loaded.append((cubin, entry, device))
        return entry

    def set_max_dynamic_shared(self, handle: object, nbytes: int, device: int) -> None:
        assert isinstance(handle, str) and nbytes > 48 * 1024
        self.shared[handle] = nbytes

    def prepare(
        self,
        handle: object,
        device: int,
        grid: cuda.Dim3,
        block: cuda.Dim3,
        shared: int,
        params: packing.PackedArgs,
        pdl: bool,
    ) -> cuda.Launch:
        def step(stream: int) -> None:
            found = {"entry": handle, "device": device, "grid": grid, "block": block, "shared": shared, "pdl": pdl}
            self.launches.append({**found, "stream": stream, "params": params.bytes_list()})

        return step

    def allocate(self, nbytes: int, device: int) -> int:
        return (device << 40) + (1 << 30)

    def free(self, pointer: int, device: int) -> None:
        self.freed.append(pointer)

    def write(self, pointer: int, data: bytes, device: int) -> None:
        raise AssertionError("launchers write no device memory")

    def read(self, pointer: int, nbytes: int, device: int) -> bytes:
        raise AssertionError("launchers read no device memory")

    def synchronize(self, stream: int, device: int) -> None:
        raise AssertionError("launchers wait for nothing")
