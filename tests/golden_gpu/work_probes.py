"""Whose rows are whose, pieces of requests, workspaces and partial results (kernels/work.cu)."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tests.golden_gpu.compare import Rule, Wanted
from tests.golden_gpu.memory_probes import exact, random_bytes
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe, pattern, u32

UNIT: Final = "work"
MAX: Final = 2**32 - 1
LENGTH, OFFSETS = 3, 5


def near(x: NDArray[Any], relative: float) -> Wanted:
    """These float64 numbers, as f32 that are off by `relative` at most."""
    with np.errstate(over="ignore"):
        bits = pattern(x.astype(np.float32))
    number = np.where(np.isfinite(x), x, np.nan)[..., None]
    return Wanted(bits, Rule("f32", relative=relative, absolute=1e-30, any_nan=True), number)


# Whose rows ---------------------------------------------------------------------------------------------------------

ROWS, REQUESTS = 20, 8
CLAIMED, EMPTY, FAULTY, ORPHAN = range(4)
# Offsets that a request is found by from some of its rows only, or that end before it does.
HOSTILE: Final = (
    (0, 4, 4, 2),
    (0, 3, 1, 5),
    (0, 2, 4, 3, 7, 7, 5, 9, 11),
    (4, 0, 4, 4, 8),
    (0, 4, 8, 4, 12),
    (0, 1, 2, 3, 24),
    (-1, 3),
    (0, -1),
    (0, 5, 9, 12),
    (3, 3, 6, 10, 12),
    (0, 4, 8, 12, 16, 20, 20, 20, 20),
    (0, 20),
    (5,),
    (0,),
)


def _claims_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(185)
    lists: list[list[int]] = [list(offsets) for offsets in HOSTILE]
    for i in range(40):
        batch = int(rng.integers(1, REQUESTS + 1))
        offsets = np.cumsum(rng.integers(0, 5, batch + 1)) - int(rng.integers(0, 3))
        if i % 2:
            offsets[rng.integers(0, batch + 1)] = rng.integers(-1, 23)
        lists.append(offsets.tolist())
    found, counts = np.full((len(lists), REQUESTS + 1), 77, np.int64), []
    for own, given in zip(found, lists, strict=True):
        own[: len(given)] = given
        counts.append(len(given) - 1)
    wide = found.copy()
    wide[::5, 1] += 2**32
    out = np.zeros((len(lists), ROWS, 4), np.uint32)
    return {
        "offsets": found.astype(np.int32),
        "wide": wide,
        "counts": np.array(counts, np.uint32),
        **{name: out.copy() for name in ("one", "four", "wide_four", "none")},
    }


def _finder(values: list[int], row: int) -> int | None:
    """The request that halving finds for a row; None for rows before the first request's and past the last one's."""
    if row >= values[-1] or len(values) == 1:
        return None
    low, high = 0, len(values) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if values[middle] <= row else (low, middle)
    return None if low == 0 and row < values[0] <= values[1] else low


def _claim(values: list[int], row: int, most: int) -> list[int]:
    """Request, first row, rows and kind: a request has its rows only if it is found from each, and those around agree."""
    b = _finder(values, row)
    if b is None:
        bad = len(values) > 1 and (values[-1] > ROWS or values[-1] < values[-2])
        return [0, row, 1, ORPHAN if bad else EMPTY]
    begin, end = values[b : b + 2]
    around = values[max(b - 1, 0) : b + 3]
    good = around == sorted(around) and begin <= row < end <= ROWS and end - begin <= most
    good = good and all(_finder(values, other) == b for other in range(begin, end))
    return [b, begin, end - begin, CLAIMED] if good else [b, row, 1, FAULTY]


def _claims(arrays: Arrays) -> dict[str, Wanted]:
    found: dict[str, list[list[list[int]]]] = {name: [] for name in ("one", "four", "wide_four", "none")}
    for i, count in enumerate(arrays["counts"].tolist()):
        narrow, wide = (
            [x if 0 <= x < MAX else MAX for x in arrays[name][i, : count + 1].tolist()] for name in ("offsets", "wide")
        )
        for name, values, most in (("one", narrow, 1), ("four", narrow, 4), ("wide_four", wide, 4)):
            found[name].append([_claim(values, row, most) for row in range(ROWS)])
        found["none"].append(
            [
                [row // 3, row // 3 * 3, 3, CLAIMED if row // 3 * 3 + 3 <= ROWS else FAULTY]
                if row // 3 < count
                else [row // 3, row, 1, EMPTY]
                for row in range(ROWS)
            ]
        )
    return {name: exact(np.array(own, np.uint32)) for name, own in found.items()}


def _wholes_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(186)
    lengths, kinds, most = rng.integers(0, 45, 32), np.zeros(32), np.full(32, 2**31 - 1)
    lengths[:6], lengths[28:] = [0, 1, 2, 3, 40, 41], [-1, 2**31 - 1, 0, 1]
    kinds[[9, 10, 11]] = [1, 2, 3]
    most[12:20], most[31] = [-1, 0, 1, 3, 7, 20, 40, 41], 0
    found = {"lengths": lengths.astype(np.int32), "kinds": kinds.astype(np.uint32), "most": most.astype(np.int32)}
    return found | {name: np.zeros((32, 12), np.uint32) for name in ("after", "before", "window", "ring")}


def _whole(given: tuple[int, int, int, int], before: bool, window: int, ring: int) -> list[int]:
    """A request's piece; `window` tokens are seen by a row and, where there is one, all that come after; of `ring`."""
    length, kind, most, b = given
    row, rows = 3 * b, b % 4 + 1
    tokens = MAX if length < 0 else length + rows * before
    piece = [b, row, rows, tokens, 0, 0, 0, 1, 0, 0, 0, 0]
    first = max(0, tokens - ring)
    if kind != CLAIMED:
        piece[3], piece[9] = row, OFFSETS
    elif tokens == MAX or most < 0 or tokens - first > 40:
        piece[9] = LENGTH
    else:
        end = min(tokens, most)
        begin = max(first, tokens - rows - window + 1 if window else 0)
        seen = [
            token
            for token in range(first, end)
            for at in range(max(tokens - rows, 0), tokens)
            if (at - window < token if window else token <= at)
        ]
        piece[4:6] = [min(begin, end), end]
        assert not seen or piece[4:6] == [min(seen), max(seen) + 1]
    return piece


def _wholes(arrays: Arrays) -> dict[str, Wanted]:
    own = list(zip(*(arrays[n].tolist() for n in ("lengths", "kinds", "most")), range(32), strict=True))
    ways = {"after": (False, 0, MAX), "before": (True, 0, MAX), "window": (False, 5, MAX), "ring": (True, 5, 6)}
    return {name: exact(np.array([_whole(given, *way) for given in own], np.uint32)) for name, way in ways.items()}


def _plans_inputs() -> dict[str, Array]:
    sizes = np.random.default_rng(187).integers(1, 5000, (32, 5)).astype(np.uint32)
    sizes[0], sizes[1], sizes[2] = 1, (2**16, 2**31 - 1, 2**31 - 1, 2**31 - 1, 64), (3, 16, 4, 4, 1)
    return {"workspace": np.zeros(64, np.uint8), "sizes": sizes, "out": np.zeros((32, 6), np.uint64)}


def _plans(arrays: Arrays) -> dict[str, Wanted]:
    """A header of 64 bytes, 4 a part and one more, 1 a row, 4 a counter, 48 a piece; each from a multiple of 16 on."""
    out = []
    for parts, rows, pieces, slots, counters in arrays["sizes"].tolist():
        places = [0]
        for size in (64, 4 * (parts + 1), rows, 4 * slots * counters, 48 * pieces):
            places.append(places[-1] + -(-size // 16) * 16)
        out.append(places)
    return {"out": exact(np.array(out, np.uint64))}


# Merging ------------------------------------------------------------------------------------------------------------

REQUEST_PARTS: Final = (1, 2, 32, 33, 64, 65, 1100, 3, 40, 34)
UNUSED: Final = np.uint32(0xC0FFEE00)


def _factor(x: NDArray[np.float64], to: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):
        return np.where(np.isneginf(x), 0.0, np.exp2(x - to))


def _running_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(188)
    maxima = rng.normal(0, 6, (8, 32)).astype(np.float32)
    maxima[rng.random((8, 32)) < 0.2] = -np.inf
    maxima[:, 0], maxima[0, 1], maxima[:, 2] = -np.inf, 0, 5
    maxima[3, 7], maxima[5, 8], maxima[2, 9] = np.nan, np.inf, 300
    sums = np.where(np.isneginf(maxima), 0, np.exp2(rng.uniform(-3, 7, (8, 32)))).astype(np.float32)
    sums[4, [0, 11]], sums[1, 12] = np.nan, np.inf
    return {
        "maxima": pattern(maxima),
        "sums": pattern(sums),
        "factors": np.zeros(32, np.uint32),
        "out": np.zeros((8, 32, 4), np.uint32),
    }


def _running(arrays: Arrays) -> dict[str, Wanted]:
    maxima, sums = (arrays[name].view(np.float32).astype(np.float64) for name in ("maxima", "sums"))
    top, total = np.full(32, -np.inf), np.zeros(32)
    out = np.zeros((8, 32, 4))
    with np.errstate(invalid="ignore"):
        for n in range(8):
            higher = np.fmax(top, maxima[n])
            old, by = _factor(top, higher), _factor(maxima[n], higher)
            total = total * old + np.where(np.isnan(sums[n]), np.nan, sums[n] * by)
            top = higher
            out[n] = np.stack([top, total, old, by], axis=1)
        factors = _factor(maxima[0], maxima[0][np.arange(32) ^ 1])
    return {"factors": near(factors, 5e-6), "out": near(out, 1e-5)}


def _parts(rng: np.random.Generator, count: int, cols: int, dims: int) -> Array:
    """Maximum, sum and weighted sums of each column of so many parts, f32 `[count, cols, 2 + dims]`."""
    found = (rng.integers(1, 64, (count, cols, 2 + dims)) / 8).astype(np.float32)
    found[..., 0] = rng.integers(-96, 97, (count, cols)) / 8
    empty = rng.random((count, cols)) < 0.25
    found[empty, 0], found[empty, 1] = -np.inf, 0
    return found


def _merged(parts: Array) -> NDArray[np.float64]:
    """What parts come to: float64 `[cols, 2 + dims]`."""
    x = parts.astype(np.float64)
    top = x[..., 0].max(axis=0)
    by = _factor(x[..., 0], top)
    out = np.concatenate([top[:, None], (x[..., 1:] * by[..., None]).sum(axis=0)], axis=1)
    faulty = np.isnan(x[..., 1]).any(axis=0)
    out[faulty, 1] = np.nan
    return out


def _in_memory(parts: NDArray[Any], floats: int) -> Array:
    """Partial results as patterns `[count, floats]`: maxima, sums, and from a multiple of four floats on the columns."""
    count, cols, dims = parts.shape[0], parts.shape[1], parts.shape[2] - 2
    head = -(-2 * cols // 4) * 4
    out = np.full((count, floats), UNUSED, np.uint32)
    bits = pattern(parts.astype(np.float32))
    out[:, :cols], out[:, cols : 2 * cols] = bits[..., 0], bits[..., 1]
    out[:, head : head + cols * dims] = bits[..., 2:].reshape(count, -1)
    return out


def _partials_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(189)
    pairs, fours = _parts(rng, 7, 2, 140), _parts(rng, 40, 3, 260)
    pairs[3, 1, 1] = np.nan
    fours[:, 0, 0], fours[:, 0, 1] = -np.inf, 0
    return {
        "pairs": pattern(pairs),
        "fours": pattern(fours),
        "pair_parts": np.full((7, 288), UNUSED, np.uint32),
        "four_parts": np.full((40, 792), UNUSED, np.uint32),
        "pairs_to": np.full((2, 142), UNUSED, np.uint32),
        "fours_to": np.full((3, 262), UNUSED, np.uint32),
    }


def _partials(arrays: Arrays) -> dict[str, Wanted]:
    pairs, fours = (arrays[name].view(np.float32) for name in ("pairs", "fours"))
    found = np.full((3, 262), float(arrays["fours_to"].view(np.float32)[0, 0]))
    found[:2] = _merged(fours)[:2]
    return {
        "pair_parts": exact(_in_memory(pairs, 288)),
        "four_parts": exact(_in_memory(fours, 792)),
        "pairs_to": near(_merged(pairs), 1e-5),
        "fours_to": near(found, 1e-5),
    }


def _requests_inputs() -> dict[str, Array]:
    rng, pieces, slot = np.random.default_rng(190), [], 0
    parts = _parts(rng, sum(REQUEST_PARTS), 3, 4)
    for b, count in enumerate(REQUEST_PARTS):
        pieces += [[b, part, count, slot] for part in range(count)]
        slot += count
    begins = np.cumsum((0, *REQUEST_PARTS))
    parts[begins[3] + 32, 0, 1] = np.nan  # a group of its own
    parts[begins[5] + 7, 1, :2] = -np.inf, np.nan
    parts[begins[7] : begins[8], 0, :2] = -np.inf, 0  # nobody saw a token
    parts[begins[4] : begins[4] + 32, 1, :2] = -np.inf, 0  # nor anybody of the first group
    order = rng.permutation(len(pieces))  # requests side by side
    return {
        "in": pattern(parts[order]),
        "pieces": np.array(pieces, np.uint32)[order],
        "partials": np.full((slot, 2, 20), UNUSED, np.uint32),
        "counters": np.zeros((slot, 2), np.uint32),
        "out": np.zeros((len(REQUEST_PARTS), 2, 6), np.uint32),
        "times": np.zeros(len(REQUEST_PARTS), np.uint32),
    }


def _requests(arrays: Arrays) -> dict[str, Wanted]:
    """Of more than 32 parts, groups of 32 are merged into their first, columns that count only; then those are."""
    order = np.argsort(arrays["pieces"][:, 3].astype(np.int64) + arrays["pieces"][:, 1])
    parts = arrays["in"].view(np.float32)[order]
    after, out, begin = parts.astype(np.float64), [], 0
    for count in REQUEST_PARTS:
        mine = parts[begin : begin + count]
        out.append(_merged(mine)[:2])
        for first in range(0, count if count > 32 else 0, 32):
            after[begin + first, :2] = _merged(mine[first : first + 32])[:2]
        begin += count
    memory = np.full((begin, 2, 20), UNUSED, np.uint32)
    memory[:, 1] = _in_memory(after, 20)
    return {
        "partials": near(memory.view(np.float32).astype(np.float64), 1e-5),
        "counters": exact(np.zeros((begin, 2), np.uint32)),
        "out": near(np.stack(out), 1e-5),
        "times": exact(np.full(len(REQUEST_PARTS), 2, np.uint32)),
    }


def _loads_inputs() -> dict[str, Array]:
    return {"in": random_bytes(512, 191).view(np.uint32), "out": np.zeros(256, np.uint32)}


def _loads(arrays: Arrays) -> dict[str, Wanted]:
    x = arrays["in"]
    return {"out": exact(np.concatenate([x[:32], x[:32], x[:64], x]))}


def _last_inputs() -> dict[str, Array]:
    return {
        "counters": np.zeros((4, 2), np.uint32),
        "cells": np.zeros(12, np.uint32),
        "sums": np.zeros(4, np.uint32),
        "times": np.zeros(4, np.uint32),
    }


def _last(arrays: Arrays) -> dict[str, Wanted]:
    cells = np.arange(12, dtype=np.uint32) ** 2 + 7
    sums = cells.reshape(4, 3).sum(axis=1, dtype=np.uint32)
    return {
        "counters": exact(np.zeros((4, 2), np.uint32)),
        "cells": exact(cells.astype(np.uint32)),
        "sums": exact(sums),
        "times": exact(np.ones(4, np.uint32)),
    }


def _scans_inputs(threads: int) -> dict[str, Array]:
    return {
        "in": random_bytes(8 * 3 * threads, 192).view(np.uint64),
        "wide": np.zeros((3, threads, 2), np.uint64),
        "narrow": np.zeros((3, threads, 2), np.uint32),
    }


def _scans(threads: int, arrays: Arrays) -> dict[str, Wanted]:
    found = {}
    for name, kind in (("wide", np.uint64), ("narrow", np.uint32)):
        x: Array = arrays["in"].astype(kind).reshape(3, threads)
        sums: Array = np.cumsum(x, axis=1, dtype=kind)
        found[name] = exact(np.stack([sums - x, np.broadcast_to(sums[:, -1:], x.shape)], axis=2))
    return found


def probes() -> list[Probe]:
    """All of this module."""
    parts, lists = sum(REQUEST_PARTS), len(_claims_inputs()["counts"])
    whose = [u32(REQUESTS + 1), u32(ROWS)]
    return [
        Probe("library_work_claims", UNIT, "work_claims", _claims_inputs, _claims, ROWS, (lists, 1, 1), tail=whose),
        Probe("library_work_wholes", UNIT, "work_wholes", _wholes_inputs, _wholes, 32),
        Probe("library_work_plans", UNIT, "work_plans", _plans_inputs, _plans, 32),
        Probe("library_work_running", UNIT, "work_running", _running_inputs, _running, 32),
        Probe("library_work_loads", UNIT, "work_loads", _loads_inputs, _loads, 32),
        Probe("library_work_last", UNIT, "work_last", _last_inputs, _last, 64, (12, 1, 1)),
        Probe("library_work_partials", UNIT, "work_partials", _partials_inputs, _partials, 64),
        Probe("library_work_requests", UNIT, "work_requests", _requests_inputs, _requests, 32, (parts, 1, 1)),
        *(
            Probe(f"library_work_scans_{n}", UNIT, f"work_scans_{n}", partial(_scans_inputs, n), partial(_scans, n), n)
            for n in (32, 512)
        ),
    ]
