"""Partial results merged, those who share a counter, and sums of blocks (kernels/split_kv.cu)."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tests.golden_gpu.compare import Rule, Wanted
from tests.golden_gpu.memory_probes import exact, random_bytes
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe, pattern
from tests.golden_gpu.split_kv_probes import MAX, PLAN, UNIT


def near(x: NDArray[Any], relative: float) -> Wanted:
    """These float64 numbers, as f32 that are off by `relative` at most."""
    with np.errstate(over="ignore"):
        bits = pattern(x.astype(np.float32))
    number = np.where(np.isfinite(x), x, np.nan)[..., None]
    return Wanted(bits, Rule("f32", relative=relative, absolute=1e-30, any_nan=True), number)


REQUEST_CHUNKS: Final = (1, 2, 32, 33, 64, 65, 1100, 3, 40, 34)
# Requests by their chunks, the slot whose counter was overwritten, from the request's first on, and what it has counted then:
# none, that of all, a group's of several, and that of the groups.
Request = tuple[int, int | None, int]
OVERWRITTEN: Final[tuple[Request, ...]] = (
    (5, None, 0),
    (40, None, 0),
    (1, 0, 0xDEADBEEF),
    (2, 0, 2),
    (32, 0, 2**31),
    (40, 0, 32),
    (70, 32, 0xC0FFEE00),
    (33, 1, 2),
    (65, 1, 77),
)
UNUSED: Final = np.uint32(0xC0FFEE00)
IDLE: Final = 0x72746E63  # a counter that has counted nobody


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


def _chunks(rng: np.random.Generator, count: int, cols: int, dims: int) -> Array:
    """Maximum, sum and weighted sums of each column of so many chunks, f32 `[count, cols, 2 + dims]`."""
    found = (rng.integers(1, 64, (count, cols, 2 + dims)) / 8).astype(np.float32)
    found[..., 0] = rng.integers(-96, 97, (count, cols)) / 8
    empty = rng.random((count, cols)) < 0.25
    found[empty, 0], found[empty, 1] = -np.inf, 0
    return found


def _merged(chunks: Array) -> NDArray[np.float64]:
    """What chunks come to: float64 `[cols, 2 + dims]`."""
    x = chunks.astype(np.float64)
    top = x[..., 0].max(axis=0)
    by = _factor(x[..., 0], top)
    out = np.concatenate([top[:, None], (x[..., 1:] * by[..., None]).sum(axis=0)], axis=1)
    faulty = np.isnan(x[..., 1]).any(axis=0)
    out[faulty, 1] = np.nan
    return out


def _in_memory(chunks: NDArray[Any], floats: int) -> Array:
    """Partial results as patterns `[count, floats]`: maxima, sums, and from a multiple of four floats on the columns."""
    count, cols, dims = chunks.shape[0], chunks.shape[1], chunks.shape[2] - 2
    head = -(-2 * cols // 4) * 4
    out = np.full((count, floats), UNUSED, np.uint32)
    bits = pattern(chunks.astype(np.float32))
    out[:, :cols], out[:, cols : 2 * cols] = bits[..., 0], bits[..., 1]
    out[:, head : head + cols * dims] = bits[..., 2:].reshape(count, -1)
    return out


def _partials_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(189)
    pairs, fours = _chunks(rng, 7, 2, 140), _chunks(rng, 40, 3, 260)
    pairs[3, 1, 1] = np.nan
    fours[:, 0, 0], fours[:, 0, 1] = -np.inf, 0
    return {
        "pairs": pattern(pairs),
        "fours": pattern(fours),
        "pair_partials": np.full((7, 288), UNUSED, np.uint32),
        "four_partials": np.full((40, 792), UNUSED, np.uint32),
        "pairs_to": np.full((2, 142), UNUSED, np.uint32),
        "fours_to": np.full((3, 262), UNUSED, np.uint32),
    }


def _partials(arrays: Arrays) -> dict[str, Wanted]:
    pairs, fours = (arrays[name].view(np.float32) for name in ("pairs", "fours"))
    found = np.full((3, 262), float(arrays["fours_to"].view(np.float32)[0, 0]))
    found[:2] = _merged(fours)[:2]
    return {
        "pair_partials": exact(_in_memory(pairs, 288)),
        "four_partials": exact(_in_memory(fours, 792)),
        "pairs_to": near(_merged(pairs), 1e-5),
        "fours_to": near(found, 1e-5),
    }


# What teams have, and where a workspace of 2 SM parts, 5 rows, 2 chunks and 3 slots has partial results of 32 floats.
TEAM_COUNTERS, TEAM_PARTIALS, TEAM_WORDS = (64 + 16 + 16) // 4, (64 + 16 + 16 + 32 + 2 * 48) // 4, 56 + 3 * 2 * 32


def _teams_inputs() -> dict[str, Array]:
    chunks = _chunks(np.random.default_rng(196), 6, 3, 8).reshape(2, 3, 3, 10)
    chunks[0, :, 1, 0], chunks[0, :, 1, 1:] = -np.inf, 0  # no team saw a token
    return {"in": pattern(chunks), "workspace": np.full(TEAM_WORDS, UNUSED, np.uint32)}


def _teams(arrays: Arrays) -> dict[str, Wanted]:
    memory, chunks = np.full(TEAM_WORDS, UNUSED, np.uint32), arrays["in"].view(np.float32)
    found = memory.view(np.float32).astype(np.float64)
    for block in range(2):
        slot, sums = 1 + block, _merged(chunks[block])
        sums[2, 1] = np.nan
        found[TEAM_COUNTERS + slot * 2 + block] = (3.0, 3.5)[block]
        to = found[TEAM_PARTIALS + (slot * 2 + block) * 32 :]
        to[:3], to[3:6], to[8:32] = sums[:, 0], sums[:, 1], sums[:, 2:].reshape(-1)
    return {"workspace": near(found, 1e-5)}


def _weights_inputs() -> dict[str, Array]:
    chunks = _chunks(np.random.default_rng(197), 11, 3, 4)
    chunks[4, 1, 1] = np.nan
    return {
        "in": pattern(chunks),
        "partials": np.full((11, 20), UNUSED, np.uint32),
        "out": np.zeros(34 * 3, np.uint32),
    }


def _weights(arrays: Arrays) -> dict[str, Wanted]:
    """No weight of a chunk that is not there; the third column is left alone."""
    chunks = arrays["in"].view(np.float32)
    out, sums = np.full((34, 3), 77.0), _merged(chunks)[:2]
    out[:32, :2], out[32, :2], out[33, :2] = 0, sums[:, 0], sums[:, 1]
    out[:11, :2] = _factor(chunks[:, :2, 0].astype(np.float64), sums[:, 0])
    return {"partials": exact(_in_memory(chunks, 20)), "out": near(out.reshape(-1), 1e-5)}


def _request_arrays(counts: tuple[int, ...], chunks: Array, rng: np.random.Generator) -> dict[str, Array]:
    """Requests of so many chunks, whose blocks come side by side."""
    listed, slot = [], 0
    for b, count in enumerate(counts):
        listed += [[b, index, count, slot] for index in range(count)]
        slot += count
    order = rng.permutation(len(listed))
    return {
        "in": pattern(chunks[order]),
        "chunks": np.array(listed, np.uint32)[order],
        "partials": np.full((slot, 2, 20), UNUSED, np.uint32),
        "counters": np.full((slot, 2), IDLE, np.uint32),
        "errors": np.zeros(1, np.uint64),
        "out": np.zeros((len(counts), 2, 6), np.uint32),
        "times": np.zeros(len(counts), np.uint32),
    }


def _requests_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(190)
    chunks = _chunks(rng, sum(REQUEST_CHUNKS), 3, 4)
    begins = np.cumsum((0, *REQUEST_CHUNKS))
    chunks[begins[3] + 32, 0, 1] = np.nan  # a group of its own
    chunks[begins[5] + 7, 1, :2] = -np.inf, np.nan
    chunks[begins[7] : begins[8], 0, :2] = -np.inf, 0  # nobody saw a token
    chunks[begins[4] : begins[4] + 32, 1, :2] = -np.inf, 0  # nor anybody of the first group
    return _request_arrays(REQUEST_CHUNKS, chunks, rng)


def _overwritten_inputs(own: tuple[Request, ...]) -> dict[str, Array]:
    counts = tuple(count for count, _, _ in own)
    rng = np.random.default_rng(195)
    found = _request_arrays(counts, _chunks(rng, sum(counts), 3, 4), rng)
    for first, (_, slot, garbage) in zip(np.cumsum((0, *counts)), own, strict=False):
        if slot is not None:
            found["counters"][first + slot, 1] = (IDLE + garbage) % 2**32
    return found


def _requests(own: tuple[Request, ...], arrays: Arrays) -> dict[str, Wanted]:
    """Of more than 32 chunks, groups of 32 are merged into their first, columns that count only; then those are.

    Of a request with an overwritten counter nothing is known but that: no tokens, and a sum of NaN. Its blocks count on.
    """
    overwritten = any(slot is not None for _, slot, _ in own)
    order = np.argsort(arrays["chunks"][:, 3].astype(np.int64) + arrays["chunks"][:, 1])
    chunks = arrays["in"].view(np.float32)[order]
    after, out, begin = chunks.astype(np.float64), [], 0
    counters = np.zeros((len(chunks), 2), np.int64)
    for count, slot, garbage in own:
        mine, groups = chunks[begin : begin + count], -(-count // 32)
        out.append(_merged(mine)[:2] if slot is None else np.array([[-np.inf, np.nan, 0, 0, 0, 0]] * 2))
        for first in range(0, count if groups > 1 else 0, 32):
            if first != slot and first + 1 < count:  # nobody is its last; there is nothing to merge
                after[begin + first, :2] = _merged(mine[first : first + 32])[:2]
        if slot is not None:
            between = groups > 1 and slot == 1  # the groups' counter
            counters[begin + slot, 1] = garbage + (groups if between else min(32, count - slot))
            if groups > 1 and not between:
                counters[begin + 1, 1] = groups - 1  # those that did come
        begin += count
    memory = np.full((begin, 2, 20), UNUSED, np.uint32)
    memory[:, 1] = _in_memory(after, 20)
    return {
        "partials": near(memory.view(np.float32).astype(np.float64), 1e-5),
        "counters": exact(((counters + IDLE) % 2**32).astype(np.uint32)),
        "errors": exact(np.array([MAX << 32 | MAX ^ PLAN if overwritten else 0], np.uint64)),
        "out": near(np.stack(out), 1e-5),
        "times": exact(np.full(len(own), 2, np.uint32)),
    }


def _loads_inputs() -> dict[str, Array]:
    return {"in": random_bytes(512, 191).view(np.uint32), "out": np.zeros(256, np.uint32)}


def _loads(arrays: Arrays) -> dict[str, Wanted]:
    x = arrays["in"]
    return {"out": exact(np.concatenate([x[:32], x[:32], x[:64], x]))}


# The counters of groups of 3 blocks: of how many blocks they are, and how many they have counted. Those that have some can be
# told in any order of the blocks: none of these sets back a counter that another one still adds to.
COUNTED: Final = (
    (3, 0),
    (3, 0),
    (5, 0),
    (5, 1),
    (5, 2),
    (4, 1),
    (3, 3),
    (3, 0xDEADBEEF),
    (3, 2**31 - 1),
    (3, MAX - 2),
    (3, MAX - 1),
    (3, MAX),
)


def _last_inputs() -> dict[str, Array]:
    counters = np.full((len(COUNTED), 2), IDLE, np.uint32)
    counters[:, 0] = [(IDLE + begin) % 2**32 for _, begin in COUNTED]
    return {
        "counters": counters,
        "blocks": np.array([blocks for blocks, _ in COUNTED], np.uint32),
        "cells": np.zeros(3 * len(COUNTED), np.uint32),
        "sums": np.zeros(len(COUNTED), np.uint32),
        "times": np.zeros((len(COUNTED), 3), np.uint32),
    }


def _last(arrays: Arrays) -> dict[str, Wanted]:
    """Before the last place of a group is early, there the last, past it miscounted; the last one sets the counter back."""
    cells = np.arange(3 * len(COUNTED), dtype=np.uint32) ** 2 + 7
    counters, times = np.full_like(arrays["counters"], IDLE), np.zeros((len(COUNTED), 3), np.uint32)
    for group, (blocks, begin) in enumerate(COUNTED):
        places = [(begin + n) % 2**32 for n in range(3)]
        for place in places:
            times[group, 0 if place < blocks - 1 else 1 if place == blocks - 1 else 2] += 64  # threads
        counters[group, 0] = (IDLE + (0 if places[-1] == blocks - 1 else begin + 3)) % 2**32
    sums = np.where(times[:, 1] > 0, cells.reshape(-1, 3).sum(axis=1), 0)
    return {
        "counters": exact(counters),
        "cells": exact(cells.astype(np.uint32)),
        "sums": exact(sums.astype(np.uint32)),
        "times": exact(times),
    }


def _meetings_inputs() -> dict[str, Array]:
    """Nobody says yes; one of the first threads does, or one of the others."""
    flags = np.zeros((4, 96), np.uint32)
    flags[[1, 2, 3], [37, 70, 63]] = 5
    return {"flags": flags, "out": np.full((4, 96, 4), UNUSED, np.uint32)}


def _meetings(arrays: Arrays) -> dict[str, Wanted]:
    flags, thread = arrays["flags"] != 0, np.arange(96)
    out = np.zeros((4, 96, 4), np.uint32)
    for block in range(4):
        out[block, :, 0] = 1000 * block + 95 - thread
        out[block, :, 1] = flags[block].any()
        out[block, :64, 2] = 1000 * block + 500 + 63 - thread[:64]
        out[block, :64, 3] = flags[block, :64].any()
    return {"out": exact(out)}


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
    chunks, of_plan = sum(REQUEST_CHUNKS), partial(_requests, tuple((count, None, 0) for count in REQUEST_CHUNKS))
    return [
        Probe("library_split_running", UNIT, "split_running", _running_inputs, _running, 32),
        Probe("library_split_loads", UNIT, "split_loads", _loads_inputs, _loads, 32),
        Probe("library_split_last", UNIT, "split_last", _last_inputs, _last, 64, (3 * len(COUNTED), 1, 1)),
        Probe("library_split_meetings", UNIT, "split_meetings", _meetings_inputs, _meetings, 96, (4, 1, 1)),
        Probe("library_split_partials", UNIT, "split_partials", _partials_inputs, _partials, 64),
        Probe("library_split_weights", UNIT, "split_weights", _weights_inputs, _weights, 32),
        Probe("library_split_teams", UNIT, "split_teams", _teams_inputs, _teams, 64, (2, 1, 1)),
        Probe("library_split_requests", UNIT, "split_requests", _requests_inputs, of_plan, 32, (chunks, 1, 1)),
        *(
            Probe(
                f"library_split_{name}",
                UNIT,
                kernel,
                partial(_overwritten_inputs, own),
                partial(_requests, own),
                threads,
                (sum(count for count, _, _ in own), 1, 1),
            )
            for name, kernel, own, threads in (
                ("overwritten", "split_requests", OVERWRITTEN, 32),
                ("first", "split_first_requests", OVERWRITTEN[:5], 96),
            )
        ),
        *(
            Probe(
                f"library_split_scans_{n}", UNIT, f"split_scans_{n}", partial(_scans_inputs, n), partial(_scans, n), n
            )
            for n in (32, 512)
        ),
    ]
