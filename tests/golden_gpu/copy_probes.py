"""Boxes of every rank, multicast, a ring of barriers, where elements of tiles lie (tests/tma and kernels/tma_more.cu), and
plain asynchronous copies (tests/tma/cp_async.cu).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvgen.compile.flatten import flatten
from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe, TensorMap, u32
from tests.golden_gpu.tile_probes import NOWHERE, UNIT
from tests.golden_gpu.wgmma_probes import swizzled

ROOT: Final = Path(__file__).resolve().parents[2]


def cuda() -> str:
    """tests/tma/cp_async.cu."""
    folders = {"cp_async.cu": ROOT / "tests" / "tma"}
    return flatten(
        "cp_async.cu", lambda path: (folders.get(path, ROOT / "templates") / path).read_text(encoding="utf-8")
    )


DIMS, BOX, STRIDES = (20, 5, 4, 3, 3), (16, 4, 2, 2, 2), (80, 480, 1920, 5760, 17280)


def _box(memory: Array, start: tuple[int, ...]) -> tuple[Array, list[int | None]]:
    """The box at `start` of a tensor of words, zeros outside of it, and the place of each word."""
    rank, places = len(start), list[int | None]()
    for index in np.ndindex(*reversed(BOX[:rank])):
        at = [s + i for s, i in zip(start, reversed(index), strict=True)]
        inside = all(0 <= c < d for c, d in zip(at, DIMS, strict=False))
        places.append(at[0] + sum(c * s // 4 for c, s in zip(at[1:], STRIDES, strict=False)) if inside else None)
    return np.array([0 if p is None else memory[p] for p in places], np.uint32), places


def _box_map(array: str, rank: int) -> TensorMap:
    return TensorMap(array, "u32", DIMS[:rank], STRIDES[: rank - 1], BOX[:rank])


def _words(seed: int, count: int) -> Array:
    return np.random.default_rng(seed).integers(0, 2**32, count, np.uint32)


def rank_probes(rank: int) -> Iterator[Probe]:
    """A box loaded and stored; and two boxes loaded by two blocks for both."""
    size = int(np.prod(BOX[:rank]))
    start, count = (1, 2, -1, 1, 0)[:rank], STRIDES[rank - 1] // 4

    def copied(arrays: Arrays) -> dict[str, Wanted]:
        target = arrays["target"].copy()
        for value, place in zip(*_box(arrays["source"], start), strict=True):
            if place is not None:
                target[place] = value
        return {"target": exact(target)}

    yield Probe(
        f"library_copy_box_{rank}d",
        UNIT,
        "copy_boxes",
        lambda: {"source": _words(110 + rank, count), "target": _words(120 + rank, count)},
        copied,
        1,
        shared=size * 4 + 1024,
        head=[_box_map("source", rank), _box_map("target", rank)],
        tail=[u32(rank), u32(size * 4)],
        unpassed=["source", "target"],
    )

    def both(arrays: Arrays) -> dict[str, Wanted]:
        halves = [_box(arrays["source"], (x, *(2, -1, 1, 0)[: rank - 1]))[0] for x in range(2)]
        return {"out": exact(np.concatenate(halves * 2))}

    yield Probe(
        f"library_multicast_{rank}d",
        UNIT,
        "multicast_boxes",
        lambda: {"source": _words(130 + rank, count), "out": np.zeros(4 * size, np.uint32)},
        both,
        32,
        (2, 1, 1),
        shared=size * 8 + 1024,
        head=[_box_map("source", rank)],
        tail=[u32(rank), u32(size * 4)],
        unpassed=["source"],
    )


PAGES, PAGE_ROWS, ROW_HEADS, CHUNKS_OF_HEAD = 4, 32, 3, 2


def _groups_probe(name: str, page: int) -> Probe:
    """Two groups, from the second on, of the second head of `page`: 2 chunks of 128 bytes a row, heads side by side. Of a page
    that the tensor has not, zeros, which count as bytes; then all that the tensor has is NaN."""
    shape = (PAGES, PAGE_ROWS // 8, 8, ROW_HEADS * CHUNKS_OF_HEAD, 64)
    row = ROW_HEADS * CHUNKS_OF_HEAD * 128
    box = TensorMap(
        "source",
        "u16",
        (64, 8, ROW_HEADS * CHUNKS_OF_HEAD, PAGE_ROWS // 8, PAGES),
        (row, 128, 8 * row, PAGE_ROWS * row),
        (64, 8, CHUNKS_OF_HEAD, 2, 1),
        128,
    )

    def wanted(arrays: Arrays) -> dict[str, Wanted]:
        """Group, chunk, row, and 16 bytes of it at their number ^ row."""
        out = np.zeros((2, CHUNKS_OF_HEAD, 8, 8, 8), np.uint16)
        for group, chunk, own, eight in np.ndindex(2, CHUNKS_OF_HEAD, 8, 8):
            if page < PAGES:
                found = arrays["source"].view(np.uint16).reshape(shape)[page, 1 + group, own, CHUNKS_OF_HEAD + chunk]
                out[group, chunk, own, eight ^ own] = found[8 * eight : 8 * eight + 8]
        return {"out": exact(out.reshape(-1).view(np.uint32))}

    nbytes, words = 2 * CHUNKS_OF_HEAD * 1024, int(np.prod(shape)) // 2

    def inputs() -> dict[str, Array]:
        source = _words(140, words) if page < PAGES else np.full(words, 0xFFFFFFFF, np.uint32)
        return {"source": source, "out": np.full(nbytes // 4, 0xEEEEEEEE, np.uint32)}

    return Probe(
        name,
        UNIT,
        "groups_of_rows",
        inputs,
        wanted,
        64,
        shared=nbytes + 1024,
        head=[box],
        tail=[u32(CHUNKS_OF_HEAD), u32(1), u32(page), u32(nbytes)],
        unpassed=["source"],
    )


def _places(arrays: Arrays) -> dict[str, Wanted]:
    words = arrays["in"]
    row, column = words % 24, words // 24 % 64
    wide = ((column // 64 * 24 + row) * 64 + column % 64) * 2
    narrow = ((column // 4 * 24 + row) * 4 + column % 4) * 4
    major = row // 8 * 8 * 64 + column // 32 * 8 * 32 + row % 8 * 32 + column % 32
    rows = [swizzled(words.astype(np.int64), s) for s in (0, 32, 64, 128)]
    rows += [np.where(words >> 31, 0xC0000000, words), swizzled(wide.astype(np.int64), 128), narrow]
    rows += [swizzled(major.astype(np.int64), 64), row * column * 8]
    return {"out": exact(np.stack(rows).astype(np.uint32))}


def _place_inputs() -> dict[str, Array]:
    words = _words(140, 256)
    words[:128] %= 4096
    words[128:132] = NOWHERE, 2**31, 2**31 - 1, 0
    return {"in": words, "out": np.zeros((9, 256), np.uint32)}


def _written(arrays: Arrays) -> dict[str, Wanted]:
    tensor = (np.arange(1, 65, dtype=np.uint64) * 0x9E3779B9).astype(np.uint32)
    return {
        "tensor": exact(tensor),
        "out": exact(np.concatenate([tensor, 1 << 16 | 4 * np.arange(64, dtype=np.uint32)])),
    }


def _coordinates(arrays: Arrays) -> dict[str, Wanted]:
    rows = arrays["rows"]
    return {
        "out": exact(np.stack([rows % np.uint64(1 << 20), rows >> np.uint64(20)], axis=1).astype(np.int32).reshape(-1))
    }


def _multicast(arrays: Arrays) -> dict[str, Wanted]:
    return {"out": exact(np.concatenate([arrays["source"][100:228]] * 2))}


def _ring(arrays: Arrays) -> dict[str, Wanted]:
    return {"sums": exact(arrays["source"].reshape(-1, 32)[:56].sum(axis=0, dtype=np.uint32))}


def _cp_async(arrays: Arrays) -> dict[str, Wanted]:
    rows, memory = arrays["rows"], arrays["memory"].reshape(-1, 16)
    missing = (rows < 0) | (np.arange(64) >= 61)
    return {"out": exact(np.where(missing[:, None], 0, memory[rows]).astype(np.uint8).reshape(-1))}


def _cp_async_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(141)
    rows = np.where(rng.random(64) < 0.3, -1, rng.integers(0, 40, 64)).astype(np.int32)
    return {"memory": rng.integers(0, 256, 640, np.uint8), "out": np.full(1024, 0xEE, np.uint8), "rows": rows}


def probes() -> list[Probe]:
    """All of this module."""
    found = [probe for rank in range(1, 6) for probe in rank_probes(rank)]

    def probe(
        name: str, inputs: Arrays, wanted: Callable[[Arrays], dict[str, Wanted]], block: int = 32, **more: Any
    ) -> Probe:
        unpassed = [n for n in inputs if n == "source"]
        return Probe(f"library_{name}", UNIT, name, lambda: dict(inputs), wanted, block, unpassed=unpassed, **more)

    zeros = {n: np.zeros(n, np.uint32) for n in (32, 64, 128, 256)}
    line = TensorMap("source", "u32", (320, 1), (1280,), (128, 1))
    rows = TensorMap("source", "u32", (32, 1, 60), (128, 128), (32, 1, 8), 128)
    own = TensorMap("tensor", "u32", (64,), (), (64,))
    multicast = {"source": _words(142, 320), "out": zeros[256]}
    ring = {"source": _words(143, 1920), "sums": zeros[32]}
    big = np.array([0, 5, 2**20 - 1, 2**20, 2**40 + 77, 2**50 + 2**20 - 1, *[2**33] * 26], np.uint64)
    return [
        *found,
        probe("multicast", multicast, _multicast, grid=(2, 1, 1), shared=2048, head=[line], tail=[u32(100), u32(0)]),
        probe("ring", ring, _ring, 64, shared=4096, head=[rows], tail=[u32(7)]),
        probe("coordinates", {"rows": big, "out": np.zeros(64, np.int32)}, _coordinates, tail=[u32(1 << 20)]),
        probe("written_tile", {"tensor": zeros[64], "out": zeros[128]}, _written, 64, shared=2048, head=[own]),
        _groups_probe("library_groups_of_rows", 2),
        _groups_probe("library_groups_of_rows_nowhere", 2**31),
        _groups_probe("library_groups_of_rows_out_of_range", 0xC0000000),
        probe("tile_places", _place_inputs(), _places, 256),
        Probe("library_cp_async", "cp_async", "rows16", _cp_async_inputs, _cp_async, 32, tail=[u32(61)]),
    ]
