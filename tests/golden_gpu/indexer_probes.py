"""How blocks divide an indexer's scores (kernels/indexer_work.cu), and a tile of them (kernels/indexer_scores.cu)."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any, Final

import ml_dtypes
import numpy as np

from tests.golden_gpu.compare import Rule, Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.mma_probes import from_registers, places_c, to_registers
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe
from tests.golden_gpu.scan_probes import LENGTH, OFFSETS

BATCH, ROWS, KEYS, SPAN, HELD, BLOCKS = 37, 70, 48, 8, 45, 3  # SPAN: tokens of a tile, of 8 keys or of 4 for two each
TILES: Final = 6
FLOATS: Final = Rule("f32", any_nan=True)
CODES, VALUES = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16


# Work --------------------------------------------------------------------------------------------------------------------


def _work_inputs(after: bool) -> dict[str, Array]:
    rng = np.random.default_rng(300)
    counts = rng.choice((0, 1, 1, 2, 2) if after else (0, 1, 1, 2, 3, 5), BATCH)  # the latter more than the call has
    counts[[4, 20]] = [9, 7]
    offsets = np.cumsum([1, *counts])
    lengths = rng.integers(0, 41 if after else 30, BATCH)
    lengths[[4, 6, 9, 12]] = [41 if after else 32, -1, HELD + 1, 3]
    offsets[30] = offsets[28] - 1  # contradicts those around it
    return {
        "offsets": offsets.astype(np.int32),
        "lengths": lengths.astype(np.int32),
        "owners": np.zeros((ROWS, TILES), np.uint32),
        "counts": np.zeros(3 * BLOCKS, np.uint32),
        "all": np.full((ROWS, KEYS + 1), 7, np.float32),
        "some": np.full((ROWS, KEYS + 1), 7, np.float32),
        "blocks": np.full((ROWS, 24), 7, np.float32),
        "errors": np.zeros(1, np.uint64),
    }


class _Step:
    """The requests of a step: their rows by the offsets around them, and what is wrong with each."""

    def __init__(self, arrays: Arrays, after: bool) -> None:
        self.offsets: list[int] = [x % 2**32 if x >= 0 else 2**32 - 1 for x in arrays["offsets"].tolist()]
        self.lengths: list[int] = arrays["lengths"].tolist()
        self.after, self.rate = after, 2 if after else 1

    @property
    def wrong_total(self) -> bool:
        return not self.offsets[BATCH - 1] <= self.offsets[BATCH] <= ROWS

    def rows(self, b: int) -> int | None:
        around = self.offsets[max(b - 1, 0) : b + 3]
        begin, end = self.offsets[b : b + 2]
        return end - begin if around == sorted(around) and end <= ROWS else None

    def tokens(self, b: int) -> int | None:
        """None: no length that can be."""
        n = self.lengths[b] + (0 if self.after else self.rows(b) or 0)
        return None if self.lengths[b] < 0 or n > min(HELD, KEYS) else n

    def seen(self, b: int, i: int) -> int:
        return max((self.tokens(b) or 0) - (self.rows(b) or 0) + i + 1, 0) // self.rate

    def request(self, row: int) -> int | None:
        """Whose row it is; None: nobody's. Halving, as offsets that decrease may have it."""
        if row >= self.offsets[BATCH]:
            return None
        low, high = 0, BATCH
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.offsets[middle] <= row else (low, middle)
        return None if low == 0 and row < self.offsets[0] <= self.offsets[1] else low

    def valid(self, row: int, b: int) -> bool:
        return self.rows(b) is not None and self.offsets[b] <= row < self.offsets[b + 1]


def _work(rows: int, after: bool, arrays: Arrays) -> dict[str, Wanted]:
    step, owners = _Step(arrays, after), np.zeros((ROWS, TILES), np.uint32)
    pairs: list[tuple[int, int, int]] = []
    for b in range(BATCH):
        count = step.rows(b)
        if not count or step.tokens(b) is None:
            continue
        seen = [(step.tokens(b) or 0) - count + (g + 1) * rows for g in range(-(-count // rows))]
        if SPAN % rows == 0:
            tiles = [-(-(n // step.rate) // (SPAN // step.rate)) if n > 0 else 0 for n in seen]
        else:  # a tile has room for whole groups alone, and begins with one
            first = next((n for n in seen if n > 0), 0)
            blind = sum(n <= 0 for n in seen)
            e = (first + SPAN - 1 + rows - 1) // rows
            tiles = [0] * blind + [(e + n) // (SPAN // rows) for n in range(len(seen) - blind)]
        pairs += [(b, g, t) for g, n in enumerate(tiles) for t in range(n)]
    each, more = divmod(len(pairs), BLOCKS)
    counts = [each + (i < more) for i in range(BLOCKS)]
    for n, (b, g, t) in enumerate(pairs):
        block = next(i for i in range(BLOCKS) if n < sum(counts[: i + 1]))
        last = min((g + 1) * rows, step.rows(b) or 0) - 1
        for i in range(g * rows, last + 1):
            row = step.offsets[b] + i
            if step.request(row) == b and t * (SPAN // step.rate) < step.seen(b, last):
                owners[row, t] = step.seen(b, i) << 8 | block + 1
    every, some, blocks = (arrays[name].copy() for name in ("all", "some", "blocks"))
    faults = [(ROWS, BATCH - 1, OFFSETS)] if step.wrong_total else []
    for row in range(ROWS):
        begin, value = _unseen(step, row, faults)
        every[row, begin:KEYS] = value
        blocks[row, -(-begin // 5) : 11] = value
        b = step.request(row)
        if b is None or np.isnan(value):
            blocks[row, 12:23] = value
        if np.isnan(value):
            some[row, :KEYS] = np.nan
        if row % 2 == 0 and row < 64:
            some[row // 2, KEYS] = begin
    position, b, code = min(faults)
    word = 2**64 - 1 - (position << 32 | b << 8 | code)
    return {
        "owners": exact(owners),
        "counts": exact(np.array([*(2 * n + 1 for n in counts), *_fives(), 100, 15, 102], np.uint32)),
        **{name: Wanted(x.view(np.uint32), FLOATS) for name, x in (("all", every), ("some", some), ("blocks", blocks))},
        "errors": exact(np.array([word], np.uint64)),
    }


def _fives() -> list[int]:
    """The shares of 37 requests of b % 5 tiles each."""
    tiles = [(b, n) for b in range(BATCH) for n in range(b % 5)]
    ends = [len(tiles) // BLOCKS * i + min(i, len(tiles) % BLOCKS) for i in range(BLOCKS + 1)]
    return [tiles[begin][0] << 16 | tiles[begin][1] << 12 | (end - begin) << 1 | 1 for begin, end in pairwise(ends)]


def _unseen(step: _Step, row: int, faults: list[tuple[int, int, int]]) -> tuple[int, float]:
    """From which key on a row has another value than a score, and which."""
    b = step.request(row)
    if b is None:
        return 0, np.nan if step.wrong_total else -np.inf
    if not step.valid(row, b):
        faults.append((row, b, OFFSETS))
        return 0, np.nan
    if step.tokens(b) is None:
        wrong = step.lengths[b]
        faults.append((2**32 - 1 if wrong < 0 else wrong + (0 if step.after else step.rows(b) or 0), b, LENGTH))
        return 0, np.nan
    return step.seen(b, row - step.offsets[b]), -np.inf


# Scores ------------------------------------------------------------------------------------------------------------------


def _whole(rng: np.random.Generator, shape: tuple[int, ...], kind: Any) -> Array:
    """Whole numbers, whose sums are exact however they are added."""
    return rng.integers(-3, 4, shape).astype(kind)


def _scores_inputs(kind: Any, heads: int, rows: int) -> dict[str, Array]:
    rng = np.random.default_rng(301)
    size = np.dtype(kind).itemsize
    q = np.zeros((rows, heads * 128 * size + 32), np.uint8)
    q[:, : heads * 128 * size] = _whole(rng, (rows, heads * 128), kind).view(np.uint8)
    places = rng.permutation(140)[:128].astype(np.int32)
    places[[0, 77]] = -1
    return {
        "keys": _whole(rng, (140, 128), kind).view(np.uint8),
        "places": places,
        "q": q,
        "weights": rng.integers(-2, 3, (rows, heads + 1)).astype(np.float32),
        "out": np.zeros((2, rows, 128), np.float32),
        "which": np.zeros((128, 2), np.uint32),
        "maxima": np.zeros((128, 4), np.float32),
    }


def _scores(kind: Any, heads: int, rows: int, arrays: Arrays) -> dict[str, Wanted]:
    size = np.dtype(kind).itemsize
    q = arrays["q"][:, : heads * 128 * size].copy().view(kind).reshape(rows, heads, 128).astype(np.float64)
    k = np.where((arrays["places"] >= 0)[:, None], arrays["keys"].view(kind)[arrays["places"]].astype(np.float64), 0)
    weights = arrays["weights"][:, :heads].astype(np.float64)
    weights[max(1, rows - 1) :] = 0  # the last of several rows is nobody's
    scores = np.einsum("rh,rhk->rk", weights, np.maximum(np.einsum("rhd,kd->rhk", q, k), 0))
    thread = np.arange(128)
    warp, lane = thread // 32, thread % 32
    key = lane % 4 // 2 * 64 + warp * 16 + lane % 2 * 8 + lane // 4
    total = 1 + 2 * np.maximum(thread - 64, 0) - 3
    both = np.stack([scores, scores]).astype(np.float32)
    which = np.stack([key, np.where(thread == 5, -1, total)], axis=1).astype(np.int32).view(np.uint32)
    x = np.arange(128) * 37 % 128 - 64.0
    x[77] = np.nan
    maxima = np.stack([x.reshape(-1, n).max(axis=1)[key // n] for n in (2, 4, 8, 16)], axis=1).astype(np.float32)
    return {
        "out": Wanted(both.view(np.uint32), Rule("f32", any_zero=True)),
        "which": exact(which),
        "maxima": Wanted(maxima.view(np.uint32), FLOATS),
    }


def _packed_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(303)
    places = rng.permutation(140)[:128].astype(np.int32)
    places[[0, 77]] = -1

    def scales(*shape: int) -> Array:
        return (rng.integers(125, 130, (*shape, 4)) @ np.array([1, 1 << 8, 1 << 16, 1 << 24])).astype(np.uint32)

    return {
        "keys": rng.integers(0, 256, (140, 64), np.uint8),
        "key_scales": scales(140),
        "places": places,
        "q": rng.integers(0, 256, (1, 32 * 64 + 16), np.uint8),
        "q_scales": scales(1, 33).view(np.int32),
        "weights": rng.integers(-2, 3, (1, 33)).astype(np.float32),
        "out": np.zeros((2, 2, 128), np.float32),
        "wide": np.zeros((128, 5), np.uint32),
    }


E2M1: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _numbers(codes: Array, scales: Array) -> Array:
    """The values of packed codes `[..., 64]` with words of four exponents `[...]`."""
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], 128)
    exponents = (scales.astype(np.int64)[..., None] >> np.array([0, 8, 16, 24]) & 255) - 127
    found: Array = E2M1[nibbles] * np.repeat(np.ldexp(1.0, exponents), 32, axis=-1)
    return found


def _packed(arrays: Arrays) -> dict[str, Wanted]:
    """Sums of multiples of 2^-6, none of which needs more bits than f32 has; q's second row is nobody's."""
    q = _numbers(arrays["q"][0, : 32 * 64].reshape(32, 64), arrays["q_scales"][0, :32].view(np.uint32))
    k = _numbers(arrays["keys"], arrays["key_scales"])[arrays["places"]] * (arrays["places"] >= 0)[:, None]
    weights = arrays["weights"][0, :32].astype(np.float64)
    scores = np.stack([weights @ np.maximum(q @ k.T, 0), np.zeros(128)])
    thread = np.arange(128, dtype=np.uint32)
    word = (thread.astype(np.uint64) * 0x02468ACE & 0xFFFFFFFF).astype(np.uint32)
    exponent = np.where(thread == 9, 0, 100 + thread // 2).astype(np.int64)
    values = E2M1[word[:, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15] * np.ldexp(1.0, exponent - 127)[:, None]
    pairs = values.astype(VALUES).view(np.uint16).astype(np.uint32).reshape(128, 4, 2)
    words = pairs[..., 0] | pairs[..., 1] << 16
    words[7] = 0x7FFF7FFF  # NaN
    lane = thread % 4 * 2
    own = sum(weights[lane + n] + weights[lane + n + 1] for n in range(0, 32, 8))
    # Of 64 columns the first 32 are row 0's, the others the second row's, whose weights are 0.
    total = (2 * own).astype(np.int32).view(np.uint32)
    return {
        "out": Wanted(np.stack([scores, scores]).astype(np.float32).view(np.uint32), Rule("f32", any_zero=True)),
        "wide": exact(np.concatenate([words, total[:, None]], axis=1)),
    }


def _products_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(302)
    return {
        "a": _whole(rng, (64, 32), CODES).view(np.uint8),
        "b": _whole(rng, (128, 32), CODES).view(np.uint8),
        "warp": np.zeros((32, 4), np.float32),
        "out": np.zeros(128 * (16 + 32 + 64), np.float32),
    }


def _products(arrays: Arrays) -> dict[str, Wanted]:
    a, b = (arrays[name].view(CODES).astype(np.float64) for name in "ab")
    product, thread = a @ b.T, np.arange(128)
    row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
    out = []
    for columns in (32, 64, 128):
        n, half, one = np.ogrid[: columns // 8, :2, :2]
        at = (row[:, None, None, None] + 8 * half, 8 * n + column[:, None, None, None] + one)
        out.append(2 * product[at].reshape(-1))
    places = places_c(16, 1)
    start = from_registers(np.tile(np.arange(1, 5, dtype=np.float32), (32, 1)).view(np.uint32), places, "f32", (16, 8))
    warp = to_registers((product[:16, :8] + start).astype(np.float32), places)
    rule = Rule("f32", any_zero=True)
    return {"warp": Wanted(warp, rule), "out": Wanted(np.concatenate(out).astype(np.float32).view(np.uint32), rule)}


def probes() -> list[Probe]:
    """All of this module."""
    work = [
        Probe(
            f"library_indexer_work_{name}",
            "indexer_work",
            f"indexer_work_{name}",
            partial(_work_inputs, after),
            partial(_work, rows, after),
            32,
            (BLOCKS, 1, 1),
        )
        for name, rows, after in (("two", 2, True), ("three", 3, False))
    ]
    scores = [
        Probe(
            f"library_indexer_scores_{name}",
            "indexer_scores",
            f"indexer_scores_{name}",
            partial(_scores_inputs, kind, 32, rows),
            partial(_scores, kind, 32, rows),
            128,
            shared=41984,
        )
        for name, kind, rows in (("codes", CODES, 2), ("values", VALUES, 1))
    ]
    products = Probe(
        "library_indexer_scores_products",
        "indexer_scores",
        "indexer_scores_products",
        _products_inputs,
        _products,
        128,
        shared=192 * 128,
    )
    packed = Probe(
        "library_indexer_scores_packed",
        "indexer_scores",
        "indexer_scores_packed",
        _packed_inputs,
        _packed,
        128,
        shared=64 * 256 + 128 * 64 + 4 * 64 + 4 * 128,
    )
    return [*work, *scores, packed, products]
