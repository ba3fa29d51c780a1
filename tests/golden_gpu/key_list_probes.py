"""Lists of keys as rows of a pool and of a buffer (kernels/key_lists.cu)."""

from __future__ import annotations

from typing import Final

import numpy as np

from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe

UNIT: Final = "key_lists"
LISTS, COLUMNS, ROW, WIDTH, POOL, ENTRIES = 8, 20, 96, 90, 40, 16
PAGE_ID, POSITION, LENGTH, SLOT = 1, 2, 3, 4
Faults = list[tuple[int, int, int]]


def _words(faults: list[Faults]) -> Array:
    """The error word of each list's (position, request, code): it keeps the smallest."""
    found = np.zeros(LISTS, np.uint64)
    for b, mine in enumerate(faults):
        if mine:
            position, request, code = min(mine)
            found[b] = 2**64 - 1 - (position << 32 | request << 8 | code)
    return found


def _table() -> Array:
    table = np.random.default_rng(401).integers(0, POOL, (LISTS, COLUMNS)).astype(np.uint32)
    table[1, 3], table[4, 8] = POOL, 2**31
    return table


def _place(table: Array, b: int, entry: int, faults: Faults) -> int:
    if entry // ENTRIES >= COLUMNS:
        faults.append((entry, b, POSITION))
    elif table[b, entry // ENTRIES] >= POOL:
        faults.append((entry, b, PAGE_ID))
    else:
        return int(table[b, entry // ENTRIES]) * ENTRIES + entry % ENTRIES
    return -1


def _seen_inputs() -> dict[str, Array]:
    return {
        # Windows that are not full, full, over a bad page, past the table; what is padding or unknown; what a ring has lost.
        "positions": np.array([1, 200, 600, 500, 420, 900, 980, 1400], np.uint32),
        "states": np.array([2, 2, 2, 0, 2, 2, 1, 2], np.uint32),
        "table": _table(),
        "out": np.full((LISTS, ROW), 99, np.int32),
        "counts": np.zeros((LISTS, 32), np.int32),
        "errors": np.zeros(LISTS, np.uint64),
    }


def _seen(arrays: Arrays) -> dict[str, Wanted]:
    out, counts, faults = arrays["out"].copy(), arrays["counts"].copy(), [Faults() for _ in range(LISTS)]
    for b in range(LISTS):
        position, state = int(arrays["positions"][b]), int(arrays["states"][b])
        out[b, :WIDTH] = -1
        counts[b] = 0 if state == 0 else -1
        if state != 2:
            continue
        end = (position + 1) // 3
        first = max(0, end - 70)
        if end - first > (64 if b == 5 else 70):
            faults[b].append((end - first, b, LENGTH))
            continue
        lost = np.zeros(32, np.bool_)
        for i in range(end - first):
            if position - (first + i) >= 900:
                faults[b].append((first + i, b, POSITION))
            else:
                out[b, i] = _place(arrays["table"], b, first + i, faults[b])
            lost[i % 32] |= out[b, i] < 0
        counts[b] = np.where(lost, -1, (end - first) << 16 | first)
    return {"out": exact(out), "counts": exact(counts), "errors": exact(_words(faults))}


def _counted_inputs() -> dict[str, Array]:
    entries = np.random.default_rng(402).integers(-2, 280, (LISTS, ROW)).astype(np.int32)
    entries[3], entries[5, 60:] = -1, -1
    entries[6] = np.minimum(entries[6], 100)
    return {
        "entries": entries,
        "table": _table(),
        "out": np.full((LISTS, ROW), 99, np.int32),
        "counts": np.zeros((LISTS, 32), np.int32),
        "errors": np.zeros(LISTS, np.uint64),
    }


def _counted(arrays: Arrays) -> dict[str, Wanted]:
    out, counts, faults = arrays["out"].copy(), arrays["counts"].copy(), [Faults() for _ in range(LISTS)]
    for b in range(LISTS):
        end, lost = 0, b == 7
        for i, entry in enumerate(arrays["entries"][b, :WIDTH].tolist()):
            out[b, i] = (
                min(entry, -1) if entry < 0 or entry >= 250 or b == 2 else _place(arrays["table"], b, entry, faults[b])
            )
            if entry >= 250:
                out[b, i] = -1
            if 0 <= entry < 250 and b != 2:
                lost |= bool(out[b, i] < 0)
                end = i + 1 if out[b, i] >= 0 else end
        counts[b] = -1 if lost else end
    return {"out": exact(out), "counts": exact(counts), "errors": exact(_words(faults))}


def _buffer_inputs() -> dict[str, Array]:
    begins = np.array(
        [[0, 0], [470, 300], [100, -90], [10, -110], [-3, 400], [2**40, 0], [465, 380], [2**31, -(2**62)]]
    )
    return {
        "picks": np.random.default_rng(403).integers(-1, 38, (LISTS, ROW)).astype(np.int32),
        "begins": begins.astype(np.int64),
        "out": np.full((LISTS, ROW), 99, np.int32),
        "lost": np.zeros((LISTS, 32), np.int32),
        "one": np.zeros((LISTS, 32), np.int32),
        "errors": np.zeros(LISTS, np.uint64),
    }


def _buffer(arrays: Arrays) -> dict[str, Wanted]:
    out, lost, one = (arrays[name].copy() for name in ("out", "lost", "one"))
    faults = [Faults() for _ in range(LISTS)]
    for b in range(LISTS):
        entries_begin, tokens_begin = arrays["begins"][b].tolist()
        picks = list(range(30)) if b % 2 else arrays["picks"][b, :40].tolist()
        rows = [(j, entries_begin + j) if 0 <= j < 35 else None for j in picks]
        rows += [(token, tokens_begin + token) for token in range(100, 120)]
        out[b, :WIDTH] = -1
        for i, row in enumerate(rows):
            if row is not None and 0 <= row[1] < 500:
                out[b, i] = row[1]
            elif row is not None:
                faults[b].append((row[0], b, SLOT))
                lost[b, i % 32] = 1
        one[b] = [entries_begin + 8 * i if 0 <= entries_begin + 8 * i < 500 else -1 for i in range(32)]
    return {"out": exact(out), "lost": exact(lost), "one": exact(one), "errors": exact(_words(faults))}


def probes() -> list[Probe]:
    """All of this module."""
    return [
        Probe("library_lists_seen", UNIT, "lists_seen", _seen_inputs, _seen, 32, (LISTS, 1, 1)),
        Probe("library_lists_counted", UNIT, "lists_counted", _counted_inputs, _counted, 32, (LISTS, 1, 1)),
        Probe("library_lists_buffer", UNIT, "lists_buffer", _buffer_inputs, _buffer, 32, (LISTS, 1, 1)),
    ]
