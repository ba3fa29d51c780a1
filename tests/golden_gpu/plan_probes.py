"""The planner of decode steps (kernels/plan_kv.cu): requests, their chunks, and the SM parts among these."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Final

import numpy as np

from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe, u32
from tests.golden_gpu.split_kv_probes import CLAIMED, EMPTY, FAULTY, LENGTH, MAX, OFFSETS, _finder, _stamp_at, _stamp_of

UNIT: Final = "plan_kv"
IDLE: Final = int.from_bytes(b"cntr", "little")
FAN_IN, TILE, LONGEST = 32, 16, 400
OVERHEAD, LEAST, WINDOW = 2, 2, 150
BATCH, CHUNKS = 80, 600
# A request: its chunk's words and its tiles; None for a row that begins none.
Request = tuple[list[int], int] | None


def _whole(
    b: int, row: int, rows: int, kind: int, tokens: int, most: int, first: Callable[[int], int]
) -> tuple[list[int], int]:
    """One chunk of all that a request's rows see, up to its last token or `most`."""
    chunk = [b, row, rows, tokens, 0, 0, 0, 1, 0, 0, 0, 0]
    if kind != CLAIMED:
        chunk[3], chunk[9] = row, OFFSETS
    elif tokens == MAX or most == MAX or tokens > LONGEST:
        chunk[9] = LENGTH
    else:
        chunk[5] = min(tokens, most)
        chunk[4] = min(first(max(tokens - rows, 0)), chunk[5])
    begin, end = chunk[4:6]
    return chunk, -(-end // TILE) - begin // TILE if end > begin else 1


def _told(requests: list[Request], kinds: list[int], share: int, chunks: int) -> Array:
    """What the kernels tell of a plan."""
    found = [r for r in requests if r is not None]
    tiles, stamp = [t for _, t in found], sum(_stamp_of(chunk) for chunk, _ in found) % 2**32
    unclaimed = any(kind in (EMPTY, 3) for kind in kinds)
    return np.array([sum(tiles), len(tiles), max(tiles), stamp, unclaimed, share, chunks], np.uint64)


def _listed(cut: list[tuple[list[int], list[int]]], stamp: int) -> tuple[Array, list[int]]:
    """The list of chunks, and where each request's begin: of each request its chunk and the tokens at which it is cut."""
    found: list[list[int]] = []
    begins, slot = [], 0
    for chunk, cuts in cut:
        begins.append(len(found))
        for i in range(len(cuts) - 1):
            own = [*chunk[:4], cuts[i], cuts[i + 1], i, len(cuts) - 1, slot, chunk[9], _stamp_at(stamp, len(found)), 0]
            found.append(own)
        slot += len(cuts) - 1 if len(cuts) > 2 else 0
    chunks = np.zeros((CHUNKS, 12), np.uint32)
    chunks[: len(found)] = found
    return chunks, [*begins, len(found)]


# Chunks of the same cost ---------------------------------------------------------------------------------------------------


def _balanced_inputs(parts: int) -> dict[str, Array]:
    rng = np.random.default_rng(141)
    counts = rng.integers(0, 4, BATCH)
    counts[7], counts[40] = 4, 5  # more rows than a request can have
    lengths = rng.integers(0, LONGEST - 3, BATCH)
    lengths[[3, 30, 60]], lengths[20:30] = [-1, LONGEST + 1, 0], rng.integers(0, 20, 10)
    return {
        "lengths": lengths.astype(np.int32),
        "offsets": np.array([0, *accumulate(counts)], np.int32),
        "chunks": np.zeros((CHUNKS, 12), np.uint32),
        "starts": np.zeros(parts + 1, np.uint32),
        "kinds": np.full(ROWS, 9, np.uint8),
        "counters": np.zeros(104, np.uint32),
        "out": np.zeros(7, np.uint64),
    }


ROWS: Final = 150


def _balanced(parts: int, arrays: Arrays) -> dict[str, Wanted]:
    offsets, requests, kinds = arrays["offsets"].tolist(), list[Request](), []
    for row in range(ROWS):
        b = _finder(offsets, row)
        if b is None:
            kinds.append(EMPTY)
            requests.append(None)
            continue
        begin, end = offsets[b : b + 2]
        kind = CLAIMED if end - begin <= 3 else FAULTY
        rows, length = (end - begin, int(arrays["lengths"][b])) if kind == CLAIMED else (1, 0)
        kinds.append(kind)
        own = _whole(
            b, row, rows, kind, length + rows if length >= 0 else MAX, MAX - 1, lambda at: max(at - WINDOW + 1, 0)
        )
        requests.append(own if kind == FAULTY or row == begin else None)
    found = [r for r in requests if r is not None]
    total, longest = sum(tiles + OVERHEAD for _, tiles in found), max(tiles for _, tiles in found)
    share = max(OVERHEAD + LEAST, -(-total // parts))
    if parts <= FAN_IN + FAN_IN // 4:
        share = max(share, -(-longest // (FAN_IN - 1)))
    stamp, cut, before = sum(_stamp_of(chunk) for chunk, _ in found) % 2**32, [], 0
    starts: dict[int, tuple[int, int]] = {}  # of an SM part: the request that it begins with, and which chunk of it
    for n, (chunk, tiles) in enumerate(found):
        # Tile t costs the unit before + OVERHEAD + t; an SM part has the tiles of `share` units.
        parts_of = [(before + OVERHEAD + t) // share for t in range(tiles)]
        firsts = [t for t in range(1, tiles) if parts_of[t] != parts_of[t - 1]]
        if firsts and tiles - firsts[-1] < OVERHEAD:  # too few tiles for a chunk
            del firsts[-1]
        cut.append((chunk, [chunk[4], *((chunk[4] // TILE + t) * TILE for t in firsts), chunk[5]]))
        for p in range(-(-before // share), parts_of[-1] + 1):
            starts[p] = (n, max(p - parts_of[0], 0))
        before += tiles + OVERHEAD
    chunks, begins = _listed(cut, stamp)
    first = [begins[starts[p][0]] + starts[p][1] if p in starts else begins[-1] for p in range(parts + 1)]
    counters = np.zeros(104, np.uint32)
    counters[:100] = IDLE
    return {
        "chunks": exact(chunks),
        "starts": exact(np.array([(x + _stamp_at(stamp, p)) % 2**32 for p, x in enumerate(first)], np.uint32)),
        "kinds": exact(np.array([k if k == EMPTY else CLAIMED for k in kinds], np.uint8)),
        "counters": exact(counters),
        "out": exact(_told(requests, kinds, share, begins[-1])),
    }


# Chunks of as many tiles -----------------------------------------------------------------------------------------------------

FIXED_PARTS, FIXED_ROWS, CHUNK_TILES, MOST_CHUNKS = 13, 141, 3, 6


def _fixed_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(142)
    lengths, valid = rng.integers(0, LONGEST + 1, BATCH), rng.integers(0, LONGEST, BATCH)
    lengths[[3, 30]], valid[:20], valid[40] = [-1, LONGEST + 1], 2**31 - 1, -1
    return {
        "lengths": lengths.astype(np.int32),
        "valid": valid.astype(np.int32),
        "chunks": np.zeros((CHUNKS, 12), np.uint32),
        "starts": np.zeros(FIXED_PARTS + 1, np.uint32),
        "kinds": np.full(FIXED_ROWS, 9, np.uint8),
        "out": np.zeros(7, np.uint64),
    }


def _fixed(arrays: Arrays) -> dict[str, Wanted]:
    requests, cut = list[Request](), []
    for row in range(FIXED_ROWS):
        b, whole = row // 2, row + 1 < FIXED_ROWS
        if whole and row % 2:
            requests.append(None)
            continue
        length, most = (int(arrays[name][b]) for name in ("lengths", "valid"))
        kind = CLAIMED if whole else FAULTY
        chunk, tiles = _whole(b, row, 2, kind, length if length >= 0 else MAX, most if most >= 0 else MAX, lambda _: 0)
        chunk[2] = min(2, FIXED_ROWS - row)
        requests.append((chunk, tiles))
    found = [r for r in requests if r is not None]
    stamp = sum(_stamp_of(chunk) for chunk, _ in found) % 2**32
    for chunk, tiles in found:
        if -(-tiles // CHUNK_TILES) > MOST_CHUNKS:
            cut.append(([*chunk[:9], LENGTH, 0, 0], [chunk[4], chunk[5]]))
        else:
            step = CHUNK_TILES * TILE
            cut.append((chunk, [0, *range(step, chunk[5] if chunk[5] else 1, step), chunk[5]]))
    chunks, begins = _listed(cut, stamp)
    first = [begins[-1] * p // FIXED_PARTS for p in range(FIXED_PARTS + 1)]
    return {
        "chunks": exact(chunks),
        "starts": exact(np.array([(x + _stamp_at(stamp, p)) % 2**32 for p, x in enumerate(first)], np.uint32)),
        "kinds": exact(np.full(FIXED_ROWS, CLAIMED, np.uint8)),
        "out": exact(_told(requests, [], 0, begins[-1])),
    }


# Their pieces ------------------------------------------------------------------------------------------------------------------


def _pieces_inputs() -> dict[str, Array]:
    positions = np.random.default_rng(143).integers(0, 30, 64).astype(np.uint32)
    positions[:3] = [2**31, 2**32 - 5, 0]
    lengths = np.random.default_rng(144).integers(-1, LONGEST + 2, 32).astype(np.int32)
    zeros = {name: np.zeros((64, n), np.uint32) for name, n in (("masks", 6), ("tiles", 3), ("places", 4))}
    return {"lengths": lengths, "positions": positions, **zeros, "chunks": np.zeros((192, 12), np.uint32)}


def _pieces(arrays: Arrays) -> dict[str, Wanted]:
    masks, tiles, chunks = [], [], []
    for i, position in enumerate(arrays["positions"].tolist()):
        tokens = position + i % 3
        seen = min(position + 1, tokens)
        masks.append([0, seen, max(position - 8, 0), seen, 0, tokens])
        kind = FAULTY if i == 60 else CLAIMED  # of 61 rows, the last request has one
        length = int(arrays["lengths"][i // 2])
        _, count = _whole(i // 2, i, 2, kind, length if length >= 0 else MAX, MAX - 1, lambda _: 0)
        tiles.append([count if i < 61 and i % 2 == 0 else 0, kind, MAX - 1])
        begin = 5 + TILE * (i % 2)
        cuts = [begin, *((begin // TILE + n) * TILE for n in (3, 5)), 150]
        for n in range(3):
            chunks.append([i, i, 1, 400, cuts[n], cuts[n + 1], n, 3, 7 * i, 0, _stamp_at(77, 3 * i + n), 0])
    counts = [i % 4 for i in range(64)]
    slots = [n if n > 1 else 0 for n in counts]
    places = [
        [sum(counts) + sum(counts[:i]), sum(slots) + sum(slots[:i]), 2 * sum(counts), 2 * sum(slots)] for i in range(64)
    ]
    found = {"masks": masks, "tiles": tiles, "places": places, "chunks": chunks}
    return {name: exact(np.array(own, np.uint32)) for name, own in found.items()}


def probes() -> list[Probe]:
    """All of this module."""
    found = [
        Probe(
            f"library_plan_balanced_{parts}",
            UNIT,
            "plan_balanced",
            partial(_balanced_inputs, parts),
            partial(_balanced, parts),
            64,
            tail=[u32(BATCH), u32(ROWS), u32(parts)],
        )
        for parts in (3, 24, 90)
    ]
    tail = [u32(BATCH), u32(FIXED_ROWS), u32(FIXED_PARTS)]
    return [
        *found,
        Probe("library_plan_fixed", UNIT, "plan_fixed", _fixed_inputs, _fixed, 64, tail=tail),
        Probe("library_plan_pieces", UNIT, "plan_pieces", _pieces_inputs, _pieces, 64),
    ]
