"""Rows copied from and to tokens of a cache (kernels/copy_rows.cu), over the arrays of paged_probes."""

from __future__ import annotations

from typing import Final

import numpy as np

from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.oracle import floats
from tests.golden_gpu.paged_probes import BF16, DIMS, HEADS, PAGES, TOKENS, Paged, memory
from tests.golden_gpu.probe import Arrays, Probe, pattern

UNIT: Final = "copy_rows"
MAX: Final = 2**32 - 1
NONE, PAGE_ID, POSITION, LENGTH, SLOT, OFFSETS = 0, 1, 2, 3, 4, 5
BATCH, ROWS, ROW, SCALES, COLUMNS = 3, 24, HEADS * DIMS, 12, 6
STEP: Final = (0, 1, 3, 4)  # row offsets of the step that chunks are of
# Row offsets and starts of each block: good ones, tokens past the table, offsets that decrease, a last one past the rows.
BLOCKS: Final = (
    ((3, 9, 9, 20), (2, 0, 20)),
    ((0, 8, 14, 24), (44, 3, -1)),
    ((0, 9, 5, 20), (0, 0, 0)),
    ((2, 6, 12, 40), (9, 16, 40)),
)
NAN: Final = 0x7FFFFFFF
Slot = tuple[int, int, int, int]


class Requests:
    """The requests of a block, whose every fifth token is not stored, and the first error that it reports."""

    def __init__(self, arrays: Arrays, block: int) -> None:
        self.cache = Paged(arrays)
        self.offsets = [int(x) for x in arrays["offsets"].reshape(-1, 4)[block]]
        self.starts = [int(x) % 2**32 if x >= 0 else MAX for x in arrays["starts"].reshape(-1, 3)[block]]
        self.named = arrays["named"].astype(np.int64).reshape(-1, 2)
        self.reports: list[int] = []

    def report(self, fault: int, b: int, position: int) -> None:
        self.reports.append(position << 32 | b << 8 | fault)

    @property
    def word(self) -> int:
        return ~min(self.reports) % 2**64 if self.reports else 0

    def page(self, b: int, token: int) -> tuple[int, int]:
        """A page's number and its fault."""
        found, fault = self.cache.page(b, token)
        return (MAX, fault) if fault else (found, NONE)

    def whose(self, row: int) -> tuple[int, int, int, bool, bool]:
        """The request of a row, its rows, whether the row is padding, whether it is known whose it is."""
        o = self.offsets
        if row >= o[BATCH]:
            return 0, 0, 0, True, True
        low, high = 0, BATCH
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if o[middle] <= row else (low, middle)
        begin, end = o[low], o[low + 1]
        ordered = o[max(low - 1, 0)] <= begin <= end <= (o[low + 2] if low + 2 <= BATCH else end)
        return low, begin, end, low == 0 and row < begin <= end, ordered and begin <= row < end <= ROWS

    def token(self, row: int, starts: bool) -> Slot:
        b, begin, end, padding, valid = self.whose(row)
        if padding or not valid:
            if not padding:
                self.report(OFFSETS, b, row)
            return MAX, NONE, 0, 1
        start = self.starts[b] if starts else 0
        if start >= MAX - (end - begin):
            self.report(LENGTH, b, row - begin)
            return MAX, LENGTH, 0, 0
        token = start + row - begin
        page, fault = self.page(b, token) if token % 5 != 4 else (MAX, POSITION)
        if fault:
            self.report(fault, b, token)
        return page, fault, token % TOKENS, 0

    def target(self, row: int) -> Slot:
        b, begin, end, padding, valid = self.whose(row)
        if padding or not valid:
            if not padding:
                self.report(OFFSETS, b, row)
            return MAX, NONE, 0, 0
        start = self.starts[b]
        if start >= MAX - (end - begin):
            self.report(LENGTH, b, row - begin)
            return MAX, NONE, 0, 0
        token = start + row - begin
        if token % 5 == 4:
            if self.cache.lengths[b] == MAX or token >= self.cache.lengths[b]:
                self.report(POSITION, b, token)
            return MAX, NONE, 0, 0
        page, fault = self.page(b, token)
        if fault:
            self.report(fault, b, token)
        return page, fault, token % TOKENS, 0

    def name(self, row: int) -> Slot:
        wanted = int(self.named[row, row % 2])
        b, _, _, padding, valid = self.whose(row)
        if not padding and not valid and row % 2 == 0:
            self.report(OFFSETS, b, row)
        skip = padding or not valid
        if skip or wanted < 0:
            return MAX, NONE, 0, skip | (wanted < 0) << 1
        token = min(wanted, MAX)
        page, fault = self.page(b, token) if token != MAX and token % 5 != 4 else (MAX, POSITION)
        if fault:
            self.report(fault, b, token)
        return page, fault, token % TOKENS, 0

    def slot(self, row: int, block: int) -> Slot:
        """Of a list that begins elsewhere in every block."""
        number = int(self.named.reshape(-1)[row + block])
        if number == -1:
            return MAX, NONE, 0, 1
        page, token = divmod(number, TOKENS)
        if 0 <= page < PAGES:
            return page, NONE, token, 0
        self.report(SLOT, row, row)
        return MAX, PAGE_ID, token, 0

    def key(self, row: int) -> Slot:
        b, begin, end, padding, valid = self.whose(row)
        if padding or not valid:
            if not padding:
                self.report(OFFSETS, b, row)
            return MAX, NONE, 0, 1
        count, start = STEP[b + 1] - STEP[b], self.starts[b]
        if self.cache.lengths[b] >= MAX - count or start >= MAX - (end - begin):
            self.report(LENGTH, b, row - begin)
            return MAX, NONE, 0, 0
        tokens, token = self.cache.lengths[b] + count, start + row - begin
        if token >= tokens:
            if token < -(-tokens // 8) * 8:
                return MAX, NONE, 0, 2
            self.report(POSITION, b, token)
            return MAX, NONE, 0, 0
        page, fault = self.page(b, token)
        if fault:
            self.report(fault, b, token)
        return page, fault, token % TOKENS, 0


def _find_inputs() -> dict[str, Array]:
    named = np.random.default_rng(131).integers(-3, 50, (ROWS, 2), np.int64)
    named[5], named[7] = (2**32 - 1, 2**40), (2**33 + 1, 2**32 - 1)
    outs: dict[str, Array] = {
        n: np.zeros((len(BLOCKS), ROWS, 4), np.uint32) for n in ("tokens", "targets", "names", "keys", "placed")
    }
    return {
        "offsets": np.array([o for o, _ in BLOCKS], np.int32),
        "starts": np.array([s for _, s in BLOCKS], np.int32),
        "named": named,
        "step": np.array(STEP, np.int32),
        **memory(),
        **outs,
        "errors": np.zeros((len(BLOCKS), 6), np.uint64),
    }


def _find(arrays: Arrays) -> dict[str, Wanted]:
    found: dict[str, list[list[Slot]]] = {name: [] for name in ("tokens", "targets", "names", "keys", "placed")}
    words = []
    for block in range(len(BLOCKS)):
        ways = [Requests(arrays, block) for _ in range(6)]
        found["tokens"].append([ways[0].token(row, block != 3) for row in range(ROWS)])
        found["targets"].append([ways[1].target(row) for row in range(ROWS)])
        found["names"].append([ways[2].name(row) for row in range(ROWS)])
        found["keys"].append([ways[3].key(row) for row in range(ROWS)])
        found["placed"].append([ways[5].slot(row, block) for row in range(ROWS)])
        o = ways[4].offsets
        if o[BATCH] > ROWS or o[BATCH] < o[BATCH - 1]:
            ways[4].report(OFFSETS, BATCH - 1, ROWS)
        words.append([way.word for way in ways])
    outs = {name: exact(np.array(own, np.uint32)) for name, own in found.items()}
    return outs | {"errors": exact(np.array(words, np.uint64))}


# Begins, counts and starts of runs of each block: with gaps, one over the next one, not ascending, past the rows.
RUNS: Final = (
    ((1, 9, 12), (6, 3, 9), (2, 0, 20)),
    ((0, 8, 14), (9, 6, 10), (0, 0, 0)),
    ((3, 2, 14), (4, 4, -1), (0, 3, -1)),
    ((2, 6, 12), (4, 0, 40), (44, 16, 40)),
)


class RunRequests(Requests):
    """The same, whose rows are runs."""

    def __init__(self, arrays: Arrays, block: int) -> None:
        super().__init__(arrays | {"offsets": np.zeros(4 * len(RUNS), np.int32), "named": np.zeros(0, np.int64)}, block)
        at = slice(3 * block, 3 * block + 3)
        self.begins, counts = (
            [int(x) if x >= 0 else MAX for x in arrays[name].reshape(-1)[at]] for name in ("begins", "counts")
        )
        self.ends = [b + n for b, n in zip(self.begins, counts, strict=True)]

    def whose(self, row: int) -> tuple[int, int, int, bool, bool]:
        if row < self.begins[0]:
            return 0, 0, 0, True, True
        low, high = 0, BATCH
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.begins[middle] <= row else (low, middle)
        before = self.ends[low - 1] if low else 0
        after = min(self.begins[low + 1], ROWS) if low + 1 < BATCH else ROWS
        valid = before <= self.begins[low] and self.ends[low] <= after
        return low, self.begins[low], min(self.ends[low], MAX), valid and row >= self.ends[low], valid


def _run_inputs() -> dict[str, Array]:
    given = [np.array(own, np.int32).reshape(-1) for own in zip(*RUNS, strict=True)]
    found: dict[str, Array] = dict(zip(("begins", "counts", "starts"), given, strict=True)) | memory()
    outs = {name: np.zeros((len(RUNS), ROWS, 4), np.uint32) for name in ("tokens", "ranges")}
    return found | outs | {"errors": np.zeros((len(RUNS), 2), np.uint64)}


def _runs(arrays: Arrays) -> dict[str, Wanted]:
    tokens, ranges, words = [], [], []
    for block in range(len(RUNS)):
        mine, last = RunRequests(arrays, block), RunRequests(arrays, block)
        tokens.append([mine.token(row, block != 1) for row in range(ROWS)])
        for b, begin, end, padding, valid in (last.whose(row) for row in range(ROWS)):
            ranges.append((b, 0 if padding else begin, 0 if padding else end, padding | valid << 1))
        if last.ends[-1] > ROWS:
            last.report(OFFSETS, BATCH - 1, ROWS)
        words.append([mine.word, last.word])
    outs = {
        "tokens": exact(np.array(tokens, np.uint32)),
        "ranges": exact(np.array(ranges, np.uint32).reshape(4, ROWS, 4)),
    }
    return outs | {"errors": exact(np.array(words, np.uint64))}


def _rows_inputs() -> dict[str, Array]:
    outs = {"k": (100, 4), "dims": (32, 4), "k_codes": (ROW, 1), "v": (ROW, 2), "k_scales": (SCALES, 2)}
    zeros: dict[str, Array] = {name: np.zeros((ROWS + 1, n), f"u{size}") for name, (n, size) in outs.items()}
    return {**memory(), **zeros, "named": np.zeros((ROWS, ROW), np.uint32)}


def _rows(arrays: Arrays) -> dict[str, Wanted]:
    """Rows from the second on; heads of k lie 48 apart. A token without a page is NaN, as a byte 0xff."""
    cache = Paged(arrays)
    k, dims, v = (np.zeros((ROWS + 1, n), np.float32) for n in (100, 32, ROW))
    codes, scales = np.zeros((ROWS + 1, ROW), np.uint8), np.zeros((ROWS + 1, SCALES), np.float16)
    named = np.zeros((ROWS, ROW), np.float32)
    for row in range(ROWS):
        if row % 3 == 2:
            continue
        token, to = row * 2, row + 1
        page, fault = cache.page(0, token)
        own = [[cache.k(page, token % TOKENS, h, d) if not fault else np.nan for d in range(48)] for h in range(HEADS)]
        for h in range(HEADS):
            k[to, 48 * h : 48 * h + DIMS] = own[h][:DIMS]
            dims[to, 16 * h : 16 * h + 16] = own[h][32:]
        gap = row % 2 == 1
        named[23 - row] = (0 if row % 4 == 1 else np.nan) if gap else [x for head in own for x in head[:DIMS]]
        if fault:
            v[to], codes[to], scales[to] = np.nan, 0xFF, np.nan
            continue
        v[to] = [cache.v(page, token % TOKENS, h, d) for h in range(HEADS) for d in range(DIMS)]
        codes[to] = [cache.code(page, token % TOKENS, h, d) for h in range(HEADS) for d in range(DIMS)]
        scales[to] = cache.scales[page, token % TOKENS * SCALES :][:SCALES]
    return {
        "k": floats(k),
        "dims": floats(dims),
        "k_codes": exact(codes),
        "v": floats(v.astype(BF16), "bf16"),
        "k_scales": floats(scales, "f16"),
        "named": floats(named),
    }


# Slots of 24 pairs: drafts onto the places before them, one after another; some of no pair, outside the pool, onto themselves.
MOVES: Final = (
    *((3 * i + 2, i + 1) for i in range(10)),
    *((-1, 30), (31, -1), (PAGES * TOKENS, 32), (33, -2), (2**40, 34), (35, 35), (36, -(2**63))),
    *((39, 37), (38, 20), (37, 21), (19, 22), (18, 23), (17, 24), (16, 25)),
)


def _move_inputs() -> dict[str, Array]:
    found: dict[str, Array] = {"offsets": np.array([o for o, _ in BLOCKS], np.int32)}
    found |= {name: np.array(own, np.int64) for name, own in zip(("src", "dst"), zip(*MOVES, strict=True), strict=True)}
    outs = {"pairs": np.zeros((12, 4), np.uint32), **{n: np.zeros((24, 4), np.uint32) for n in ("sources", "targets")}}
    return found | memory() | outs | {"errors": np.zeros(13, np.uint64)}


def _moves(arrays: Arrays) -> dict[str, Wanted]:
    pairs, words, told = [], [], dict[str, list[Slot]](sources=[], targets=[])
    for o, _ in BLOCKS:
        for b in range(BATCH):
            begin, end = o[b], o[b + 1]
            around = o[max(b - 1, 0) : b + 3]
            bad = begin != end and (list(around) != sorted(around) or end > ROWS)
            words.append(~(min(begin, ROWS) << 32 | b << 8 | OFFSETS) % 2**64 if bad else 0)
            pairs.append((b, 0, 0, 0) if bad else (b, begin, end, 2 if begin < end else 0))
    reports = []
    codes, scales = (arrays[name].reshape(PAGES, -1).copy() for name in ("codes", "scales"))
    for i, (source, to) in enumerate(MOVES):
        outside = -1 not in (source, to) and not (0 <= source < PAGES * TOKENS and 0 <= to < PAGES * TOKENS)
        reports += [i << 32 | 7 << 8 | SLOT] if outside else []
        none = outside or -1 in (source, to) or source == to
        for name, slot in (("sources", source), ("targets", to)):
            told[name].append((MAX, NONE, 0, 0) if none else (slot // TOKENS, NONE, slot % TOKENS, 0))
        if none:
            continue
        for own, given, row in ((codes, "codes", ROW), (scales, "scales", SCALES)):
            page, at = divmod(source, TOKENS)
            what = arrays[given].reshape(PAGES, -1)[page, at * row : (at + 1) * row]
            own[to // TOKENS, to % TOKENS * row : (to % TOKENS + 1) * row] = what
    outs = {name: exact(np.array(own, np.uint32)) for name, own in (told | {"pairs": pairs}).items()}
    outs |= {"codes": exact(codes.reshape(-1)), "scales": exact(scales.reshape(-1))}
    return outs | {"errors": exact(np.array([*words, ~min(reports) % 2**64], np.uint64))}


def _tokens_inputs() -> dict[str, Array]:
    rng, arrays = np.random.default_rng(132), memory()
    table = np.zeros((1, 8), np.uint32)
    table[0, :PAGES] = rng.permutation(PAGES)
    return {
        "table": table,
        "k_codes": rng.integers(0, 256, (ROWS, ROW), np.uint8),
        "v": pattern(rng.standard_normal((ROWS, 100)).astype(BF16)),
        "k_scales": pattern(rng.standard_normal((ROWS, SCALES)).astype(np.float16)),
        **{name: arrays[name] for name in ("codes", "scales", "values")},
    }


def _tokens(arrays: Arrays) -> dict[str, Wanted]:
    """Rows 1 to 20 become tokens 0 to 19, but for every third."""
    found = {name: arrays[name].reshape(PAGES, -1).copy() for name in ("codes", "scales", "values")}
    for token in range(20):
        if token % 3 == 2:
            continue
        page, at = arrays["table"][0, token // TOKENS], token % TOKENS
        found["codes"][page, at * ROW : (at + 1) * ROW] = arrays["k_codes"][token + 1]
        found["scales"][page, at * SCALES : (at + 1) * SCALES] = arrays["k_scales"][token + 1]
        given = arrays["v"][token + 1]
        found["values"][page, at * ROW : (at + 1) * ROW] = [*given[:DIMS], *given[48 : 48 + DIMS]]
    return {name: exact(own.reshape(-1)) for name, own in found.items()}


def _pieces_inputs() -> dict[str, Array]:
    zeros: dict[str, Array] = {name: np.zeros((64, n), np.uint32) for name, n in (("places", 6), ("missing", 3))}
    return {**memory(), "places": zeros["places"], "loaded": np.zeros((64, 8), np.uint8), "missing": zeros["missing"]}


def _pieces(arrays: Arrays) -> dict[str, Wanted]:
    """A token has 10 vectors; heads of 40 codes lie 48 apart, or side by side."""
    cache = Paged(arrays)
    places, loaded, missing = [], [], []
    for i in range(64):
        row, vector = divmod(i, 10)
        head, dim = divmod(vector * 8, DIMS)
        places.append([row, vector, i % ROWS, i // ROWS, head * 48 + dim, vector * 8])
        page, fault = cache.page(0, row)
        loaded.append([0xFF if fault else cache.code(page, row % TOKENS, head, dim + j) for j in range(8)])
        missing.append([0xFF, 0 if i % 2 else NAN, not cache.page(0, i % ROWS)[1]])
    return {
        "places": exact(np.array(places, np.uint32)),
        "loaded": exact(np.array(loaded, np.uint8)),
        "missing": exact(np.array(missing, np.uint32)),
    }


def probes() -> list[Probe]:
    """All of this module."""
    return [
        Probe("library_copy_find", UNIT, "copy_find", _find_inputs, _find, ROWS, (len(BLOCKS), 1, 1)),
        Probe("library_copy_find_runs", UNIT, "copy_find_runs", _run_inputs, _runs, ROWS, (len(RUNS), 1, 1)),
        Probe("library_copy_moves", UNIT, "copy_moves", _move_inputs, _moves, 24),
        Probe("library_copy_rows", UNIT, "copy_rows", _rows_inputs, _rows, 64),
        Probe("library_copy_tokens", UNIT, "copy_tokens", _tokens_inputs, _tokens, 64),
        Probe("library_copy_pieces", UNIT, "copy_pieces", _pieces_inputs, _pieces, 64),
    ]
