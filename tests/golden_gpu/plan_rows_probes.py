"""The planner of extend (kernels/plan_rows.cu): rows of requests, tiles of their columns, and where keys are cut."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Final

import numpy as np

from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe, u32
from tests.golden_gpu.split_kv_probes import CLAIMED, FAULTY, LENGTH, MAX, OFFSETS, _stamp_at, _stamp_of

UNIT: Final = "plan_rows"
LONGEST, TOLD, TILES = 400, 16, 800


@dataclass(frozen=True)
class Split:
    """A plan: threads, columns of a tile, query heads of a kv head, rows of a request at most, tokens of a tile and of a chunk
    (0: cut into equal parts), tokens that a row sees (0: all), columns of a tile that takes half the time; fixed cost and least
    keys of an entry, in tiles; what a launch says of cuts."""

    threads: int
    cols: int
    group: int
    most_rows: int
    tile: int
    chunk: int
    window: int
    narrow: int
    overhead: int
    least: int
    share: int
    max_slots: int
    slots: int

    def seen(self, whole: list[int], i: int) -> tuple[int, int]:
        """The tokens of its request that row i sees."""
        rows, tokens, begin, end = whole[2:6]
        position = tokens - rows + i
        if self.window == 0:
            return begin, end
        first, last = max(position - self.window + 1, 0), min(position + 1, tokens)
        return max(begin, first), min(end, last) if position >= 0 else 0


BALANCED: Final = Split(64, 16, 3, 40, 16, 0, 150, 8, 2, 2, share=6, max_slots=300, slots=0)
FIXED: Final = Split(32, 32, 4, 24, 16, 48, 0, 0, 1, 1, share=12, max_slots=700, slots=5)


def _bucket(keys: int) -> int:
    """Eight from each power of two to the next."""
    exponent = max(keys.bit_length() - 1, 0)
    return 255 - 8 * exponent - max(8 * keys // 2**exponent - 8, 0)


def _least(bucket: int) -> int:
    """The least cost of a bucket."""
    eighths, exponent = 8 + (255 - bucket) % 8, (255 - bucket) // 8
    return eighths * 2**exponent // 8


def _claims(offsets: list[int], num_rows: int, most: int) -> list[tuple[int, int, int]]:
    """First row, rows and kind of each request: ranges follow one another, up to the largest offset so far."""
    found, largest = [], offsets[0]
    for begin, end in pairwise(offsets):
        before, largest = largest, max(largest, end)
        first, rows = min(before, num_rows), min(largest, num_rows) - min(before, num_rows)
        good = before == begin and largest == end <= num_rows and rows <= most
        found.append((first, rows, CLAIMED if good else FAULTY))
    return found


def _whole(split: Split, b: int, claim: tuple[int, int, int], tokens: int, most: int) -> list[int]:
    """A request as one chunk."""
    row, rows, kind = claim
    chunk = [b, row, rows, tokens, 0, 0, 0, 1, 0, 0, 0, 0]
    if kind == FAULTY:
        chunk[3], chunk[9] = row, OFFSETS
    elif tokens > LONGEST or most == MAX:
        chunk[9] = LENGTH
    else:
        chunk[5] = min(tokens, most)
        first = max(tokens - rows, 0) - split.window + 1 if split.window else 0
        chunk[4] = min(max(first, 0), chunk[5])
    return chunk


def _tile(split: Split, whole: list[int], n: int) -> tuple[list[int], int]:
    """Tile n of a request, and its tiles of keys."""
    first = n * split.cols
    last = min((first + split.cols - 1) // split.group, whole[2] - 1)
    begin = end = 0
    if whole[9] == 0:
        begin = split.seen(whole, first // split.group)[0]
        end = max(begin, split.seen(whole, last)[1])
    keys = (end - 1) // split.tile - begin // split.tile + 1 if end > begin else 1
    return [*whole[:4], begin, end, *whole[6:11], first], keys


def _cut(split: Split, tiles: Iterable[tuple[list[int], int]]) -> tuple[list[list[int]], int]:
    """The facts of tiles that a kernel writes, and the slots in use after them."""
    found, slots = [], split.slots
    for chunk, keys in tiles:
        begin, end = chunk[4:6]
        cols = chunk[2] * split.group
        narrow = cols - chunk[11] <= split.narrow
        most = max(split.least, split.share // (1 if narrow else 2))
        if keys <= most:
            wanted = 1
        elif split.chunk:
            wanted = (end - 1) // split.chunk - begin // split.chunk + 1
        else:
            wanted = -(-keys // most)
        slot = slots
        slots += wanted if wanted > 1 else 0
        count = wanted if slots <= split.max_slots else 1
        if split.chunk:
            cuts = [(begin // split.chunk + i) * split.chunk for i in range(1, count)]
        else:
            cuts = [(begin // split.tile + keys * i // count) * split.tile for i in range(1, count)]
        cost = (keys // count + split.overhead) * (1 if narrow else 2)
        kind = keys | narrow << 30 | (cols <= split.cols) << 31
        own = [kind, count, wanted, slot if count > 1 else 0, _bucket(cost), begin, *cuts, end]
        found.append(own[:TOLD] + [0] * (TOLD - len(own)))
    return found, slots


def _told(split: Split, wholes: Iterable[list[int]], end_row: int) -> dict[str, Wanted]:
    tiles = [_tile(split, own, n) for own in wholes for n in range(-(-own[2] * split.group // split.cols))]
    told, slots = _cut(split, tiles)
    found = {"chunks": np.zeros((TILES, 12), np.uint32), "told": np.zeros((TILES, TOLD), np.uint32)}
    found["chunks"][: len(tiles)] = [chunk for chunk, _ in tiles]
    found["told"][: len(tiles)] = told
    return {name: exact(x) for name, x in found.items()} | {
        "end": exact(np.array([end_row, len(tiles), slots], np.uint32))
    }


def _plans() -> dict[str, Array]:
    return {
        "chunks": np.zeros((TILES, 12), np.uint32),
        "told": np.zeros((TILES, TOLD), np.uint32),
        "end": np.zeros(3, np.uint32),
    }


# Requests with offsets, cut into equal parts -----------------------------------------------------------------------------

BATCH, ROWS = 150, 1000


def _balanced_inputs() -> dict[str, Array]:
    """Rows before the first request; too many rows, a wrong offset, and the last requests past the rows."""
    rng = np.random.default_rng(280)
    counts, lengths, valid = rng.integers(0, 13, BATCH), rng.integers(0, LONGEST + 1, BATCH), np.full(BATCH, 2**31 - 1)
    counts[[7, 80]], lengths[[3, 30, 60]] = [40, 41], [-1, LONGEST + 1, 0]
    lengths[100:120], valid[20:40], valid[41] = rng.integers(0, 20, 20), rng.integers(0, LONGEST, 20), -1
    offsets = np.array([3, *accumulate(counts, initial=3)][1:], np.int32)
    offsets[90] -= 30
    offsets[-3:] = [ROWS - 2, ROWS + 3, ROWS + 4]
    found = {"lengths": lengths.astype(np.int32), "valid": valid.astype(np.int32), "offsets": offsets}
    return found | _plans()


def _balanced(arrays: Arrays) -> dict[str, Wanted]:
    lengths, valid = ([x if x >= 0 else MAX for x in arrays[name].tolist()] for name in ("lengths", "valid"))
    claims = _claims(arrays["offsets"].tolist(), ROWS, BALANCED.most_rows)
    wholes = [_whole(BALANCED, b, claims[b], lengths[b], valid[b]) for b in range(BATCH) if claims[b][1] > 0]
    return _told(BALANCED, wholes, ROWS)


# Requests of as many rows, cut at fixed places ---------------------------------------------------------------------------

EVEN_BATCH, EVEN_EACH, EVEN_ROWS = 70, 20, 70 * 20 + 11


def _fixed_inputs() -> dict[str, Array]:
    lengths = np.random.default_rng(281).integers(0, LONGEST - EVEN_EACH + 1, EVEN_BATCH)
    lengths[[3, 30, 31, 60]] = [-1, LONGEST - EVEN_EACH + 1, LONGEST - EVEN_EACH, 0]
    return {"lengths": lengths.astype(np.int32)} | _plans()


def _fixed(arrays: Arrays) -> dict[str, Wanted]:
    """A length that is none stays none with the step's rows."""
    wholes = []
    for b, length in enumerate(arrays["lengths"].tolist()):
        tokens = length + EVEN_EACH if length >= 0 else MAX
        wholes.append(_whole(FIXED, b, (b * EVEN_EACH, EVEN_EACH, CLAIMED), tokens, MAX - 1))
    return _told(FIXED, wholes, EVEN_BATCH * EVEN_EACH)


# Their pieces ------------------------------------------------------------------------------------------------------------

REQUESTS, STEP = 100, 300


def _lists() -> Array:
    """Offsets that are right, begin late, decrease, pass the rows, are none, or give a request too many rows."""
    rng = np.random.default_rng(282)
    found = np.stack([np.cumsum(rng.integers(0, 6, REQUESTS + 1)) for _ in range(8)]).astype(np.int64)
    found[:4] -= found[:4, :1]
    found[2, 50] = found[2, 40]
    found[3, 20:] += 200
    found[4, 70] = -1
    found[5, 63:65] = [2**32 + 7, 0]
    found[6, 10:] += 37
    found[7] = rng.integers(0, STEP, REQUESTS + 1)
    return np.where((found > STEP) & (np.arange(8)[:, None] < 2), STEP, found)


def _claims_inputs() -> dict[str, Array]:
    each = (8, REQUESTS)
    return {
        "offsets": _lists(),
        "claims": np.zeros((*each, 4), np.uint32),
        "largest": np.zeros(each, np.uint32),
        "each": np.zeros((*each, 2), np.uint32),
    }


def _claimed(arrays: Arrays) -> dict[str, Wanted]:
    claims, largest, even = [], [], []
    for n, given in enumerate(arrays["offsets"].tolist()):
        own = [x if 0 <= x < MAX else MAX for x in given]
        claims.append([[b, *claim] for b, claim in enumerate(_claims(own, STEP, BALANCED.most_rows))])
        rounds = [
            max(own[: min(base + BALANCED.threads, REQUESTS) + 1]) for base in range(0, REQUESTS, BALANCED.threads)
        ]
        largest.append([rounds[b // BALANCED.threads] for b in range(REQUESTS)])
        rows = (STEP + 1000 * n) // REQUESTS
        kind = CLAIMED if rows <= BALANCED.most_rows else FAULTY
        even.append([[b * rows << 8 | rows, kind] for b in range(REQUESTS)])
    found = {"claims": claims, "largest": largest, "each": even}
    return {name: exact(np.array(x, np.uint32)) for name, x in found.items()}


WHOLE: Final = (3, 7, 101, 290, 17, 290, 0, 1, 0)


def _numbers_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(283)
    numbers = (2.0 ** rng.uniform(0, 31, 128)).astype(np.uint32)
    numbers[:20], numbers[64:80], numbers[20] = np.arange(20), 0, 2**32 - 1
    return {
        "in": numbers,
        "before": np.zeros((64, 4), np.uint32),
        "buckets": np.zeros(128, np.uint32),
        "tiles": np.zeros((64, 12), np.uint32),
        "keys": np.zeros(64, np.uint32),
    }


def _numbers(arrays: Arrays) -> dict[str, Wanted]:
    numbers = arrays["in"].tolist()
    before = [[max(5, *numbers[:i], 0), max(5, *numbers[:64])] for i in range(64)]
    second = [[max(before[0][1], *numbers[64 : 64 + i], 0), max(5, *numbers)] for i in range(64)]
    tiles = [_tile(BALANCED, [*WHOLE, LENGTH if i % 8 == 7 else 0, 0, 0], i % 19) for i in range(64)]
    found = {
        "before": [[*a, *b] for a, b in zip(before, second, strict=True)],
        "buckets": [*map(_bucket, numbers[:64]), *(_least(4 * i) for i in range(64))],
        "tiles": [chunk for chunk, _ in tiles],
        "keys": [keys for _, keys in tiles],
    }
    return {name: exact(np.array(x, np.uint32)) for name, x in found.items()}


# Where entries stand in the list ----------------------------------------------------------------------------------------

BLOCKS: Final = 7


def _counts() -> Array:
    """Entries of two kinds: of costs that are far apart, of few buckets, many of one bucket."""
    rng, found = np.random.default_rng(284), np.zeros((2, 256), np.uint32)
    found[0, 180:256] = rng.integers(0, 9, 76)
    found[1, [190, 211, 212, 250]] = [1, 40, 3, 170]
    return found


def _cost(counts: Array) -> int:
    return sum(_least(bucket) * int(n) for kind in counts for bucket, n in enumerate(kind))


def _order_inputs() -> dict[str, Array]:
    counts = _counts()
    count = int(counts.sum())
    return {
        "counts": counts,
        "places": np.zeros(count, np.uint32),
        "times": np.zeros(count, np.uint32),
        "others": np.zeros(count, np.uint32),
    }


def _keys(counts: Array, blocks: np.float32) -> tuple[list[tuple[np.float32, int, int]], list[list[np.float32]]]:
    """(time, kind, number of its kind) of each entry, and the times of each kind by themselves.

    Each kind is sorted by cost, the longest first. An entry begins when those before it end, if each kind had a part of the
    blocks as large as its cost.
    """
    end = np.float32(0.85) * (np.float32(_cost(counts)) / blocks)
    times: list[list[np.float32]] = []
    for kind in counts:
        costs = [_least(bucket) for bucket, n in enumerate(kind) for _ in range(n)]
        before = accumulate(costs, initial=0)
        times.append(
            [np.float32(b) * max(np.float32(0), end - np.float32(c)) for b, c in zip(before, costs, strict=False)]
        )
    all_of = [np.float32(sum(_least(bucket) * int(n) for bucket, n in enumerate(kind))) for kind in counts]
    return [(t * all_of[1 - kind], kind, i) for kind in (0, 1) for i, t in enumerate(times[kind])], times


def _order(arrays: Arrays) -> dict[str, Wanted]:
    """Entries of both kinds by when they begin."""
    keys, times = _keys(arrays["counts"], np.float32(BLOCKS))
    place = {entry[1:]: n for n, entry in enumerate(sorted(keys))}
    others = [sum(k < key for k, kind, _ in keys if kind != own) for key, own, _ in keys]
    return {
        "places": exact(np.array([place[key[1:]] for key in keys], np.uint32)),
        "times": exact(np.array(times[0] + times[1], np.float32).view(np.uint32)),
        "others": exact(np.array(others, np.uint32)),
    }


# A whole list ------------------------------------------------------------------------------------------------------------

LISTED: Final = replace(BALANCED, threads=256, max_slots=30, share=0)
HEADS, TOKEN_BYTES, TOGETHER, SM_PARTS, MOST_CHUNKS = 4, 64, 100_000, 43, 12
# (rows, tokens) of requests. No two tiles have the same bucket, so that the order is one; the first row is no request's.
STEP_OF: Final = ((0, 50), (8, 305), (2, 21), (3, 85), (7, 134), (3, 6), (4, 278), (1, 41), (1, 294), (1, 81))


def _listed_inputs() -> dict[str, Array]:
    rows = [n for n, _ in STEP_OF]
    return {
        "lengths": np.array([n for _, n in STEP_OF], np.int32),
        "offsets": np.array([*accumulate(rows, initial=1)], np.int32),
        "sums": np.zeros(7, np.uint32),
        "counts": np.zeros((2, 256), np.uint32),
        "chunks": np.zeros((MOST_CHUNKS, 12), np.uint32),
    }


def _listed(arrays: Arrays) -> dict[str, Wanted]:
    """The list has as many entries as the plan has room for."""
    offsets, lengths = arrays["offsets"].tolist(), arrays["lengths"].tolist()
    claims = _claims(offsets, offsets[-1], LISTED.most_rows)
    wholes = [_whole(LISTED, b, claim, lengths[b], MAX - 1) for b, claim in enumerate(claims) if claim[1] > 0]
    tiles = [_tile(LISTED, own, n) for own in wholes for n in range(-(-own[2] * LISTED.group // LISTED.cols))]
    cost = sum(
        (keys + LISTED.overhead) * (1 if chunk[2] * LISTED.group - chunk[11] <= LISTED.narrow else 2)
        for chunk, keys in tiles
    )
    several = [w for w in wholes if w[2] * LISTED.group > LISTED.cols]
    tokens, stamp = sum(w[3] for w in several), sum(_stamp_of(chunk) for chunk, _ in tiles) % 2**32
    heads = HEADS
    while heads % 2 == 0 and tokens * TOKEN_BYTES * heads > TOGETHER:
        heads //= 2
    parts = max(1, SM_PARTS // HEADS)
    split = replace(LISTED, share=-(-cost // parts))
    counts, entries = np.zeros((2, 256), np.uint32), list[tuple[int, int, list[int]]]()
    for (chunk, _), (kind, count, _, slot, bucket, *cuts) in zip(tiles, _cut(split, tiles)[0], strict=True):
        alone = kind >> 31
        counts[alone, bucket] += count
        for i, (begin, end) in enumerate(pairwise(cuts[: count + 1])):
            entries.append((alone, bucket, [*chunk[:4], begin, end, i, count, slot, *chunk[9:]]))
    assert len({x[:2] for x in entries}) == len(tiles) < len(entries), "two tiles have a bucket, or none is cut"
    entries.sort(key=lambda x: (x[0], x[1], x[2][6]))
    keys, _ = _keys(counts, np.float32(SM_PARTS) / np.float32(heads))
    order = sorted(range(len(keys)), key=lambda i: keys[i])
    listed = np.array([entries[i][2] for i in order], np.uint32)
    listed[:, 10] = [_stamp_at(stamp, i) for i in range(len(listed))]
    assert len(listed) > MOST_CHUNKS
    sums = [offsets[0], offsets[-1], cost, tokens, stamp, split.share, heads]
    found = {"sums": np.array(sums), "counts": counts, "chunks": listed[:MOST_CHUNKS]}
    return {name: exact(x.astype(np.uint32)) for name, x in found.items()}


def probes() -> list[Probe]:
    """All of this module."""
    balanced = [u32(x) for x in (BATCH, ROWS, BALANCED.share, BALANCED.max_slots)]
    fixed = [u32(x) for x in (EVEN_BATCH, EVEN_ROWS, FIXED.share, FIXED.max_slots)]
    claims = [u32(REQUESTS), u32(STEP)]
    listed = [u32(x) for x in (len(STEP_OF), 1 + sum(n for n, _ in STEP_OF), SM_PARTS, MOST_CHUNKS)]
    return [
        Probe("library_plan_rows_balanced", UNIT, "rows_balanced", _balanced_inputs, _balanced, 64, tail=balanced),
        Probe("library_plan_rows_fixed", UNIT, "rows_fixed", _fixed_inputs, _fixed, 32, tail=fixed),
        Probe("library_plan_rows_claims", UNIT, "rows_claims", _claims_inputs, _claimed, 64, (8, 1, 1), tail=claims),
        Probe("library_plan_rows_numbers", UNIT, "rows_numbers", _numbers_inputs, _numbers, 64),
        Probe(
            "library_plan_rows_order",
            UNIT,
            "rows_order",
            _order_inputs,
            _order,
            256,
            tail=[u32(_cost(_counts())), u32(BLOCKS)],
        ),
        Probe("library_plan_rows_listed", UNIT, "rows_listed", _listed_inputs, _listed, 256, tail=listed),
    ]
