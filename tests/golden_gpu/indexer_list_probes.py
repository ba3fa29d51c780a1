"""How blocks divide lists of blocks of keys, and what columns of lists name (kernels/indexer_lists.cu)."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np

from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe

UNIT: Final = "indexer_lists"
ROWS, BATCH, NUMBERS, TILES, GRID, HELD = 40, 11, 29, 8, 3, 1200
NONE: Final = 2**32 - 1


def _inputs(rate: int) -> dict[str, Array]:
    rng = np.random.default_rng(310 + rate)
    lengths = rng.integers(0, 60, BATCH) if rate == 1 else rng.integers(0, 250, BATCH)
    # Rows of request 5 cross a whole list's 256 keys, those of request 7 with four tokens a key.
    lengths[[2, 5, 7, 9]] = [231, 262, 1025, HELD - 3]
    lengths[[3, 6]] = [-1, HELD + 1]
    lists = rng.integers(-2, 8, (ROWS, NUMBERS))
    lists[rng.random(ROWS) < 0.7, 9:] = -1
    lists[::3, 12] = [(2**31 - 1, 2**29, -(2**31), 2**28, 0, 30)[i % 6] for i in range(len(lists[::3]))]
    lists[20:28] = rng.integers(0, 150, (8, NUMBERS))
    found = {
        "offsets": np.cumsum([1, 3, 0, 9, 2, 1, 12, 0, 5, 2, 2, 1]).astype(np.int32),
        "lengths": lengths.astype(np.int32),
        "lists": lists.astype(np.int32),
        "owners": np.zeros((ROWS, TILES), np.uint32),
        "keys": np.full((ROWS, TILES, 32), 7, np.uint32),
        "out": np.full((ROWS, NUMBERS * 8), 7, np.float32),
        "counts": np.zeros(GRID * 2, np.uint32),
    }
    if rate > 1:
        del found["offsets"]
    return found


def _seen(arrays: Arrays, rate: int, row: int) -> int | None:
    """Keys that a row sees; None where it is nobody's, or its request's length is none."""
    if rate == 1:
        offsets = arrays["offsets"].tolist()
        b = next((b for b in range(BATCH) if offsets[b] <= row < offsets[b + 1]), None)
        first, rows = (offsets[b], offsets[b + 1] - offsets[b]) if b is not None else (0, 0)
    else:
        b = row // 3 if row // 3 < BATCH else None
        first, rows = row // 3 * 3, 3
    if b is None:
        return None
    tokens = int(arrays["lengths"][b])
    after = tokens + (0 if rate == 1 else rows)
    return max(after - rows + row - first + 1, 0) // rate if tokens >= 0 and after <= HELD else None


def _wanted(rate: int, arrays: Arrays) -> dict[str, Wanted]:
    owners, keys, out, counts = (arrays[name].copy() for name in ("owners", "keys", "out", "counts"))
    seen = [_seen(arrays, rate, row) for row in range(ROWS)]
    # 0: the tiles that a row's keys fill, 1: those behind.
    parts: list[list[tuple[int, int]]] = [[], []]
    for row, n in enumerate(seen):
        if n is not None:
            front = min(-(-n // 32), TILES)
            parts[0] += [(row, tile) for tile in range(front)]
            parts[1] += [(row, tile) for tile in range(front, TILES)]
    for part, tiles in enumerate(parts):
        ends = [len(tiles) // GRID * i + min(i, len(tiles) % GRID) for i in range(GRID + 1)]
        for block, (begin, end) in enumerate(pairwise(ends)):
            counts[2 * block + part] = end - begin << 2 | 2 | 1
            mine = tiles[begin:end]
            for row in sorted({row for row, _ in mine}):
                run, n = [tile for r, tile in mine if r == row], seen[row] or 0
                for tile in run:
                    keys[row, tile] = [_key(arrays["lists"][row], tile * 32 + column, n) for column in range(32)]
                names = bool((keys[row, run] != NONE).any())
                front = min(-(-n // 32), TILES)
                owners[row, run] = front << 16 | names << 8 | part << 4 | block + 1
                if not names:
                    out[row, run[0] * 32 : (run[-1] + 1) * 32] = -np.inf
    return {"owners": exact(owners), "keys": exact(keys), "out": exact(out.view(np.uint32)), "counts": exact(counts)}


def _key(numbers: Array, column: int, seen: int) -> int:
    if column // 8 >= len(numbers):
        return NONE
    key = int(numbers[column // 8]) * 8 + column % 8
    return key if 0 <= key < seen else NONE


def probes() -> list[Probe]:
    """All of this module."""
    return [
        Probe(
            f"library_indexer_lists_{name}",
            UNIT,
            f"indexer_lists_{name}",
            partial(_inputs, rate),
            partial(_wanted, rate),
            32,
            (GRID, 1, 1),
        )
        for name, rate in (("each", 1), ("fours", 4))
    ]
