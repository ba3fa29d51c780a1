"""Slots of new rows (kernels/new_rows.cu): 80 rows of 6 requests, some of them wrong, in pages of 8 tokens, 4 a request."""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe

ROWS, REQUESTS, TOKENS, COLUMNS, PAGES = 80, 6, 8, 4, 6
MAX: Final = 2**32 - 1
ALL: Final = 2**64 - 1  # a reported fault is the complement of its bits
PAGE_ID, POSITION, LENGTH, SLOT, OFFSETS = 1, 2, 3, 4, 5
PADDING, UNKNOWN, KNOWN = 0, 1, 2
# Kernel -> whether lengths count the new rows, whether it is a ring, lanes that look for a row.
KERNELS: Final = {
    "rows_before": (False, False, 2),
    "rows_after": (True, False, 4),
    "rows_ring": (False, True, 8),
    "rows_ring_after": (True, True, 2),
}
# Offsets and lengths: rows of all requests, padding on both sides, one longer than the ring; then several that are wrong.
RIGHT: Final = ([3, 8, 8, 20, 25, 66, 76], [13, 0, 24, 9, 61, 12])
WRONG: Final = ([0, 20, 12, 30, 40, 60, 81], [-1, 30, 8, 25, 3, 14])


def _inputs(wrong: bool) -> dict[str, Array]:
    rng = np.random.default_rng(113)
    offsets, lengths = WRONG if wrong else RIGHT
    table = rng.integers(0, PAGES, (REQUESTS, COLUMNS)).astype(np.uint32)
    if wrong:
        table[3, 3], table[5, 0] = PAGES, 2**31
    return {
        "offsets": np.array(offsets, np.int32),
        "lengths": np.array(lengths, np.int32),
        "table": table,
        "errors": np.zeros(2, np.uint64),
        "out": np.zeros((ROWS, 6), np.uint32),
    }


def _row(arrays: Arrays, row: int, after: bool, ring: bool) -> tuple[list[int], tuple[int, int, int] | None]:
    """What the kernel says of a row (request, position, state, last position, page, token), and what it reports: position,
    request, code."""
    own, nowhere = arrays["offsets"].tolist(), [MAX, MAX]
    if row >= own[REQUESTS]:
        return [0, 0, PADDING, 0, *nowhere], None
    low, high = 0, REQUESTS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if own[middle] <= row else (low, middle)
    b, begin, end = low, own[low], own[low + 1]
    around = own[max(b - 1, 0) : b + 3]
    if b == 0 and row < begin <= end:
        return [0, 0, PADDING, 0, *nowhere], None
    if around != sorted(around) or not begin <= row < end <= ROWS:
        return [b, 0, UNKNOWN, 0, *nowhere], (row, b, OFFSETS)
    length, new = int(arrays["lengths"][b]), end - begin
    if length < (new if after else 0):
        return [b, 0, UNKNOWN, 0, *nowhere], (row - begin, b, LENGTH)
    position = length - new * after + row - begin
    last = length - new * after + new - 1
    if ring and last // TOKENS - position // TOKENS >= COLUMNS:
        return [b, position, KNOWN, last, *nowhere], None
    column = position // TOKENS
    if column >= COLUMNS and not ring:
        return [b, position, KNOWN, last, *nowhere], (position, b, POSITION)
    page = int(arrays["table"][b, column % COLUMNS])
    if page >= PAGES:
        return [b, position, KNOWN, last, *nowhere], (position, b, PAGE_ID)
    return [b, position, KNOWN, last, page, position % TOKENS], None


def _wanted(after: bool, ring: bool, arrays: Arrays) -> dict[str, Wanted]:
    found = [_row(arrays, row, after, ring) for row in range(ROWS)]
    words = [ALL - (position << 32 | b << 8 | code) for _, fault in found if fault for position, b, code in [fault]]
    own = arrays["offsets"].tolist()
    bad = own[REQUESTS] > ROWS or own[REQUESTS] < own[REQUESTS - 1]
    total = ALL - (ROWS << 32 | (REQUESTS - 1) << 8 | OFFSETS) if bad else 0
    return {
        "errors": exact(np.array([max(words, default=0), total], np.uint64)),
        "out": exact(np.array([row for row, _ in found], np.uint32)),
    }


# A thread a row ------------------------------------------------------------------------------------------------------

PADDED, LIMIT, RESIDUAL = 12, 100, 4


def _padded_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(119)
    count = REQUESTS * PADDED
    table = rng.integers(0, PAGES, (REQUESTS, COLUMNS)).astype(np.uint32)
    table[1, 1] = PAGES
    positions = rng.integers(0, LIMIT, (2, count)).astype(np.int32)
    positions[0, 5], positions[1, 6], positions[0, 30], positions[1, 40] = LIMIT, LIMIT + 1, -1, -7
    slots = rng.permutation(count).astype(np.int64) % (PAGES * TOKENS)
    slots[[3, 5, 9]], slots[30], slots[11], slots[12] = -1, 4, PAGES * TOKENS, -2
    return {
        "valid": np.array([12, 7, 0, 13, 12, -1], np.int32),
        "lengths": np.array([0, 12, 30, 3, 25, -1], np.int32),
        "table": table,
        "positions": positions,
        "named": slots,
        "errors": np.zeros(4, np.uint64),
        "padded": np.zeros((count, 4), np.uint32),
        "slots": np.zeros((count, 2), np.uint32),
        "tails": np.zeros((count, 4), np.uint32),
        "known": np.zeros((count, 4), np.uint32),
    }


def _padded(arrays: Arrays) -> dict[str, Wanted]:
    faults: list[list[tuple[int, int, int]]] = [[], [], [], []]
    lengths, valid, positions = arrays["lengths"].tolist(), arrays["valid"].tolist(), arrays["positions"].tolist()
    found: dict[str, list[list[int]]] = {name: [] for name in ("padded", "slots", "tails", "known")}

    def page(b: int, position: int, word: int) -> list[int]:
        column, name = position // TOKENS, int(arrays["table"][b, min(position // TOKENS, COLUMNS - 1)])
        if column < COLUMNS and name < PAGES:
            return [name, position % TOKENS]
        faults[word].append((position, b, POSITION if column >= COLUMNS else PAGE_ID))
        return [MAX, MAX]

    for i in range(REQUESTS * PADDED):
        (b, t), angled = divmod(i, PADDED), [0 <= p[i] < LIMIT for p in positions]
        row = [UNKNOWN, 0, MAX, MAX]
        if not 0 <= valid[b] <= PADDED:
            faults[0].append((i, b, OFFSETS))
        elif t >= valid[b]:
            row[0] = PADDING
        elif lengths[b] < 0:
            faults[0].append((t, b, LENGTH))
        elif not all(angled):
            faults[0].append((lengths[b] + t, b, POSITION))
        else:
            row = [KNOWN, lengths[b] + t, *page(b, lengths[b] + t, 0)]
        found["padded"].append(row)

        slot = int(arrays["named"][i])
        inside = angled[0] and 0 <= slot < PAGES * TOKENS
        if slot != -1 and not inside:
            faults[1].append((i, i, SLOT if angled[0] else POSITION))
        found["slots"].append([*divmod(slot, TOKENS)] if inside else [MAX, MAX])

        if lengths[b] < PADDED:  # these lengths count the rows
            faults[2].append((t, b, LENGTH))
            found["known"].append([b, 0, 0, UNKNOWN])
            found["tails"].append([UNKNOWN, MAX, MAX, MAX])
            continue
        position, last = lengths[b] - PADDED + t, lengths[b] - 1
        found["known"].append([b, position, last, KNOWN])
        waits = position >= (last + 1) // RESIDUAL * RESIDUAL
        found["tails"].append([KNOWN, b if waits else MAX, *page(b, position, 3)])
    words = [[ALL - (position << 32 | b << 8 | code) for position, b, code in mine] for mine in faults]
    errors = np.array([max(mine, default=0) for mine in words], np.uint64)
    return {"errors": exact(errors)} | {name: exact(np.array(rows, np.uint32)) for name, rows in found.items()}


# An entry for three tokens -------------------------------------------------------------------------------------------

RATE = 3


def _entries_inputs() -> dict[str, Array]:
    table = np.random.default_rng(127).integers(0, PAGES, (REQUESTS, COLUMNS)).astype(np.uint32)
    table[1, 1] = PAGES
    return {
        "lengths": np.array([0, 25, 91, 5, 49, -1], np.int32),
        "table": table,
        "errors": np.zeros(3, np.uint64),
        "out": np.zeros((REQUESTS * PADDED, 6), np.uint32),
    }


def _entries(arrays: Arrays) -> dict[str, Wanted]:
    rows, lost, pages = [], [0], [0]
    for i in range(REQUESTS * PADDED):
        b, t = divmod(i, PADDED)
        length = int(arrays["lengths"][b])
        if length < 0:
            lost.append(ALL - (t << 32 | b << 8 | LENGTH))
            rows.append([UNKNOWN, 0, *[MAX] * 4])
            continue
        if (length + t) % RATE != RATE - 1:
            rows.append([PADDING, 0, *[MAX] * 4])
            continue
        entry = (length + t) // RATE
        column = entry // TOKENS
        place = [MAX, MAX]
        if column < COLUMNS and arrays["table"][b, column] < PAGES:
            place = [int(arrays["table"][b, column]), entry % TOKENS]
        else:
            pages.append(ALL - (entry * RATE << 32 | b << 8 | (POSITION if column >= COLUMNS else PAGE_ID)))
        rows.append([KNOWN, entry * RATE, *place, *place])
    words = np.array([max(lost), max(pages), max(pages)], np.uint64)
    return {"errors": exact(words), "out": exact(np.array(rows, np.uint32))}


def probes() -> list[Probe]:
    """All of this module."""
    padded = Probe("library_rows_padded", "new_rows", "rows_padded", _padded_inputs, _padded, 96)
    return [
        padded,
        Probe("library_rows_entries", "new_rows", "rows_entries", _entries_inputs, _entries, 96),
        *(
            Probe(
                f"library_{kernel}{'_wrong' if wrong else ''}",
                "new_rows",
                kernel,
                partial(_inputs, wrong),
                partial(_wanted, after, ring),
                32 * lanes,
                (3, 1, 1),
            )
            for kernel, (after, ring, lanes) in KERNELS.items()
            for wrong in (False, True)
        ),
    ]
