"""Boxes of every rank, multicast, and a ring of barriers."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from kvgen.emulator import Buffer, Library
from kvgen.runtime.tensor_map import encode
from kvgen.tensor_map import RowView, TensorMapPlan, scale_tile, split_tile
from tests.emulator.programs import aligned
from tests.tma.kernels import SHARED


def test_multicast(library: Library) -> None:
    memory = aligned(20 * 64)
    memory[:] = np.random.default_rng(3).integers(0, 256, memory.nbytes)
    plan = scale_tile("u32", memory.ctypes.data, 320, 128)
    out = aligned(1024)
    buffers = [
        Buffer("memory", memory.ctypes.data, memory.nbytes, False),
        Buffer("out", out.ctypes.data, out.nbytes, True),
    ]
    arguments = [encode(plan, "cpu"), struct.pack("<Q", out.ctypes.data), struct.pack("<i", 100), bytes(4)]
    library.kernels["multicast"].launch((2, 1, 1), (32, 1, 1), arguments, buffers=buffers, dynamic_shared=SHARED)
    for half in out.view(np.uint32).reshape(2, 128):
        np.testing.assert_array_equal(half, memory.view(np.uint32)[100:228])


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_every_rank(library: Library, rank: int) -> None:
    """Boxes over the tensors' edges, loaded and stored."""
    rng = np.random.default_rng(rank)
    dims, box = (20, 5, 4, 3, 3)[:rank], (16, 4, 2, 2, 2)[:rank]
    strides = [80, 480, 1920, 5760][: rank - 1]
    source, target = (aligned(17280).view(np.uint32) for _ in range(2))
    source[:] = rng.integers(0, 2**32, len(source), np.uint32)
    target[:] = rng.integers(0, 2**32, len(target), np.uint32)
    names = tuple("edcba"[:rank])
    plans = [
        TensorMapPlan("box", "u32", a.ctypes.data, dims, tuple(strides), box, names, 0, 16, 1, 1)
        for a in (source, target)
    ]
    wanted = target.copy()
    start = (1, 2, -1, 1, 0)[:rank]
    for index in np.ndindex(*box):
        at = [s + i for s, i in zip(start, index, strict=True)]
        if all(0 <= c < d for c, d in zip(at, dims, strict=True)):
            place = at[0] + sum(c * s // 4 for c, s in zip(at[1:], strides, strict=True))
            wanted[place] = source[place]
    library.kernels["copy_boxes"].launch(
        (1, 1, 1),
        (1, 1, 1),
        [*(encode(p, "cpu") for p in plans), struct.pack("<i", rank), struct.pack("<i", plans[0].tile_bytes)],
        buffers=[
            Buffer("source", source.ctypes.data, source.nbytes, False),
            Buffer("target", target.ctypes.data, target.nbytes, True),
        ],
        dynamic_shared=SHARED,
    )
    np.testing.assert_array_equal(target, wanted)


@pytest.mark.parametrize("tiles", [1, 2, 3, 7])
@pytest.mark.parametrize("schedule", ["ascending", "descending", 1, 2])
def test_ring(library: Library, tiles: int, schedule: str | int) -> None:
    """Barriers that are used again and again."""
    rng = np.random.default_rng(tiles)
    memory = aligned(53 * 128).view(np.uint32)
    memory[:] = rng.integers(0, 2**20, len(memory))
    plan = split_tile(RowView("u32", memory.ctypes.data, 53, 1, 32, 32, 32), 8, 32)
    sums = aligned(128)
    library.kernels["ring"].launch(
        (1, 1, 1),
        (64, 1, 1),
        [encode(plan, "cpu"), struct.pack("<Q", sums.ctypes.data), struct.pack("<i", tiles)],
        buffers=[
            Buffer("memory", memory.ctypes.data, memory.nbytes, False),
            Buffer("sums", sums.ctypes.data, 128, True),
        ],
        dynamic_shared=SHARED,
        schedule=schedule,
    )
    np.testing.assert_array_equal(sums.view(np.uint32), memory.reshape(53, 32)[: 8 * tiles].sum(0))
