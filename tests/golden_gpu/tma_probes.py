"""The copy engine's tiled mode (kernels/tma.cu): rank 1 to 5, swizzles, elements outside the tensor, stores, reductions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.golden_gpu.compare import Rule, Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import DTYPES, Array, is_float
from tests.golden_gpu.probe import Arrays, Probe, TensorMap, u32
from tests.golden_gpu.wgmma_probes import swizzled


class Tile:
    """A tensor of `dims` elements, innermost first, and the box at `at` of it."""

    def __init__(
        self, kind: str, dims: Sequence[int], box: Sequence[int], at: Sequence[int], swizzle: Any = 0, nan: bool = False
    ) -> None:
        self.kind, self.dims, self.box, self.at, self.nan = kind, tuple(dims), tuple(box), tuple(at), nan
        size = int(DTYPES[kind].itemsize)
        strides, extent = [], -(-dims[0] * size // 16) * 16
        for n in dims[1:]:
            strides.append(extent)
            extent *= n
        self.nbytes = extent
        self.steps = (size, *strides)
        self.map = TensorMap("tensor", kind, self.dims, tuple(strides), self.box, swizzle, nan)
        self.bytes = int(np.prod(box)) * size

    def pairs(self) -> list[tuple[int, int | None]]:
        """(place in the tile, place in the tensor or None outside of it) of every element, in bytes."""
        size = DTYPES[self.kind].itemsize
        found = []
        for number, place in enumerate(itertools.product(*(range(n) for n in reversed(self.box)))):
            where = [a + p for a, p in zip(self.at, reversed(place), strict=True)]
            inside = all(0 <= w < n for w, n in zip(where, self.dims, strict=True))
            offset = sum(w * s for w, s in zip(where, self.steps, strict=True)) if inside else None
            found.append((int(swizzled(np.array(number * size), self.map.swizzle)), offset))
        return found

    def coordinates(self) -> Array:
        """As the kernel takes them."""
        return np.array([*self.at, *[0] * (5 - len(self.at))], np.int32)

    def tensor(self, seed: int, whole: bool = False) -> Array:
        """The tensor's bytes; small whole numbers where they are added to."""
        rng = np.random.default_rng(seed)
        if not whole:
            return rng.integers(0, 256, self.nbytes, np.uint8)
        numbers = rng.integers(0, 100, self.nbytes // DTYPES[self.kind].itemsize)
        made: Array = numbers.astype(DTYPES[self.kind]).view(np.uint8)
        return made

    def load(self, name: str) -> Probe:
        """The tile as it arrives."""

        def wanted(arrays: Arrays) -> dict[str, Wanted]:
            size, fill = DTYPES[self.kind].itemsize, np.zeros(8, np.uint8)
            if self.nan:
                fill[:size] = np.array([np.nan]).astype(DTYPES[self.kind]).view(np.uint8)
            out = np.zeros(self.bytes, np.uint8)
            for to, source in self.pairs():
                out[to : to + size] = fill[:size] if source is None else arrays["tensor"][source : source + size]
            bits = out.view(f"u{size}")
            return {"out": Wanted(bits, Rule(self.kind if is_float(self.kind) else f"b{8 * size}", any_nan=self.nan))}

        def inputs() -> dict[str, Array]:
            out = np.zeros(self.bytes // DTYPES[self.kind].itemsize, f"u{DTYPES[self.kind].itemsize}")
            return {"tensor": self.tensor(len(name)), "out": out, "at": self.coordinates()}

        return self._probe(name, "tile_load", inputs, wanted, [])

    def store(self, name: str, reduce: str = "") -> Probe:
        """The tensor afterwards."""
        code = {"": 0, "add": 1, "max": 2, "xor": 3}[reduce]
        combine: Any = {"add": np.add, "max": np.maximum, "xor": np.bitwise_xor}.get(reduce)

        def wanted(arrays: Arrays) -> dict[str, Wanted]:
            tensor, given, kind = arrays["tensor"].copy(), arrays["in"].view(np.uint8), DTYPES[self.kind]
            for source, to in self.pairs():
                if to is not None:
                    new = given[source : source + kind.itemsize]
                    place = tensor[to : to + kind.itemsize]
                    place[...] = combine(place.view(kind), new.view(kind)).view(np.uint8) if combine else new
            return {"tensor": exact(tensor)}

        def inputs() -> dict[str, Array]:
            rng = np.random.default_rng(len(name) + 50)
            given = rng.integers(0, 100, self.bytes // DTYPES[self.kind].itemsize).astype(DTYPES[self.kind])
            return {
                "tensor": self.tensor(len(name), bool(reduce)),
                "in": given.view(np.uint8),
                "at": self.coordinates(),
            }

        return self._probe(name, "tile_store", inputs, wanted, [u32(code)])

    def _probe(self, name: str, kernel: str, inputs: Any, wanted: Any, more: list[bytes]) -> Probe:
        tail: list[bytes | TensorMap] = [u32(len(self.dims)), u32(self.bytes), *more, self.map]
        return Probe(name, "tma", kernel, inputs, wanted, 32, shared=self.bytes + 16, tail=tail)


def probes() -> list[Probe]:
    """All of this module."""
    found = [
        Tile("f32", (100,), (64,), (70,)).load("tile_1d_past_the_end"),
        Tile("u8", (100,), (64,), (-16,)).load("tile_1d_before_the_start"),
        Tile("u32", (16, 4), (16, 4), (0, 0)).load("tile_2d_all"),
        Tile("bf16", (72, 20), (16, 16), (-5, 8), 0, True).load("tile_2d_nan"),
        Tile("f16", (72, 20), (16, 16), (60, -3), 0, True).load("tile_2d_nan_f16"),
        Tile("f32", (24, 20), (8, 16), (20, 10), 32, True).load("tile_2d_nan_f32"),
        Tile("u16", (40, 9, 6), (16, 4, 3), (30, 7, -1)).load("tile_3d"),
        Tile("u64", (6, 5, 4, 3), (4, 3, 2, 2), (3, 3, 3, 2)).load("tile_4d"),
        Tile("u8", (32, 5, 4, 3, 3), (16, 3, 2, 2, 2), (20, 3, 3, -1, 2)).load("tile_5d"),
    ]
    for swizzle in (32, 64, 128):
        inner = swizzle // 2
        found += [
            Tile("bf16", (80, 40), (inner, 24), (3, 20), swizzle).load(f"tile_2d_swizzle_{swizzle}"),
            Tile("bf16", (80, 40), (inner, 16), (5, 30), swizzle).store(f"store_2d_swizzle_{swizzle}"),
            Tile("u8", (96, 6, 5), (swizzle, 4, 4), (-7, 4, 2), swizzle).load(f"tile_3d_swizzle_{swizzle}"),
        ]
    for rank, (dims, box, at) in {
        1: ((100,), (32,), (80,)),
        2: ((20, 9), (16, 4), (-4, 7)),
        3: ((20, 5, 4), (16, 2, 3), (8, 4, -1)),
        4: ((20, 5, 4, 3), (8, 2, 2, 2), (15, -1, 3, 2)),
        5: ((8, 3, 3, 3, 3), (4, 2, 2, 2, 2), (6, 2, -1, 0, 2)),
    }.items():
        found.append(Tile("s32", dims, box, at).store(f"store_{rank}d"))
    for kind, op in (("u32", "add"), ("f16", "add"), ("f32", "add"), ("s32", "max"), ("u32", "xor")):
        found.append(Tile(kind, (24, 9), (16, 8), (-3, 4)).store(f"reduce_{kind}_{op}", op))
    return found
