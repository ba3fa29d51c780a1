"""Whose rows are whose, chunks of requests, and what of a workspace is a plan's (kernels/split_kv.cu)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe, u32

UNIT: Final = "split_kv"
MAX: Final = 2**32 - 1
LENGTH, OFFSETS, PLAN = 3, 5, 10


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
    """A request's chunk; `window` tokens are seen by a row and, where there is one, all that come after; of `ring`."""
    length, kind, most, b = given
    row, rows = 3 * b, b % 4 + 1
    tokens = MAX if length < 0 else length + rows * before
    chunk = [b, row, rows, tokens, 0, 0, 0, 1, 0, 0, 0, 0]
    first = max(0, tokens - ring)
    if kind != CLAIMED:
        chunk[3], chunk[9] = row, OFFSETS
    elif tokens == MAX or most < 0 or tokens - first > 40:
        chunk[9] = LENGTH
    else:
        end = min(tokens, most)
        begin = max(first, tokens - rows - window + 1 if window else 0)
        seen = [
            token
            for token in range(first, end)
            for at in range(max(tokens - rows, 0), tokens)
            if (at - window < token if window else token <= at)
        ]
        chunk[4:6] = [min(begin, end), end]
        assert not seen or chunk[4:6] == [min(seen), max(seen) + 1]
    return chunk


def _wholes(arrays: Arrays) -> dict[str, Wanted]:
    own = list(zip(*(arrays[n].tolist() for n in ("lengths", "kinds", "most")), range(32), strict=True))
    ways = {"after": (False, 0, MAX), "before": (True, 0, MAX), "window": (False, 5, MAX), "ring": (True, 5, 6)}
    return {name: exact(np.array([_whole(given, *way) for given in own], np.uint32)) for name, way in ways.items()}


def _plans_inputs() -> dict[str, Array]:
    sizes = np.random.default_rng(187).integers(1, 5000, (32, 5)).astype(np.uint32)
    sizes[0], sizes[1], sizes[2] = 1, (2**16, 2**31 - 1, 2**31 - 1, 2**31 - 1, 64), (3, 16, 4, 4, 1)
    return {"workspace": np.zeros(64, np.uint8), "sizes": sizes, "out": np.zeros((32, 6), np.uint64)}


def _plans(arrays: Arrays) -> dict[str, Wanted]:
    """A header of 64 bytes, 4 an SM sm_part and one more, 1 a row, 4 a counter, 48 a chunk; each from a multiple of 16 on."""
    out = []
    for sm_parts, rows, chunks, slots, counters in arrays["sizes"].tolist():
        places = [0]
        for size in (64, 4 * (sm_parts + 1), rows, 4 * slots * counters, 48 * chunks):
            places.append(places[-1] + -(-size // 16) * 16)
        out.append(places)
    return {"out": exact(np.array(out, np.uint64))}


# What of a workspace is a plan's ---------------------------------------------------------------------------------------


def _tokens_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(193)
    lengths, rows = rng.integers(0, 2**31, 32), rng.integers(1, 2**32, 32)
    lengths[:8] = [0, 0, 7, 7, 2**31 - 1, 2**31 - 1, -1, 1]
    rows[:8] = [1, MAX, 1, 4, 2**31, 2**31 + 1, 1, MAX - 1]
    out = np.zeros(32, np.uint32)
    return {
        "lengths": lengths.astype(np.int32),
        "rows": rows.astype(np.uint32),
        "after": out,
        "before": out.copy(),
    }


def _tokens(arrays: Arrays) -> dict[str, Wanted]:
    lengths, rows = arrays["lengths"].astype(np.int64), arrays["rows"].astype(np.int64)
    lengths = np.where(lengths < 0, MAX, lengths)
    return {
        "after": exact(lengths.astype(np.uint32)),
        "before": exact(np.minimum(lengths + rows, MAX).astype(np.uint32)),
    }


MAGIC: Final = int.from_bytes(b"kpln", "little")
DIGEST: Final = 0x0123456789ABCDEF
# A call as its words: the digest's halves, requests, rows, SM parts, the most rows, chunks and slots.
CALL: Final = (DIGEST & MAX, DIGEST >> 32, 5, 11, 7, 12, 40, 30)
# A header as its words. Whose they are: a call's, but for the count of chunks and what a call does not know.
HEADER: Final = (MAGIC, 5, DIGEST & MAX, DIGEST >> 32, 11, 7, 12, 40, 30, 39, 1, 0, 0xBADC0DE, 0, 0, 0)
CHUNKS_WORD, FREE_WORDS = 9, (10, 11, 12, 13, 14, 15)


def _changed(words: tuple[int, ...], at: int, to: int) -> tuple[int, ...]:
    return (*words[:at], to, *words[at + 1 :])


def _header_cases() -> Iterator[tuple[tuple[int, ...], tuple[int, ...], bool]]:
    """A header, a call, and whether the one is for the other."""
    yield HEADER, CALL, True
    for at, word in enumerate(HEADER):
        for bit in (0, 31):
            if at != CHUNKS_WORD:
                yield _changed(HEADER, at, word ^ 1 << bit), CALL, at in FREE_WORDS
    for at, word in enumerate(CALL):
        for other in (0, word + 1, word ^ 1 << 31):
            yield HEADER, _changed(CALL, at, other), False
    for count in (0, 1, 39, 40, 41, 2**31, MAX):
        yield _changed(HEADER, CHUNKS_WORD, count), CALL, count <= 40
    # What a freshly allocated workspace may hold.
    for word in (0, MAX, MAGIC):
        yield (word,) * 16, CALL, False
        yield (word,) * 16, (word,) * 8, word == MAGIC
    # A larger call for a smaller workspace and the other way round.
    yield HEADER, (*CALL[:4], 8, 13, 41, 31), False
    yield (*HEADER[:5], 8, 13, 41, 31, *HEADER[9:]), (*CALL[:4], 8, 13, 41, 31), True


def _headers_inputs() -> dict[str, Array]:
    headers, calls, _ = zip(*_header_cases(), strict=True)
    found = {"headers": np.array(headers, np.uint32), "calls": np.array(calls, np.uint32)}
    return found | {name: np.zeros(len(headers), np.uint32) for name in ("out", "sums", "hashes")}


def _headers(_: Arrays) -> dict[str, Wanted]:
    headers, calls, right = zip(*_header_cases(), strict=True)
    found = {"out": right, "sums": map(sum_of, headers), "hashes": map(_hash_of, calls)}
    return {name: exact(np.array(list(numbers), np.uint32)) for name, numbers in found.items()}


def sum_of(header: Sequence[int]) -> int:
    """PlanHeader::sum: of the words num_chunks, wrong_total, stamp, first_row, end_row and heads_together."""
    return _hash_of([header[9], *header[11:16]])


PLAN_STAMP: Final = 0xFEEDF00D


def _stamp_of(words: list[int]) -> int:
    """The hash of the words b, row, rows, tokens, begin, end and fault."""
    return _hash_of(words[:6] + words[9:10])


def _hash_of(words: Sequence[int]) -> int:
    """A multiplication by the golden ratio a word."""
    found = 0
    for word in words:
        found = (found ^ word ^ (found >> 15)) * 0x9E3779B1 % 2**32
    return found


def _stamp_at(stamp: int, i: int) -> int:
    return (stamp + (i + 1) * 0x85EBCA6B) % 2**32


def _stamps_inputs() -> dict[str, Array]:
    chunks = np.random.default_rng(194).integers(0, 2**32, (32, 12)).astype(np.uint32)
    chunks[0] = 0
    chunks[1:13] = chunks[13]
    chunks[range(1, 13), range(12)] ^= 1  # a word each
    chunks[14:16, :10] = MAX
    places = np.arange(32, dtype=np.uint32)
    places[30:] = MAX, 2**31
    return {"chunks": chunks, "places": places, "of": np.zeros(32, np.uint32), "at": np.zeros(32, np.uint32)}


def _stamps(arrays: Arrays) -> dict[str, Wanted]:
    of = [_stamp_of(words) for words in arrays["chunks"].tolist()]
    assert [of[n] == of[13] for n in range(1, 13)] == [n in (6, 7, 8, 10, 11) for n in range(12)], (
        "index, num_chunks, slot"
    )
    at = [_stamp_at(stamp, i) for stamp, i in zip(of, arrays["places"].tolist(), strict=True)]
    assert len(set(at[13:])) == 19
    return {name: exact(np.array(own, np.uint32)) for name, own in (("of", of), ("at", at))}


SM_PARTS, PLANNED = 3, 20
# Where the SM parts of a plan of 20 chunks begin, and what the stamps of these lie off by.
STARTS: Final = (
    ((0, 5, 5, 20), (0, 0, 0, 0)),
    ((0, 0, 0, 0), (0, 0, 0, 0)),
    ((20, 20, 20, 20), (0, 0, 0, 0)),
    ((0, 7, 6, 20), (0, 0, 0, 0)),  # decreasing
    ((0, 5, 21, 20), (0, 0, 0, 0)),  # past the count
    ((0, 20, 21, 22), (0, 0, 0, 0)),
    ((0, MAX, MAX, MAX), (0, 0, 0, 0)),
    ((0, 5, 12, 20), (1, 0, 0, 0)),  # another plan's
    ((0, 5, 12, 20), (0, 0, 77, 0)),
    ((0, 5, 12, 20), (0x40000000,) * 4),
    ((0, 5, 12, 20), (MAX, MAX, MAX, MAX)),  # each one less than it was
)


def _ranges_inputs() -> dict[str, Array]:
    written = [
        [_stamp_at(PLAN_STAMP + off, sm_part) + start for sm_part, (start, off) in enumerate(zip(*case, strict=True))]
        for case in STARTS
    ]
    plain = [list(case[0]) for case in STARTS[:2]]  # without stamps
    moved = [[written[0][sm_part ^ 1] for sm_part in range(4)], written[0][1:] + written[0][:1]]
    lists = np.array([*written, *plain, *moved, [0] * 4, [MAX] * 4], np.uint64).astype(np.uint32)
    return {"starts": lists, "out": np.full((len(lists), SM_PARTS, 3), 77, np.uint32)}


def _ranges(arrays: Arrays) -> dict[str, Wanted]:
    """Whether a range is this plan's, and where it begins and ends if so."""
    out = np.zeros((len(arrays["starts"]), SM_PARTS, 3), np.uint32)
    for own, starts in zip(out, arrays["starts"].tolist(), strict=True):
        # What was planned there, where anything was that a plan of so many chunks can have.
        known = [{_stamp_at(PLAN_STAMP, sm_part) + n & MAX: n for n in range(PLANNED + 1)} for sm_part in range(4)]
        found = [ways.get(start) for ways, start in zip(known, starts, strict=True)]
        for sm_part, (begin, end) in enumerate(pairwise(found)):
            if begin is not None and end is not None and begin <= end:
                own[sm_part] = 1, begin, end
    assert out[0].tolist() == [[1, 0, 5], [1, 5, 5], [1, 5, 20]] and not out[len(STARTS) :, :, 0].any()
    return {"out": exact(out)}


CHUNK_REQUESTS, CHUNK_ROWS, CHUNK_SLOTS, MOST_ROWS = 6, 18, 30, 4
CHUNK: Final = (3, 9, 4, 700, 128, 256, 2, 5, 11, 0, 0, 0xC0FFEE)  # as its words; the stamp is of its place
# A change of a chunk by its words, and whether it can still be of a plan for this call.
CHUNK_CASES: Final[tuple[tuple[dict[int, int], bool], ...]] = (
    ({}, True),
    ({0: 5}, True),
    ({0: 6}, False),  # the request
    ({0: MAX}, False),
    ({1: 14}, True),
    ({1: 15}, False),  # rows past the last one
    ({1: 17, 2: 1}, True),
    ({1: 18, 2: 1}, False),  # the row
    ({1: MAX, 2: 1}, False),
    ({1: MAX - 1, 2: 4}, False),
    ({2: 1}, True),
    ({2: 0}, False),  # its rows
    ({2: 5}, False),
    ({2: MAX}, False),
    ({3: 256}, True),
    ({3: 255}, False),  # the tokens
    ({4: 256}, True),
    ({4: 257}, False),  # the first token
    ({4: MAX, 5: MAX}, False),
    ({4: 0, 5: 0, 3: 0}, True),
    ({5: 700}, True),
    ({5: 701}, False),  # the token after the last one
    ({5: 127}, False),
    ({3: MAX, 5: MAX}, True),
    ({6: 4}, True),
    ({6: 5}, False),  # which chunk
    ({6: MAX}, False),
    ({6: 0, 7: 0}, False),  # how many chunks
    ({7: 19}, True),
    ({7: 20}, False),
    ({7: MAX}, False),
    ({8: 25}, True),
    ({8: 26}, False),  # the first slot
    ({8: 30}, False),
    ({8: MAX}, False),
    ({8: MAX - 1, 7: 4}, False),
    ({6: 0, 7: 1, 8: MAX}, True),  # one chunk has no slot
    ({9: 5, 3: 9, 4: 0, 5: 0, 6: 0, 7: 1}, True),
    ({9: 6}, False),  # the fault
    ({9: PLAN}, False),
    ({9: MAX}, False),
    ({11: 0}, True),
)


def _chunks_inputs() -> dict[str, Array]:
    given = []
    for i, (change, _) in enumerate(CHUNK_CASES):
        words = _changed(CHUNK, 10, _stamp_at(PLAN_STAMP, i))
        for at, word in change.items():
            words = _changed(words, at, word)
        given.append(words)
    # Right ones with another plan's stamp, without one, from the place before, and what an empty workspace may hold.
    for stamp in (_stamp_at(PLAN_STAMP ^ 1, len(given)), PLAN_STAMP, 0):
        given.append(_changed(CHUNK, 10, stamp))
    given.append(_changed(CHUNK, 10, _stamp_at(PLAN_STAMP, len(given) - 1)))
    given += [(0,) * 12, (MAX,) * 12]
    chunks = np.array(given, np.uint32)
    return {"chunks": chunks, "out": np.full_like(chunks, 77)}


def _chunks(arrays: Arrays) -> dict[str, Wanted]:
    """The chunks, and in the place of what is not this plan's one without rows and tokens."""
    none = np.array([0, 0, 0, 0, 0, 0, 0, 1, 0, PLAN, 0, 0], np.uint32)
    right = [good for _, good in CHUNK_CASES]
    right += [False] * (len(arrays["chunks"]) - len(right))
    return {"out": exact(np.where(np.array(right)[:, None], arrays["chunks"], none))}


# The words of a workspace by what differs from a right plan's: whether it is planned, and the SM parts that have no range.
PART_STARTS: Final = (0, 5, 5, 12, 20, 33, 39, 39)
ROW_KINDS: Final = (0, 0, 1, 2, 0, 3, 0, 0, 1, 0, 2, 0)
PART_STAMP: Final = HEADER[12]
PART_CASES: Final[tuple[tuple[dict[int, int], bool, tuple[int, ...]], ...]] = (
    ({}, True, ()),
    ({10: 0}, True, ()),  # every row is a request's
    ({11: 1}, True, ()),  # the last row offset is wrong
    ({2: 0}, False, ()),  # planned for another call
    ({1: 6}, False, ()),
    ({19: 0}, True, (2, 3)),  # no start of this plan's
    ({16: _stamp_at(PART_STAMP, 0) + 6, 11: 1}, True, (0,)),  # it begins past its end
)


def _parts_inputs() -> dict[str, Array]:
    right = np.zeros(32, np.uint32)
    right[:16] = HEADER
    right[16:24] = [(_stamp_at(PART_STAMP, i) + start) % 2**32 for i, start in enumerate(PART_STARTS)]
    right[24:27] = np.array(ROW_KINDS, np.uint8).view(np.uint32)
    workspaces = np.tile(right, (len(PART_CASES), 1))
    for own, (change, _, _) in zip(workspaces, PART_CASES, strict=True):
        for at, word in change.items():
            own[at] = word % 2**32
    return {
        "workspaces": workspaces,
        "errors": np.zeros((len(PART_CASES), 7), np.uint64),
        "out": np.full((len(PART_CASES), 7, 16), 77, np.uint32),
    }


def _fault(code: int, request: int, position: int) -> int:
    return 2**64 - 1 - (position << 32 | request << 8 | code)


def _parts(arrays: Arrays) -> dict[str, Wanted]:
    """Rows' kinds, whether it is planned, whether rows are nobody's, the first chunk, the count of chunks, the stamp."""
    errors, out = np.zeros_like(arrays["errors"]), np.zeros_like(arrays["out"])
    for i, (change, planned, without) in enumerate(PART_CASES):
        for part, (begin, end) in enumerate(pairwise(PART_STARTS)):
            has = planned and part not in without and begin < end
            out[i, part, :11] = ROW_KINDS[:11] if planned else ORPHAN
            out[i, part, 11:13] = planned, not planned or change.get(10, 1)
            out[i, part, 13:] = begin if has else 0, end - begin if has else 0, PART_STAMP
            if not planned or part in without:
                errors[i, part] = _fault(PLAN, 0, 0)
            elif change.get(11, 0):
                errors[i, part] = _fault(OFFSETS, 4, 11)
    return {"errors": exact(errors), "out": exact(out)}


# Masks ----------------------------------------------------------------------------------------------------------------


def _masks_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(196)
    tokens = rng.integers(1, 20, 32)
    positions = (tokens * rng.random(32)).astype(np.int64)
    positions[:6], tokens[:6] = [3, 4, 5, 0, 2**31, 9], [4, 5, 6, 1, 2**31 + 1, 3]
    return {"in": np.stack([positions, tokens], axis=1).astype(np.uint32), "out": np.full((32, 12), 77, np.uint32)}


def _masks(arrays: Arrays) -> dict[str, Wanted]:
    """The first token that is seen, the one after the last, and whether rows before the first token see any."""
    out = []
    for position, tokens in arrays["in"].tolist():
        last = min(position + 1, tokens)
        out.append([0, last, 0, max(0, position - 4), last, 0, 0, tokens, 1, position // 6 * 6, last, 0])
    return {"out": exact(np.array(out, np.uint32))}


def probes() -> list[Probe]:
    """All of this module."""
    lists, headers = len(_claims_inputs()["counts"]), len(list(_header_cases()))
    ranges, chunks = (len(own()["out"]) for own in (_ranges_inputs, _chunks_inputs))
    whose = [u32(REQUESTS + 1), u32(ROWS)]
    planned = [u32(PLAN_STAMP), u32(PLANNED)]
    call = [u32(PLAN_STAMP), u32(CHUNK_REQUESTS), u32(CHUNK_ROWS), u32(CHUNK_SLOTS)]
    return [
        Probe("library_split_claims", UNIT, "split_claims", _claims_inputs, _claims, ROWS, (lists, 1, 1), tail=whose),
        Probe("library_split_wholes", UNIT, "split_wholes", _wholes_inputs, _wholes, 32),
        Probe("library_split_plans", UNIT, "split_plans", _plans_inputs, _plans, 32),
        Probe("library_split_tokens", UNIT, "split_tokens", _tokens_inputs, _tokens, 32),
        Probe("library_split_headers", UNIT, "split_headers", _headers_inputs, _headers, headers),
        Probe("library_split_stamps", UNIT, "split_stamps", _stamps_inputs, _stamps, 32),
        Probe(
            "library_split_ranges",
            UNIT,
            "split_ranges",
            _ranges_inputs,
            _ranges,
            SM_PARTS,
            (ranges, 1, 1),
            tail=planned,
        ),
        Probe("library_split_chunks", UNIT, "split_chunks", _chunks_inputs, _chunks, chunks, tail=call),
        Probe("library_split_parts", UNIT, "split_parts", _parts_inputs, _parts, 11, (7, len(PART_CASES), 1)),
        Probe("library_split_masks", UNIT, "split_masks", _masks_inputs, _masks, 32),
    ]
