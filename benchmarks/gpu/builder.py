"""A case under construction: a scene's pool and tables, and the arguments of one call, as memories and views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.cases import Blobs, Bytes, Case, Close, View
from kvgen.layout.dtypes import dtype
from tests.support.memory import GUARD, rows_array
from tests.support.scenes import Memory, Scene

Raw = NDArray[Any]
_AFTER = 128  # bytes behind a table: poison
_KINDS = ("f32", "f16", "bf16", "e4m3", "e5m2", "i8", "u8", "u32", "i32", "i64", "u64")


class QuarterScene(Scene):
    """A scene whose values are multiples of a quarter: random enough to tell elements apart, and a third of the file."""

    def values(self, *shape: int) -> Raw:
        return (np.round(4 * self.rng.standard_normal(shape)) / 4).astype(dtype(self.cache.dtype).numpy())


@dataclass
class Builder:
    """One case under construction."""

    scene: Scene
    blobs: Blobs
    op: str
    name: str
    golden: bool = False
    memories: dict[str, str] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, View] = field(default_factory=dict)
    nan_rows: dict[str, tuple[int, ...]] = field(default_factory=dict)
    close: dict[str, Close] = field(default_factory=dict)

    def _key(self, what: str) -> str:
        return f"{self.op}.{self.name}.{what}"

    def keep(self, name: str, memory: Bytes) -> None:
        """Memory `name` as it is before the launch."""
        self.memories[name] = self.blobs.add(self._key(name), memory)

    def expect(self, name: str, memory: Bytes) -> None:
        """Memory `name` as it must be afterwards."""
        self.after[name] = self.blobs.add(self._key(f"{name}.after"), memory)

    def view(self, name: str, array: Raw, memory: Bytes | None = None) -> View:
        """`array`, with all of the memory it lies in; None: with what follows it in the array it is a view of."""
        if memory is None:
            root = array
            while isinstance(root.base, np.ndarray):
                root = root.base
            # Where in its root it begins depends on an address, and cases are the same each time.
            begin = array.ctypes.data - root.ctypes.data if array.size else 0
            reach = sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)) + array.itemsize
            end = begin + (reach + _AFTER if array.size else _AFTER)
            memory, offset = np.frombuffer(root.tobytes(), np.uint8)[begin:end], 0
        else:
            offset = array.ctypes.data - memory.ctypes.data
        self.keep(name, memory)
        kind = next(n for n in _KINDS if dtype(n).numpy() == array.dtype)
        return View(name, int(offset) if array.size else 0, array.shape, array.strides, kind)

    def argument(self, name: str, array: Raw, memory: Bytes | None = None) -> None:
        """An argument of the call."""
        self.arguments[name] = self.view(name, array, memory)

    def errors(self, word: int) -> None:
        """The error word: cleared before, `word` after."""
        self.argument("errors", np.zeros(1, np.uint64))
        if word:
            self.expect("errors", np.full(1, word, np.uint64).view(np.uint8))

    def rows(self, name: str, count: int, width: Sequence[int], kind: str, values: Raw | None = None) -> Raw:
        """An argument of `count` rows, apart where the batch says so; canaries around, `values` in it."""
        array, memory = rows_array(count, width, kind, strided=self.scene.batch.strided)
        if values is not None:
            array[...] = values
        self.argument(name, array, memory)
        return array

    def done(self, expected: Memory | None = None) -> Case:
        """The case; `expected` is the cache's memory afterwards, None if it must not change."""
        scene = self.scene
        pools = {}
        for name, tensors in scene.tensors.items():
            views = []
            for j, tensor in enumerate(tensors):
                memory = f"{name}.{j}"
                self.keep(memory, tensor.memory)
                if expected is not None:
                    self.expect(memory, expected[name][j])
                kind = next(n for n in _KINDS if dtype(n).numpy() == tensor.kind)
                views.append(View(memory, GUARD, tensor.shape, tensor.strides, kind))
            pools[name] = tuple(views)
        return Case(
            set=scene.kernels.name,
            op=self.op,
            name=self.name,
            golden=self.golden,
            layer=scene.layer,
            memories=self.memories,
            after=self.after,
            pools=pools,
            tables={name: self.view(f"table.{name}", array) for name, array in scene.tables.items()},
            arguments=self.arguments,
            nan_rows=self.nan_rows,
            close=self.close,
        )
