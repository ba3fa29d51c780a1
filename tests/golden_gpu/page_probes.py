"""Pages as bytes (kernels/pages.cu): pairs of them copied, of which some are skipped and some wrong."""

from __future__ import annotations

from typing import Final

import numpy as np

from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact, random_bytes
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe

LAYERS, PAGES, THREADS, PIECE, TILE = 2, 7, 256, 16, 1024
SMALL, LARGE, OPEN, OPEN_BYTES = 68, 20480, 4208, 701 * 6
ALL, MAX, BAD_PAIR = 2**64 - 1, 2**32 - 1, 8
TILES: Final = 2 + 4 * 2 + 4  # of 6 small pages, 4 large and 4 open ones


def _copied(
    before: Array, after: Array, pairs: list[list[int]], size: int, scales: tuple[int, int] = (1, 1)
) -> tuple[Array, int]:
    """The pool after the copies of pages' first `size` bytes, and the error word."""
    word, out = 0, after.copy()
    for i, (source, target) in enumerate(pairs):
        if source in (-1, MAX) or target in (-1, MAX):
            continue
        one, two = source * scales[0], target * scales[1]
        if min(one, two) < 0 or max(one, two) >= PAGES:
            word = max(word, ALL - (i << 32 | i << 8 | BAD_PAIR))
            continue
        out[:, two, :size] = before[:, one, :size]
    return out, word


def _pool(size: int, seed: int) -> Array:
    return random_bytes(LAYERS * PAGES * size, seed).reshape(LAYERS, PAGES, size)


def _copy_inputs() -> dict[str, Array]:
    return {
        "pairs": np.array([[0, 6], [3, -1], [5, 2], [6, 0], [-7, 4], [1, 1]], np.int32),
        "scaled": np.array([[3, 2], [MAX, 0], [4, 1], [1, 0]], np.uint32),
        "open_pairs": np.array([[2, 5], [6, 0], [2**32, 1], [0, 1]], np.int64),
        "live": np.array([5], np.int32),
        **{name: _pool(n, 120 + n) for name, n in (("small", SMALL), ("large", LARGE), ("open", OPEN))},
        **{f"{name}_to": _pool(n, 121 + n) for name, n in (("small", SMALL), ("large", LARGE), ("open", OPEN))},
        "errors": np.zeros(4, np.uint64),
    }


def _copy(arrays: Arrays) -> dict[str, Wanted]:
    found, words = {}, []
    lists = (
        ("small", "pairs", SMALL, (1, 1)),
        ("large", "scaled", LARGE, (2, 3)),
        ("open", "open_pairs", OPEN_BYTES, (1, 1)),
    )
    for name, pairs, size, scales in lists:
        own = arrays[pairs].tolist()[: int(arrays["live"][0]) if name == "small" else None]
        after, word = _copied(arrays[name], arrays[f"{name}_to"], own, size, scales)
        found[f"{name}_to"] = exact(after)
        words.append(word)
    return found | {"errors": exact(np.array([*words, ALL], np.uint64))}


def _within_inputs() -> dict[str, Array]:
    return {
        "pairs": np.array([[2, 3], [4, 4], [-1, 1], [0, PAGES]], np.int32),
        "small": _pool(SMALL, 130),
        "errors": np.zeros(1, np.uint64),
    }


def _within(arrays: Arrays) -> dict[str, Wanted]:
    after, word = _copied(arrays["small"], arrays["small"], arrays["pairs"].tolist(), SMALL)
    return {"small": exact(after), "errors": exact(np.array([word], np.uint64))}


def _tile_inputs() -> dict[str, Array]:
    return {"from": _pool(SMALL, 131), "to": _pool(SMALL, 132)}


def _tile(arrays: Arrays) -> dict[str, Wanted]:
    """Pieces 1 to 3 of five: the last 24 bytes of the first run, the first 16 of the second."""
    after = arrays["to"].copy()
    after[1, 6, 16:40] = arrays["from"][1, 1, 16:40]
    after[1, 2, 40:56] = arrays["from"][1, 4, 40:56]
    return {"to": exact(after)}


def _numbers_inputs() -> dict[str, Array]:
    return {
        "pairs": np.array([2, -1, 3, 4, 0], np.int32),
        "found": np.zeros((5, 3), np.uint32),
        "stripped": np.zeros((8, 3), np.uint32),
        "places": np.zeros((96, 2), np.uint64),
        "numbers": np.zeros((5, 16), np.uint64),
    }


def _numbers(arrays: Arrays) -> dict[str, Wanted]:
    numbers = np.zeros((5, 16), np.uint64)
    for i, x in enumerate(arrays["pairs"].tolist()):
        numbers[i, :14] = [
            5,
            -(-6 * i // PIECE),
            6 * i,
            4 << 8 | 2 << 4 | 1,
            48 + 2 * 20,
            min(i, 3),
            x == -1,
            2 * x if 0 <= 2 * x < PAGES else ALL,
            0 if x < 0 else min(x, 3),
            i,
            -(-i // 4),
            i * -(-LARGE // PIECE // TILE),
            i * -(-6 * 40000 // PIECE // TILE),
            x < 0,
        ]
    found = [[0, 0, 16], [0, 16, 16], [0, 32, 16], [1, 0, 16], [1, 16, 4]]
    # Strips of 32 bytes, 80 from each to the next one.
    apart = [80 * strip + byte for strip in range(3) for byte in range(32)]
    stripped = [[0, 0, 16], [0, 16, 4], *([1, byte, 16] for byte in apart[::16])]
    return {
        "found": exact(np.array(found, np.uint32)),
        "stripped": exact(np.array(stripped, np.uint32)),
        "places": exact(np.stack([np.arange(96), apart], axis=1).astype(np.uint64)),
        "numbers": exact(numbers),
    }


def _zero_inputs() -> dict[str, Array]:
    return {
        "ids": np.array([0, -1, 5, 7, 3, 2], np.int32),
        "open_ids": np.array([6, 2**32, 1], np.int64),
        "live": np.array([5], np.int32),
        "small": _pool(SMALL, 150),
        "open": _pool(OPEN, 151),
        "piece": random_bytes(SMALL, 152),
        "errors": np.zeros(2, np.uint64),
    }


def _zero(arrays: Arrays) -> dict[str, Wanted]:
    """The sixth id does not count; those of no page are reported."""
    small, opened, piece = (arrays[name].copy() for name in ("small", "open", "piece"))
    small[:, [0, 5, 3]] = 0
    opened[:, [6, 1], :OPEN_BYTES] = 0
    piece[16 : 16 * 4] = 0  # pieces 1 and 2 end the first run, the next is the second one's first
    words = [ALL - (i << 32 | i << 8 | BAD_PAIR) for i in (3, 1)]
    found = {"small": small, "open": opened, "piece": piece, "errors": np.array(words, np.uint64)}
    return {name: exact(array) for name, array in found.items()}


def probes() -> list[Probe]:
    """All of this module."""
    unit, grid = "pages", (TILES + 1, LAYERS, 1)
    return [
        Probe("library_pages_zero", "pages", "pages_zero", _zero_inputs, _zero, THREADS, (2 + 3 + 1, LAYERS, 1)),
        Probe("library_pages_copy", unit, "pages_copy", _copy_inputs, _copy, THREADS, grid),
        Probe("library_pages_within", unit, "pages_within", _within_inputs, _within, THREADS, (1, LAYERS, 1)),
        Probe("library_pages_tile", unit, "pages_tile", _tile_inputs, _tile, THREADS),
        Probe("library_pages_numbers", unit, "pages_numbers", _numbers_inputs, _numbers, 96),
    ]
