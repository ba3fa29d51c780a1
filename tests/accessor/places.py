"""Where the tests run: the CPU machine on NumPy arrays, or a GPU on copies of them. And the packages they run."""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvgen import KernelSet
from kvgen.codegen.emit import render_device, render_set, write_file
from kvgen.runtime import cuda
from kvgen.runtime.arrays import ArrayView, view
from kvgen.runtime.cpu import machine
from kvgen.schema.loader import LoadedSet

PACKAGE = "kvgen_accessor_tests"
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


@cache
def _root() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix=PACKAGE)
    for file in render_device().values():
        write_file(Path(folder.name) / PACKAGE, file)
    sys.path.insert(0, folder.name)
    return folder


def build(kernels: KernelSet) -> ModuleType:
    """The generated package of a set, imported; nothing is compiled before a launch."""
    root = Path(_root().name) / PACKAGE
    for file in render_set(LoadedSet(kernels, "tests/accessor", "")).values():
        write_file(root, file)
    importlib.invalidate_caches()
    return importlib.import_module(f"{PACKAGE}.{kernels.name}")


class Copies:
    """Device memory that mirrors host memory while a launch lasts."""

    def __init__(self, device: str) -> None:
        self.ordinal = int(device.partition(":")[2])
        self.driver = cuda.driver()
        self.held: dict[int, tuple[Any, int, int]] = {}

    def of(self, array: Any) -> ArrayView:
        """The array over a copy of all the memory it is a view of."""
        found, owner = view(array, "array"), array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        key = owner.ctypes.data
        if key not in self.held:
            memory = self.driver.allocate(owner.nbytes + 256, self.ordinal)
            self.held[key] = owner, memory, memory + (key - memory) % 256  # aligned as here
            self.driver.write(self.held[key][2], owner.tobytes(), self.ordinal)
        pointer = self.held[key][2] + found.pointer - key
        return ArrayView(pointer, found.shape, found.strides, found.dtype, f"cuda:{self.ordinal}", found.readonly, self)

    def back(self) -> None:
        """What the device has, where it came from; waits for it."""
        for owner, memory, start in self.held.values():
            data = np.frombuffer(self.driver.read(start, owner.nbytes, self.ordinal), np.uint8)
            owner.reshape(-1).view(np.uint8)[...] = data
            self.driver.free(memory, self.ordinal)


class Session:
    """A generated cache over a scene's memory, for launches on one device; what they write is there after `with`."""

    def __init__(self, device: str, package: ModuleType, arrays: Mapping[str, Any], tables: Mapping[str, Any]) -> None:
        self.package, self.copies = package, Copies(device) if device != "cpu" else None
        fields = {name: self.of(value) for name, value in {**arrays, **tables}.items()}
        self.cache = package.Cache(**fields)

    def of(self, value: Any) -> Any:
        """An array, a list of arrays, or anything else, as a launcher for this device takes it."""
        if isinstance(value, list):
            return [self.of(v) for v in value]
        if self.copies is None or not isinstance(value, np.ndarray):
            return value
        return self.copies.of(value)

    def launch(self, op: str, layer: int, **arguments: Any) -> None:
        """Run an operation of the package."""
        getattr(self.package, op)(self.cache[layer], **{n: self.of(v) for n, v in arguments.items() if v is not None})


@contextmanager
def session(
    device: str, package: ModuleType, arrays: Mapping[str, Any], tables: Mapping[str, Any], arch: str = "sm_90a"
) -> Iterator[Session]:
    """On the CPU machine in check mode, of `arch`; or on a GPU, whatever it is."""
    if device == "cpu":
        with machine(arch=arch, mode="check", schedule=7):
            yield Session(device, package, arrays, tables)
        return
    found = Session(device, package, arrays, tables)
    yield found
    assert found.copies is not None
    found.copies.back()


__all__ = ["DEVICES", "Session", "build", "session"]
