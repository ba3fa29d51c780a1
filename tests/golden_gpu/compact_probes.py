"""Used pages that become the first ones, and page ids that operations rewrite (kernels/compact.cu)."""

from __future__ import annotations

from typing import Final

import numpy as np

from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe

UNIT: Final = "compact"
THREADS, COLUMNS, TOKENS, WINDOW, STRIDE, TO_STRIDE = 64, 12, 8, 40, 13, 14
IDS, NUM_PAGES, FREE, CANARY = 60, 90, -1, 99
PAGE_ID, PAIR, MAX = 1, 8, 2**32 - 1


def _word(faults: list[tuple[int, int, int]]) -> int:
    """The error word of (position, request, code): it keeps the smallest."""
    if not faults:
        return 0
    position, request, code = min(faults)
    return 2**64 - 1 - (position << 32 | request << 8 | code)


def _held(length: int) -> tuple[int, int, int, bool]:
    """Tokens of a request, the pages of those in the window, and whether its list has a place for them."""
    tokens = length if length >= 0 else MAX
    first = max(tokens - WINDOW, 0)
    return tokens, first // TOKENS, -(-tokens // TOKENS), tokens <= COLUMNS * TOKENS


# Values of a list ---------------------------------------------------------------------------------------------------

FILLED: Final = ((0, 200), (3, 4), (5, 5), (7, 136), (60, 199), (9, 2))


def _all_inputs() -> dict[str, Array]:
    return {
        "ranges": np.array(FILLED, np.uint32),
        "list": np.full((len(FILLED), 200), CANARY, np.int64),
    }


def _all(arrays: Arrays) -> dict[str, Wanted]:
    found = arrays["list"].copy()
    for own, (first, end) in zip(found, FILLED, strict=True):
        own[first:end] = -5
    return {"list": exact(found)}


# Pages that are used ------------------------------------------------------------------------------------------------

LENGTHS: Final = (49, 0, 96, 0)  # of the last one not the tokens count, but pages that the kernel names
FAR: Final = 2**29  # the page of token 2^32


def _marks_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(321)
    ids = rng.integers(0, 40, (4, STRIDE))
    ids[0, 0] = 41  # before the window
    ids[1, 0] = 42  # of a request without tokens
    ids[2, [7, 9, 11]] = [50, 60, -1]  # of two pages outside the pool; past the ids; none
    ids[3, [(FAR + 2) % COLUMNS, (FAR + 3) % COLUMNS, (FAR + 7) % COLUMNS]] = [44, 2**31 - 1, 43]
    kept = np.full(80, -1, np.int64)
    kept[[0, 1, 33, 40, 63, 64, 69, 70]] = [52, 47, 59, 2**32 + 3, 60, -9, 45, 46]
    return {
        "lengths": np.array(LENGTHS, np.int32),
        "list": ids.astype(np.int32),
        "kept": kept,
        "new_ids": np.zeros((2, 64), np.int32),
        "errors": np.zeros((2, 6), np.uint64),
    }


def _marks(arrays: Arrays) -> dict[str, Wanted]:
    new_ids, errors = arrays["new_ids"].copy(), arrays["errors"].copy()
    for n, pages in enumerate((1, 2)):  # of an id

        def mark(number: int, n: int = n, pages: int = pages) -> bool:
            if not (0 <= number < IDS and number * pages < NUM_PAGES):
                return False
            new_ids[n, number] = 1
            return True

        for b, length in enumerate(LENGTHS):
            begin, end = (FAR, FAR + 7) if b == 3 else _held(length)[1:3]
            row = arrays["list"][b].tolist()
            bad = [i for i in range(begin, end) if not mark(row[i % COLUMNS])]
            errors[n, b] = _word([(min(i * TOKENS, MAX), b, PAGE_ID) for i in bad])
        kept = arrays["kept"].tolist()[:70]
        errors[n, 4] = _word([(i, i, PAIR) for i, number in enumerate(kept) if number != -1 and not mark(number)])
    return {"new_ids": exact(new_ids), "errors": exact(errors)}


# Ranks --------------------------------------------------------------------------------------------------------------

RANGES: Final = ((0, 300), (7, 7), (5, 261), (299, 300), (0, 256), (31, 290))


def _marked(count: int, seed: int) -> Array:
    """Ids of a pool of 300, of which about every third is used; 20 more are no ids of it, and look used."""
    found = (np.random.default_rng(seed).integers(0, 3, (count, 320)) == 0).astype(np.int32)
    found[:, 300:] = 1
    return found


def _walk_inputs() -> dict[str, Array]:
    marked = _marked(len(RANGES), 322)
    return {
        "ranges": np.array(RANGES, np.uint32),
        "used_ids": marked,
        "free_ids": marked[::-1].copy(),
        "counts": np.full((len(RANGES), THREADS), CANARY, np.uint32),
        **{n: np.full((len(RANGES), 320), CANARY, np.uint32) for n in ("used_ranks", "free_ranks")},
    }


def _walk(arrays: Arrays) -> dict[str, Wanted]:
    after = {n: arrays[n].copy() for n in ("used_ids", "counts", "used_ranks", "free_ranks")}
    for n, (first, end) in enumerate(RANGES):
        for name, of, kind in (("used_ranks", "used_ids", 1), ("free_ranks", "free_ids", 0)):
            used = arrays[of][n, first:end]
            counted = (used == kind).astype(np.uint32)
            after[name][n, first:end] = 2 * (np.cumsum(counted) - counted) + used
        after["counts"][n] = arrays["used_ids"][n, first:end].sum()
        after["used_ids"][n, first:end] = -3
    return {name: exact(array) for name, array in after.items()}


# Moves --------------------------------------------------------------------------------------------------------------

MOST: Final = (150, 10, 150, 150, 150, 0)  # moves of a plan


def _moves_inputs() -> dict[str, Array]:
    marked = _marked(len(MOST), 323)
    marked[2, :300], marked[3, :300], marked[4, :300] = 1, 0, np.arange(300) >= 200
    used = marked[:, :300].sum(axis=1)
    counts = [min(int(own[u:300].sum()), most) for own, u, most in zip(marked, used, MOST, strict=True)]
    return {
        "plans": np.stack([used, np.array(counts)], axis=1).astype(np.uint32),
        "new_ids": marked,
        "moves": np.full((len(MOST), 160, 2), CANARY, np.int64),
    }


def _moves(arrays: Arrays) -> dict[str, Wanted]:
    """The r-th used page from `used` on goes to the r-th free one below; a page that does not move keeps its id."""
    new_ids, moves = arrays["new_ids"].copy(), arrays["moves"].copy()
    for n, (used, count) in enumerate(arrays["plans"].tolist()):
        own = arrays["new_ids"][n, :300] != 0
        new_ids[n, :300] = np.where(own, np.arange(300), FREE)
        targets = np.flatnonzero(~own[:used])[:count]
        sources = np.flatnonzero(own[used:])[:count] + used
        moves[n, :count] = np.stack([sources, targets], axis=1)
        new_ids[n, sources] = targets
    return {"new_ids": exact(new_ids), "moves": exact(moves)}


# Page ids of requests -----------------------------------------------------------------------------------------------


def _held_inputs() -> dict[str, Array]:
    lengths = [0, 1, 7, 8, 9, 39, 40, 41, 47, 48, 49, 95, 96, 97, 104, -1, -7, 2**31 - 1, *range(50, 64)]
    return {"lengths": np.array(lengths, np.int32), "out": np.full((2, 32, 4), CANARY, np.uint32)}


def _held_wanted(arrays: Arrays) -> dict[str, Wanted]:
    rows = [_held(length) for length in arrays["lengths"].tolist()]
    any_place = [(tokens, begin, end, tokens != MAX) for tokens, begin, end, _ in rows]
    return {"out": exact(np.array([rows, any_place], np.uint32))}


ENTRIES: Final = ((0, 12), (3, 4), (5, 5), (2, 11))


def _entries_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(324)
    table = rng.integers(0, IDS, (len(ENTRIES), STRIDE))
    table[:, 2:5] = [[60, -1, 2**31 - 1], [61, -1, 5], [62, 7, 8], [62, -2, 9]]
    new_ids = rng.permutation(64)
    new_ids[rng.integers(0, IDS, 20)] = FREE
    new_ids[5:10] = [FREE, 3, 2, 1, 0]
    return {
        "ranges": np.array(ENTRIES, np.uint32),
        "list": table.astype(np.int32),
        "new_ids": new_ids.astype(np.int32),
        "to": np.full((len(ENTRIES), TO_STRIDE), CANARY, np.int32),
    }


def _entries(arrays: Arrays) -> dict[str, Wanted]:
    """Where a page moves, its id there; ids past the pool's, and free ones, stay."""
    to = arrays["to"].copy()
    for b, (begin, end) in enumerate(ENTRIES):
        for i in range(begin, end):
            number = int(arrays["list"][b, i])
            moved = int(arrays["new_ids"][number]) if 0 <= number < IDS else FREE
            to[b, i] = number if moved == FREE else moved
    return {"to": exact(to)}


# A request's parent, its pages [begin, end), and the first one of them that is new.
CHILDREN: Final = ((2, 0, 12, 5), (0, 0, 3, 3), (2, 4, 9, 4), (5, 6, 6, 6), (1, 2, 11, 12), (0, 3, 7, 0))


def _children_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(325)
    parents = np.concatenate([[own[0] for own in CHILDREN], rng.integers(20, 70, 64)])
    parents[[8, 40, 50]] = [-1, 2, -1]
    return {
        "parents": parents.astype(np.int32),
        "ranges": np.array([own[1:] for own in CHILDREN], np.uint32),
        "list": rng.integers(0, 1000, (6, STRIDE)).astype(np.int32),
        "fresh": rng.integers(1000, 2000, (6, COLUMNS)).astype(np.int32),
        "earlier": np.full((70, 32), CANARY, np.uint32),
        "to": np.full((6, TO_STRIDE), CANARY, np.int32),
    }


def _children(arrays: Arrays) -> dict[str, Wanted]:
    """A lane looks at every 32nd of the requests before."""
    parents, earlier, to = arrays["parents"], arrays["earlier"].copy(), arrays["to"].copy()
    for b, parent in enumerate(parents):
        earlier[b] = [(parents[lane:b:32] == parent).any() for lane in range(32)]
    for b, (parent, begin, end, copied) in enumerate(CHILDREN):
        for i in range(begin, end):
            to[b, i] = arrays["list"][parent, i] if i < copied else arrays["fresh"][b, i]
    return {"earlier": exact(earlier), "to": exact(to)}


def probes() -> list[Probe]:
    """All of this module."""
    return [
        Probe("library_compact_all", UNIT, "compact_all", _all_inputs, _all, THREADS, (len(FILLED), 1, 1)),
        Probe("library_compact_marks", UNIT, "compact_marks", _marks_inputs, _marks, 128, (2, 1, 1)),
        Probe("library_compact_walk", UNIT, "compact_walk", _walk_inputs, _walk, THREADS, (len(RANGES), 1, 1)),
        Probe("library_compact_moves", UNIT, "compact_moves", _moves_inputs, _moves, THREADS, (len(MOST), 1, 1)),
        Probe("library_compact_held", UNIT, "compact_held", _held_inputs, _held_wanted, 32, (2, 1, 1)),
        Probe("library_compact_entries", UNIT, "compact_entries", _entries_inputs, _entries, 32, (len(ENTRIES), 1, 1)),
        Probe("library_compact_children", UNIT, "compact_children", _children_inputs, _children, 32, (70, 1, 1)),
    ]
