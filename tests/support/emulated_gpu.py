"""A GPU that is the CPU machine: the driver calls of kvgen, over host memory and kernels' PTX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvgen.emulator import Buffer
from kvgen.runtime import cuda, tensor_map
from kvgen.runtime import gpu as backend
from kvgen.runtime.module import cpu_kernel
from kvgen.verify.device import Gpu, Timing


class EmulatedDriver:
    """Device memory is host memory; a launch runs the kernel's PTX on the CPU machine, which sees what leaves the memory."""

    def __init__(self, packages: list[Any], fill: Any) -> None:
        self.places = {
            f"{package.Cache.MODULE.name}/{file}".encode(): (package.Cache.MODULE, file, entry)
            for package in packages
            for file, entry in package.Cache.MODULE.kernels
        }
        self.fill = fill
        self.memory: dict[int, Any] = {}

    def current_device(self) -> int:
        return 0

    def capability(self, device: int) -> tuple[int, int]:
        return (9, 0)

    def multiprocessors(self, device: int) -> int:
        return 2

    def mapped(self, pointer: int, device: int) -> int:
        return pointer

    def pointer_device(self, pointer: int) -> int:
        return 0

    def load(self, cubin: bytes, entry: str, device: int) -> object:
        place = self.places.get(cubin)
        return cpu_kernel(*place, "sm_90a", "check") if place else self.fill.kernels[entry]

    def set_max_dynamic_shared(self, handle: object, nbytes: int, device: int) -> None:
        assert nbytes > 48 << 10

    def prepare(self, handle: Any, device: int, grid: Any, block: Any, shared: int, params: Any, pdl: bool) -> Any:
        def go(stream: int) -> None:
            raw = params.bytes_list()  # as a driver reads them: when it launches
            buffers = [
                Buffer(f"memory {i}", pointer, size, True) for i, (pointer, (_, size)) in enumerate(self.memory.items())
            ]
            handle.launch(grid, block, raw, dynamic_shared=shared, buffers=buffers, programmatic=pdl)

        return go

    def allocate(self, nbytes: int, device: int) -> int:
        raw = np.full(nbytes + 256, 0xEE, np.uint8)
        pointer = -(-raw.ctypes.data // 256) * 256
        self.memory[pointer] = (raw, nbytes)
        return int(pointer)

    def free(self, pointer: int, device: int) -> None:
        del self.memory[pointer]

    def write(self, pointer: int, data: bytes, device: int) -> None:
        self._bytes(pointer, len(data))[...] = np.frombuffer(data, np.uint8)

    def read(self, pointer: int, nbytes: int, device: int) -> bytes:
        return bytes(self._bytes(pointer, nbytes))

    def synchronize(self, stream: int, device: int) -> None:
        return None

    def _bytes(self, pointer: int, nbytes: int) -> Any:
        raw, size = self.memory[pointer]
        assert nbytes <= size
        start = pointer - raw.ctypes.data
        return raw[start : start + nbytes]


class EmulatedGpu(Gpu):
    """A Gpu whose launches run once and take a microsecond."""

    def __init__(self, driver: Any) -> None:
        self.ordinal, self.driver, self.stream = 0, driver, 0
        self.multiprocessors, self.l2_bytes = 1, 4096

    def free_bytes(self) -> int:
        return 1 << 28

    def wait(self) -> None:
        return None

    def time(self, launches: Any, *, samples: int = 0) -> Timing:
        for launch in launches:
            launch(self.stream)
        return Timing(1.0, 1.0, len(launches))


def use_emulated(monkeypatch: pytest.MonkeyPatch, driver: EmulatedDriver) -> EmulatedGpu:
    """Let launchers take device arrays to `driver`, whose kernels are compiled for sm_90a; the GPU that has it."""
    monkeypatch.setattr(cuda, "driver", lambda: driver)
    monkeypatch.setattr(backend, "cubin", lambda module, file, entry, capability: f"{module.name}/{file}".encode())
    monkeypatch.setattr(tensor_map, "_encode_cuda", lambda plan, device: tensor_map._encode_cpu(plan))
    backend._function.cache_clear()
    monkeypatch.setattr(
        cuda,
        "function",
        lambda code, entry, shared=0, *, device=0: cuda.Function(
            driver, driver.load(code, entry, device), entry, 0, shared
        ),
    )
    return EmulatedGpu(driver)
