"""Places of new rows (kernels/new_rows.cu): 80 rows of 6 requests, some of them wrong, in pages of 8 tokens, 4 a request."""

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
PAGE_ID, POSITION, LENGTH, OFFSETS = 1, 2, 3, 5
# Kernel -> whether lengths count the new rows, whether it is a ring, lanes that look for a row.
KERNELS: Final = {
    "rows_before": (False, False, 2),
    "rows_after": (True, False, 4),
    "rows_ring": (False, True, 8),
    "rows_ring_after": (True, True, 2),
}
# Offsets and lengths: rows of all requests, padding on both sides, one longer than the ring; then several that are wrong.
RIGHT: Final = ([3, 8, 8, 20, 25, 66, 76], [13, 0, 24, 9, 61, 12])
WRONG: Final = ([0, 20, 12, 30, 40, 60, 80], [-1, 30, 8, 25, 3, 14])


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
        "errors": np.zeros(1, np.uint64),
        "out": np.zeros((ROWS, 5), np.uint32),
    }


def _row(arrays: Arrays, row: int, after: bool, ring: bool) -> tuple[list[int], tuple[int, int, int] | None]:
    """What the kernel says of a row, and what it reports: position, request, code."""
    own, nowhere = arrays["offsets"].tolist(), [MAX, MAX]
    if row >= own[REQUESTS]:
        return [0, 0, 0, *nowhere], None
    low, high = 0, REQUESTS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if own[middle] <= row else (low, middle)
    b, begin, end = low, own[low], own[low + 1]
    around = own[max(b - 1, 0) : b + 3]
    if b == 0 and row < begin <= end:
        return [0, 0, 0, *nowhere], None
    if around != sorted(around) or not begin <= row < end <= ROWS:
        return [b, 0, 0, *nowhere], (row, b, OFFSETS)
    length, new = int(arrays["lengths"][b]), end - begin
    if length < (new if after else 0):
        return [b, 0, 0, *nowhere], (row - begin, b, LENGTH)
    position = length - new * after + row - begin
    last = length - new * after + new - 1
    if ring and last // TOKENS - position // TOKENS >= COLUMNS:
        return [b, position, 0, *nowhere], None
    column = position // TOKENS
    if column >= COLUMNS and not ring:
        return [b, position, 1, *nowhere], (position, b, POSITION)
    page = int(arrays["table"][b, column % COLUMNS])
    if page >= PAGES:
        return [b, position, 1, *nowhere], (position, b, PAGE_ID)
    return [b, position, 1, page, position % TOKENS], None


def _wanted(after: bool, ring: bool, arrays: Arrays) -> dict[str, Wanted]:
    found = [_row(arrays, row, after, ring) for row in range(ROWS)]
    words = [ALL - (position << 32 | b << 8 | code) for _, fault in found if fault for position, b, code in [fault]]
    return {
        "errors": exact(np.array([max(words, default=0)], np.uint64)),
        "out": exact(np.array([row for row, _ in found], np.uint32)),
    }


def probes() -> list[Probe]:
    """All of this module."""
    return [
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
    ]
