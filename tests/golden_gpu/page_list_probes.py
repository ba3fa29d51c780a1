"""Lists of page ids and of pool rows (kernels/page_lists.cu)."""

from __future__ import annotations

from typing import Final

import numpy as np

from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe

UNIT: Final = "page_lists"
COLUMNS, ROW, BLOCKS, POOL, TOKENS = 80, 96, 4, 40, 16
PAGE_ID, POSITION, SLOT = 1, 2, 4
FIRST, KNOWN, END = 3, 70, 90


def _word(faults: list[tuple[int, int, int]]) -> int:
    """The error word of (position, request, code): it keeps the smallest."""
    position, request, code = min(faults)
    return 2**64 - 1 - (position << 32 | request << 8 | code)


def _table() -> Array:
    rng = np.random.default_rng(301)
    table = rng.integers(0, POOL, (BLOCKS, COLUMNS)).astype(np.uint32)
    table[0, 66], table[1, 5], table[1, 40], table[2, 33] = POOL, 2**32 - 1, 77, POOL + 1
    table[3, ::3] += 2**27
    return table


def _entries_inputs() -> dict[str, Array]:
    return {
        "table": _table(),
        "list": np.full((BLOCKS, ROW), 99, np.int32),
        "errors": np.zeros(BLOCKS, np.uint64),
    }


def _entries(arrays: Arrays) -> dict[str, Wanted]:
    """Ids of two pages an entry; -7 where there is no page."""
    found, errors = arrays["list"].copy(), arrays["errors"].copy()
    for b in range(BLOCKS):
        faults = []
        found[b, FIRST:END] = -7
        for i in range(KNOWN - FIRST):
            page = int(arrays["table"][b, i])
            if page < POOL:
                found[b, FIRST + i] = page // 2
            else:
                faults.append((i * TOKENS, b, PAGE_ID))
        errors[b] = _word(faults)
    return {"list": exact(found), "errors": exact(errors)}


def _rows_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(302)
    tokens = rng.integers(0, COLUMNS * TOKENS, (BLOCKS, ROW)).astype(np.int32)
    tokens[:, 4], tokens[:, 50], tokens[0, 70], tokens[1, 33] = -1, -30, COLUMNS * TOKENS, 2**31 - 1
    return {
        "tokens": tokens,
        "table": _table(),
        "out": np.full((BLOCKS, ROW), 99, np.int32),
        "one": np.zeros((BLOCKS, 32), np.int32),
        "errors": np.zeros(BLOCKS, np.uint64),
    }


def _row(pool: int, page: int, token: int) -> tuple[int, int]:
    """A token's row in the pool, or -1 and why."""
    if page >= pool:
        return -1, PAGE_ID
    row = page * TOKENS + token % TOKENS
    return (row, 0) if row < 2**31 else (-1, SLOT)


def _rows(arrays: Arrays) -> dict[str, Wanted]:
    out, one, errors = (arrays[name].copy() for name in ("out", "one", "errors"))
    for b in range(BLOCKS):
        pool, faults = 2**28 if b == 3 else POOL, []
        for i, token in enumerate(arrays["tokens"][b, :END].tolist()):
            row, fault = token, 0
            if b == 2:
                row = token if token < 0 else -1
            elif token >= COLUMNS * TOKENS:
                row, fault = -1, POSITION
            elif token >= 0:
                row, fault = _row(pool, int(arrays["table"][b, token // TOKENS]), token)
            out[b, i] = row
            if fault:
                faults.append((token, b, fault))
        if faults:
            errors[b] = _word(faults)
        one[b] = [_row(pool, int(arrays["table"][b, i]), i)[0] for i in range(32)]
    return {"out": exact(out), "one": exact(one), "errors": exact(errors)}


def _columns_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(304)
    columns = rng.integers(0, 20 * 8, 64).astype(np.int32)
    columns[[0, 5, 40, 50, 51]] = [-1, -30, 159, 160, 2**31 - 1]
    blocks = rng.integers(0, 2**20, (2, 24)).astype(np.int32)
    columns[6:14], blocks[:, 1:4] = [8, 15, 16, 23, 24, 31, 0, 7], [-1, 2**28, 2**28 - 1]
    blocks[:, 0] = [-(2**31), 2**31 - 1]
    return {"columns": columns, "blocks": blocks, "out": np.full((2, ROW), 99, np.int32)}


def _columns(arrays: Arrays) -> dict[str, Wanted]:
    """What columns of lists of blocks of 8 name; 2^31 - 1 for what no list or no number has."""
    out = arrays["out"].copy()
    for b in range(2):
        for i, column in enumerate(arrays["columns"].tolist()):
            if column < 0:
                out[b, i] = column
            elif column >= 160:
                out[b, i] = 2**31 - 1
            else:
                first = int(arrays["blocks"][b, column // 8]) * 8
                out[b, i] = -1 if first < 0 else min(first + column % 8, 2**31 - 1)
    return {"out": exact(out)}


def _pages_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(303)
    lengths = rng.integers(0, COLUMNS * TOKENS + 40, 100).astype(np.int32)
    lengths[[7, 50]] = -1
    rows = rng.integers(0, 4, 100)
    return {
        "lengths": lengths,
        "offsets": np.concatenate([[0], np.cumsum(rows)]).astype(np.int32),
        "out": np.zeros(64, np.uint64),
    }


def _pages(arrays: Arrays) -> dict[str, Wanted]:
    """Every 32nd request's pages: with the step's rows on top of the lengths, then with lengths that count them."""
    rows = np.diff(arrays["offsets"])

    def of(count: int, before: bool) -> list[int]:
        found = [0] * 32
        for b in range(count):
            length = int(arrays["lengths"][b])
            tokens = length + int(rows[b]) * before
            if length >= (0 if before else rows[b]) and tokens <= COLUMNS * TOKENS:
                found[b % 32] += -(-tokens // TOKENS)
        return found

    return {"out": exact(np.array([*of(100, True), *of(67, False)], np.uint64))}


def probes() -> list[Probe]:
    """All of this module."""
    return [
        Probe("library_lists_entries", UNIT, "lists_entries", _entries_inputs, _entries, 32, (BLOCKS, 1, 1)),
        Probe("library_lists_rows", UNIT, "lists_rows", _rows_inputs, _rows, 32, (BLOCKS, 1, 1)),
        Probe("library_lists_columns", UNIT, "lists_columns", _columns_inputs, _columns, 32, (2, 1, 1)),
        Probe("library_lists_pages", UNIT, "lists_pages", _pages_inputs, _pages, 32),
    ]
