"""Where arrays lie while a kernel runs: host memory for the CPU machine, device memory for a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvgen.layout.dtypes import dtype

Bytes = NDArray[np.uint8]
ALIGN: Final = 256  # bytes, as GPU allocations are


@dataclass(frozen=True)
class View:
    """An array inside a memory: `offset` and `strides` in bytes, `dtype` a kvgen name."""

    memory: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    def of(self, memory: Bytes) -> NDArray[Any]:
        """The array in `memory`, which it shares."""
        kind = dtype(self.dtype).numpy()
        return np.ndarray(self.shape, kind, memory.data, self.offset, self.strides)


class Placed(Protocol):
    """A memory in its place."""

    def array(self, view: View) -> object:
        """The array as launchers take it."""
        ...

    def read(self) -> Bytes:
        """A copy of all bytes, behind every kernel launched so far."""
        ...


class Memory(Protocol):
    """A kind of memory."""

    device: str

    def place(self, data: Bytes) -> Placed:
        """A copy of `data`, aligned to 256 bytes."""
        ...


class HostPlaced:
    """A memory on the host."""

    def __init__(self, data: Bytes) -> None:
        raw = np.empty(len(data) + ALIGN, np.uint8)
        start = -raw.ctypes.data % ALIGN
        self.bytes = raw[start : start + len(data)]
        self.bytes[...] = data

    def array(self, view: View) -> object:
        return view.of(self.bytes)

    def read(self) -> Bytes:
        return self.bytes.copy()


class HostMemory:
    """NumPy arrays."""

    device = "cpu"

    def place(self, data: Bytes) -> Placed:
        return HostPlaced(data)


class GpuArray:
    """An array in device memory, with the CUDA array interface and a dtype of NumPy's name. `owner` keeps the memory."""

    def __init__(
        self,
        owner: object,
        pointer: int,
        shape: tuple[int, ...],
        kind: str,
        strides: tuple[int, ...] | None = None,
    ) -> None:
        element = dtype(kind).numpy()
        self.owner, self.pointer, self.shape = owner, pointer, shape
        self.dtype = element.name
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": shape,
            # NumPy's own types have a word there, those of ml_dtypes none.
            "typestr": element.str if element.isbuiltin == 1 else f"|V{element.itemsize}",
            "data": (pointer, False),
            "strides": strides,
            "version": 3,
        }


class GpuBytes:
    """Device memory, given back with the last reference."""

    def __init__(self, nbytes: int, device: int) -> None:
        from kvgen.runtime import cuda

        self._driver, self._device = cuda.driver(), device
        self.nbytes = nbytes
        self.pointer = self._driver.allocate(max(nbytes, 1), device)

    def __del__(self) -> None:
        if hasattr(self, "pointer"):
            # A lost context gives nothing back; the process that has one ends soon.
            try:
                self._driver.free(self.pointer, self._device)
            except Exception:
                return

    def write(self, data: bytes, offset: int = 0) -> None:
        """Copy to the device."""
        if data:
            self._driver.write(self.pointer + offset, data, self._device)

    def array(self, view: View) -> object:
        return GpuArray(self, self.pointer + view.offset, view.shape, view.dtype, view.strides)

    def read(self) -> Bytes:
        if not self.nbytes:
            return np.zeros(0, np.uint8)
        return np.frombuffer(self._driver.read(self.pointer, self.nbytes, self._device), np.uint8).copy()


class GpuMemory:
    """Memory of one GPU."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.device = f"cuda:{ordinal}"

    def place(self, data: Bytes) -> Placed:
        placed = GpuBytes(len(data), self.ordinal)
        placed.write(data.tobytes())
        return placed
