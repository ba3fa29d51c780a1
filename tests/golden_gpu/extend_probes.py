"""A plan as extend reads it, and the partial results of a tile's blocks (kernels/extend_tiles.cu)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from tests.golden_gpu.attend_probes import DIMS, Floats
from tests.golden_gpu.column_probes import UNUSED, close
from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe, pattern, u32
from tests.golden_gpu.split_kv_probes import OFFSETS, PLAN, _stamp_at, sum_of

UNIT: Final = "extend_tiles"

# Plans ----------------------------------------------------------------------------------------------------------------

BATCH, ROWS, HEADS, GROUP, MOST_ROWS, MOST_CHUNKS, SLOTS, PARTS, STAMP = 5, 12, 4, 3, 16, 4, 2, 3, 77
# Magic, requests, digest; rows, SM parts, most rows, chunks, slots; chunks; what sum() is off by; a flag; stamp; requests' rows;
# heads together.
GOOD: Final = (
    0x6E6C706B,
    BATCH,
    0x89ABCDEF,
    0x01234567,
    ROWS,
    PARTS,
    MOST_ROWS,
    MOST_CHUNKS,
    SLOTS,
    3,
    0,
    0,
    STAMP,
    2,
    10,
    2,
)
# What each workspace has in place of these.
HEADERS: Final[tuple[dict[int, int], ...]] = (
    {},
    {13: 0, 14: 12, 15: 4},
    {13: 10, 15: 1},
    {11: 1},
    {0: 0},
    {1: 6},
    {3: 1},
    {4: 11},
    {9: 5},
    {13: 11},
    {14: 13},
    {15: 0},
    {15: 3},
    {10: 1},
)
WORDS: Final = (64 + 16 + MOST_ROWS + 4 * SLOTS * HEADS + 48 * MOST_CHUNKS) // 4
ENTRY: Final = (2, 3, 4, 50, 16, 40, 0, 2, 0, 0, 0, 6)
# The same of entries; 10 is added to the stamp.
ENTRIES: Final[tuple[dict[int, int], ...]] = (
    {},
    {11: 11},
    {11: 12},
    {11: 2**32 - 1},
    {10: 1},
    {0: 5},
    {1: 9},
    {1: 8},
    {2: 0},
    {2: 10},
    {1: 0, 2: 12, 11: 35},
    {4: 41},
    {5: 51},
    {6: 2},
    {6: 1},
    {8: 1},
    {7: 1, 8: 9},
    {7: 0},
    {9: OFFSETS},
    {9: PLAN},
)


def _entry(n: int) -> list[int]:
    """Number n of all workspaces' entries."""
    found = list(ENTRY)
    for word, value in ENTRIES[n % len(ENTRIES)].items():
        found[word] = value
    found[10] = (found[10] + _stamp_at(STAMP, n % MOST_CHUNKS)) % 2**32
    return found


def _plans_inputs() -> dict[str, Array]:
    memory = np.random.default_rng(270).integers(0, 2**32, (len(HEADERS), WORDS), np.uint32)
    for n, changed in enumerate(HEADERS):
        memory[n, :16] = GOOD
        memory[n, list(changed)] = list(changed.values())
        memory[n, 10] ^= sum_of(memory[n, :16].tolist())
        memory[n, -12 * MOST_CHUNKS :] = [x for i in range(MOST_CHUNKS) for x in _entry(n * MOST_CHUNKS + i)]
    return {
        "workspaces": memory,
        "plans": np.full((len(HEADERS), 6), UNUSED, np.uint32),
        "entries": np.full((len(HEADERS) * MOST_CHUNKS, 12), UNUSED, np.uint32),
        "errors": np.zeros(len(HEADERS), np.uint64),
    }


def _read(entry: list[int], i: int) -> list[int]:
    """An entry as a block has it: one that is not this plan's has no rows."""
    b, row, rows, tokens, begin, end, index, count, slot, fault, stamp, first = entry
    good = stamp == _stamp_at(STAMP, i) and b < BATCH and rows > 0 and row + rows <= ROWS
    good = good and index < count and (count == 1 or slot + count <= SLOTS)
    if not (good and begin <= end <= tokens and fault <= OFFSETS):
        return [0, 0, 0, 0, 0, 0, 0, 1, 0, PLAN, 0, 0]
    return entry if first < rows * GROUP else [b, row, 0, *entry[3:9], PLAN, *entry[10:]]


def _plans(arrays: Arrays) -> dict[str, Wanted]:
    plans, errors = [], []
    for own in arrays["workspaces"][:, :16].tolist():
        count, wrong_total, (first, end, heads) = own[9], own[11], own[13:]
        good = own[:9] == list(GOOD[:9]) and own[10] == sum_of(own) and count <= MOST_CHUNKS and first <= end <= ROWS
        if not good or heads not in (1, 2, 4):
            plans.append([0, 0, 1, 0, 0, 1])
            errors.append(2**64 - 1 - PLAN)
        else:
            plans.append([STAMP, count, heads, first, end, wrong_total])
            errors.append(2**64 - 1 - (ROWS << 32 | (BATCH - 1) << 8 | OFFSETS) if wrong_total else 0)
    entries = [_read(_entry(n), n % MOST_CHUNKS) for n in range(len(HEADERS) * MOST_CHUNKS)]
    return {
        "plans": exact(np.array(plans, np.uint32)),
        "entries": exact(np.array(entries, np.uint32)),
        "errors": exact(np.array(errors, np.uint64)),
    }


ENTRIES_OF_WORKS, WORKS = 3, 12  # works: 3 entries, 4 heads
TOGETHER: Final = (1, 2, 4)  # heads of every entry, then the next heads


def _works_inputs() -> dict[str, Array]:
    return {"places": np.full((len(TOGETHER), WORKS, 2), UNUSED, np.uint32)}


def _works(_: Arrays) -> dict[str, Wanted]:
    found = []
    for together in TOGETHER:
        order = [
            (entry, first + head)
            for first in range(0, HEADS, together)
            for entry in range(ENTRIES_OF_WORKS)
            for head in range(together)
        ]
        found.append(order)
    return {"places": exact(np.array(found, np.uint32))}


# Partial results ------------------------------------------------------------------------------------------------------

RESULTS, OF_HEADS = 3, 2


@dataclass(frozen=True)
class Shape:
    """A kernel: its warps, tiles of 16 columns of a warp and of 8 dims, and whether two neighbouring dims lie in two tiles."""

    kernel: str
    warps: int
    tiles: int
    dim_tiles: int
    spread: bool

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    def column(self, m: int, h: int) -> Array:
        """The column of each thread."""
        thread = np.arange(self.threads)
        return thread // 32 * 16 * self.tiles + 16 * m + thread % 32 // 4 + 8 * h

    def dim(self, d: int, r: int) -> Array:
        """The dim of each thread's element r of tile d."""
        n = 2 * (np.arange(self.threads) % 4) + r % 2
        return 16 * (d // 2) + (2 * n + d % 2 if self.spread else n + d % 2 * 8)


SHAPES: Final = (Shape("extend_partials_wide", 2, 1, 6, False), Shape("extend_partials_narrow", 1, 2, 8, True))


def _partials_inputs(shape: Shape, seed: int) -> dict[str, Array]:
    """Lanes of a column agree about its maximum; some results saw no token."""
    rng = np.random.default_rng(seed)
    each = (OF_HEADS, RESULTS, shape.threads, shape.tiles)
    numbers = rng.uniform(0.1, 2, (*each, 4 + 4 * shape.dim_tiles))
    numbers[..., :2] = rng.uniform(-9, 9, (OF_HEADS, RESULTS, shape.threads // 4, shape.tiles, 2)).repeat(4, axis=2)
    for head, result, thread in ((0, 0, 0), (0, 2, 4), (0, 1, 8), (0, 2, 8), (1, 0, 12)):
        numbers[head, result, thread : thread + 4] = [-np.inf] * 2 + [0] * (2 + 4 * shape.dim_tiles)
    numbers[0, :, 16:20] = [-np.inf] * 2 + [0] * (2 + 4 * shape.dim_tiles)
    cols = 16 * shape.tiles * shape.warps
    return {
        "in": pattern(numbers.astype(np.float32)),
        "slots": np.full((RESULTS, OF_HEADS, shape.tiles, 1 + shape.dim_tiles, shape.threads, 4), UNUSED, np.uint32),
        "max": np.full((OF_HEADS, cols), UNUSED, np.uint32),
        "sum": np.full((OF_HEADS, cols), UNUSED, np.uint32),
        "out": np.full((OF_HEADS, cols, DIMS), UNUSED, np.uint32),
        "one_by_one": np.full((OF_HEADS, *each[2:], 4 + 4 * shape.dim_tiles), UNUSED, np.uint32),
        "places": np.zeros((OF_HEADS, 2), np.uint64),
    }


def together(numbers: Floats) -> Floats:
    """Results `[head, result, ..., (maxima, sums, sums of V)]` of a column each as one."""
    top = numbers[..., :2].max(axis=1)
    with np.errstate(invalid="ignore"):
        shrink = np.nan_to_num(np.exp2(numbers[..., :2] - top[:, None]))
    found = np.empty_like(numbers[:, 0])
    found[..., :2] = top
    for i in range(2, numbers.shape[-1]):
        found[..., i] = (numbers[..., i] * shrink[..., i % 2 if i < 4 else i % 4 // 2]).sum(axis=1)
    return found


def _partials(shape: Shape, arrays: Arrays) -> dict[str, Wanted]:
    numbers = arrays["in"].view(np.float32).astype(np.float64)
    numbers[1, 1, ..., 2:4] = np.nan
    slots = numbers.reshape(OF_HEADS, RESULTS, shape.threads, shape.tiles, 1 + shape.dim_tiles, 4)
    joined = together(numbers)
    top, total, out = (np.zeros(arrays[name].shape) for name in ("max", "sum", "out"))
    for m in range(shape.tiles):
        for h in range(2):
            top[:, shape.column(m, h)] = joined[:, :, m, h]
            np.add.at(total, (slice(None), shape.column(m, h)), joined[:, :, m, 2 + h])
        for d in range(shape.dim_tiles):
            for r in range(4):
                col, dim = shape.column(m, r // 2), shape.dim(d, r)
                some = dim < DIMS
                out[:, col[some], dim[some]] = joined[:, some, m, 4 + 4 * d + r] * np.where(dim[some] < 8, 0.5, 1)
    step = shape.tiles * shape.threads * (4 + 4 * shape.dim_tiles)
    places = [[(5 * OF_HEADS + head) * step, 5 * OF_HEADS + head] for head in range(OF_HEADS)]
    return {
        "slots": close(np.ascontiguousarray(slots.transpose(1, 0, 3, 4, 2, 5)), 0.0),
        "max": close(top, 0.0),
        "sum": close(total, 1e-5),
        "out": close(out, 1e-5),
        "one_by_one": close(joined, 1e-5),
        "places": exact(np.array(places, np.uint64)),
    }


def _factors_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(273)
    maxima = rng.uniform(-9, 9, (32, 4))
    maxima[:4] = [[-np.inf, 1, 2, -np.inf], [-np.inf] * 4, [3, 3, 3, 3], [1e30, -1e30, -1e30, 1e30]]
    found: dict[str, Any] = {"maxima": maxima, "numbers": rng.uniform(0.1, 2, (32, 4))}
    return {name: pattern(x.astype(np.float32)) for name, x in found.items()} | {"out": np.zeros((32, 4), np.uint32)}


def _factors(arrays: Arrays) -> dict[str, Wanted]:
    maxima, numbers = (arrays[name].view(np.float32).astype(np.float64) for name in ("maxima", "numbers"))
    early, late = maxima[:, :2], maxima[:, 2:]
    top = np.maximum(early, late)
    with np.errstate(invalid="ignore"):
        shrink = [np.where(np.isneginf(x), 0, np.exp2(x - top)) for x in (early, late)]
    joined = numbers[:, :2] * shrink[0] + numbers[:, 2:] * shrink[1]
    return {"out": close(np.concatenate([top, joined], axis=1), 1e-5)}


def probes() -> list[Probe]:
    """All of this module."""
    merging = [
        Probe(
            f"library_{shape.kernel}",
            UNIT,
            shape.kernel,
            partial(_partials_inputs, shape, 271 + n),
            partial(_partials, shape),
            shape.threads,
            (OF_HEADS, 1, 1),
        )
        for n, shape in enumerate(SHAPES)
    ]
    plans = (len(HEADERS), 1, 1)
    tail = [u32(4 * WORDS), u32(BATCH), u32(ROWS)]
    return [
        Probe("library_extend_plans", UNIT, "extend_plans", _plans_inputs, _plans, MOST_CHUNKS, plans, tail=tail),
        Probe("library_extend_works", UNIT, "extend_works", _works_inputs, _works, WORKS, (len(TOGETHER), 1, 1)),
        *merging,
        Probe("library_extend_factors", UNIT, "extend_factors", _factors_inputs, _factors, 32),
    ]
