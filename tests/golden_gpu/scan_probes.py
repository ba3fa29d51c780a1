"""Sums over a batch and counts of its requests (kernels/scan.cu)."""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe

MAX: Final = 2**32 - 1
LENGTH, OFFSETS, TABLE, PAGE_ID, POSITION = 3, 5, 6, 1, 2
REQUESTS, TOKENS, COLUMNS, LISTED = 32, 8, 5, 70


def _sums_inputs(threads: int) -> dict[str, Array]:
    rng = np.random.default_rng(114)
    count = 2 * threads
    return {
        "earlier": rng.integers(0, 2**40, count, np.uint64),
        "in": rng.integers(0, 2**40, count, np.uint64),
        "out": np.zeros(count, np.uint64),
    }


def _sums(threads: int, arrays: Arrays) -> dict[str, Wanted]:
    earlier, x = (arrays[name].reshape(2, threads) for name in ("earlier", "in"))
    before = np.cumsum(x, axis=1, dtype=np.uint64) - x
    return {"out": exact((before + earlier.sum(axis=1, dtype=np.uint64)[:, None]).reshape(-1))}


def _offsets_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(115)
    found = {
        name: np.sort(rng.integers(0, 1024, n)).astype(np.int32) for name, n in (("offsets", 1024), ("many", 1025))
    }
    return found | {"out": np.zeros(128, np.uint32)}


def _offsets(arrays: Arrays) -> dict[str, Wanted]:
    """The last request that begins at or before a row, of all but the end."""
    found = []
    for name, held in (("offsets", 1), ("many", 0)):
        own = arrays[name][:-1]
        found += [max(int(np.searchsorted(own, i * 16, "right")) - 1, 0) << 1 | held for i in range(64)]
    return {"out": exact(np.array(found, np.uint32))}


def _counts_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(116)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 5, REQUESTS))])
    offsets[9], offsets[17] = offsets[11] + 2, -1
    lengths = rng.integers(0, 45, REQUESTS)
    lengths[[1, 5, 20]] = [-1, 0, 2**31 - 1]
    indptr = np.concatenate([[0], np.cumsum(rng.integers(0, 4, REQUESTS))])
    indptr[6], indptr[30] = -3, LISTED + 1
    return {
        **{n: a.astype(np.int32) for n, a in (("offsets", offsets), ("lengths", lengths), ("indptr", indptr))},
        **{n: np.zeros((REQUESTS, 7), np.uint32) for n in ("before", "after", "none")},
        "slices": np.zeros((REQUESTS, 8), np.uint32),
    }


def _index(x: int) -> int:
    return x if x >= 0 else MAX


def _new_rows(offsets: list[int] | None, b: int) -> tuple[int, int]:
    """New rows of a request, and what is wrong with its offsets."""
    if offsets is None:
        return 0, 0
    around = offsets[max(b - 1, 0) : b + 3]
    good = around == sorted(around) and offsets[b + 1] != MAX
    return (offsets[b + 1] - offsets[b], 0) if good else (0, OFFSETS)


def _count(offsets: list[int] | None, length: int, b: int, before: bool) -> list[int]:
    """The seven numbers of a request: rows, tokens and pages with their faults, tokens of the last page."""
    rows, fault = _new_rows(offsets, b)
    if fault:
        return [0, fault, 0, fault, 0, fault, 0]
    if length == MAX or (not before and length < rows):
        return [rows, 0, 0, LENGTH, 0, LENGTH, 0]
    tokens = length + rows * before
    if tokens > COLUMNS * TOKENS:
        return [rows, 0, tokens, 0, 0, LENGTH, 0]
    pages = -(-tokens // TOKENS)
    return [rows, 0, tokens, 0, pages, 0, tokens - (pages - 1) * TOKENS if pages else 0]


def _counts(arrays: Arrays) -> dict[str, Wanted]:
    offsets, lengths, indptr = ([_index(x) for x in arrays[n].tolist()] for n in ("offsets", "lengths", "indptr"))
    found = {
        name: exact(np.array([_count(own, lengths[b], b, before) for b in range(REQUESTS)], np.uint32))
        for name, own, before in (("before", offsets, True), ("after", offsets, False), ("none", None, True))
    }
    slices = []
    for b in range(REQUESTS):
        begin, end = indptr[b], indptr[b + 1]
        good = begin <= end <= LISTED
        slices.append(
            [
                *((end - begin, 0) if good else (0, TABLE)),
                *((0, LENGTH) if b == 3 else (b, 0)),
                POSITION if b % 2 else PAGE_ID,
                min((b << 24) * (16 + b), MAX),
                (2**31 - 1) >> b,
                2 * (MAX - 1) >> b & MAX,
            ]
        )
    return found | {"slices": exact(np.array(slices, np.uint32))}


def _entries_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(117)
    wide = [0, 1, -1, 2**31 - 1, 2**31, MAX - 1, MAX, MAX + 1, 2**63 - 1, -(2**63), -MAX, 1 - 2**32]
    words = [0, 1, 2**31 - 1, 2**31, 2**31 + 1, MAX - 1, MAX]
    return {
        "in": np.array([*words, *rng.integers(0, 2**32, 32 - len(words))], np.uint32).view(np.int32),
        "large": np.array([*words, *rng.integers(0, 2**32, 32 - len(words))], np.uint32),
        "wide": np.array([*wide, *rng.integers(-(2**33), 2**33, 32 - len(wide))], np.int64),
        "out": np.zeros((3, 32, 2), np.uint32),
    }


def _entries(arrays: Arrays) -> dict[str, Wanted]:
    """Two's complement of 32 bits, which an index of 64 bits beyond it does not have: that is the largest number."""
    signed = [[x & MAX, x >= 0] for x in arrays["in"].tolist()]
    large = [[x, x < MAX] for x in arrays["large"].tolist()]
    wide = [[x, 1] if 0 <= x < MAX else [MAX, 0] for x in arrays["wide"].tolist()]
    return {"out": exact(np.array([signed, large, wide], np.uint32))}


def probes() -> list[Probe]:
    """All of this module."""
    unit = "scan"
    sums = [
        Probe(f"library_scan_{n}", unit, f"scan_sums_{n}", partial(_sums_inputs, n), partial(_sums, n), n, (2, 1, 1))
        for n in (32, 1024)
    ]
    return [
        *sums,
        Probe("library_scan_offsets", unit, "scan_offsets", _offsets_inputs, _offsets, 64),
        Probe("library_scan_entries", unit, "scan_entries", _entries_inputs, _entries, 32),
        Probe("library_scan_counts", unit, "scan_counts", _counts_inputs, _counts, 32),
    ]
