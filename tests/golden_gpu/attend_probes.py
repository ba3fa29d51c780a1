"""Attention of a warp over tiles of tokens in pages (kernels/mma_tile.cu), in float64: what it comes to in whatever order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kvgen.reference import quant
from tests.golden_gpu.column_probes import UNUSED, close
from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.mma_probes import QUAD, ROW
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe, pattern

UNIT: Final = "mma_tile"
BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
PAGES, IN_PAGE, HEADS, DIMS, GROUP, HEAD, SLACK = 14, 8, 2, 40, 2, 1, 8
PAGE_ID: Final = 1
Floats = NDArray[np.float64]

# Pages of each request: K of the first one's grow with the tokens, so that maxima rise. A page outside the pool is read in
# chunk 3, from its third token on in chunk 5, and lies before the tokens of chunk 1.
TABLE: Final = (
    (0, 1, 2, 3, 4, 5, 6, 7),
    (9, 99, 3, 8, 1, 2, 0, 4),
    (13, 12, 11, 10, 9, 8, 0, 2),
    (4, 11, 99, 2, 7, 0, 0, 0),
)
# Request, first row, rows, tokens, first token and the one after the last one.
CHUNKS: Final = (
    (0, 0, 7, 53, 0, 53),
    (1, 7, 1, 40, 16, 33),
    (2, 8, 3, 64, 32, 64),
    (3, 11, 4, 30, 5, 30),
    (0, 15, 4, 2, 0, 2),  # more rows than tokens
    (3, 15, 2, 30, 18, 27),
)
ROWS: Final = 19


@dataclass(frozen=True)
class Way:
    """A kernel: the type of codes, tokens of a tile, its columns, the tokens that a row at a position sees, and its scales."""

    kernel: str
    kind: Any
    tile: int
    cols: int
    sees: Callable[[int, int], bool]
    scaled: str = ""


def _causal(position: int, token: int) -> bool:
    return token <= position


def _window(size: int, position: int, token: int) -> bool:
    return position - size < token <= position


WAYS: Final = (
    Way("tile_plain", BF16, 32, 8, _causal),
    Way("tile_special", BF16, 16, 16, partial(_window, 9)),
    Way("tile_tokens", E4M3, 32, 8, _causal, "tokens"),
    Way("tile_groups", np.int8, 16, 16, lambda position, token: True, "groups"),
    Way("tile_tables", np.uint8, 32, 8, _causal, "tables"),
    Way("tile_channels", np.int8, 32, 8, partial(_window, 20), "channels"),
    Way("tile_zeros", np.uint8, 16, 16, _causal, "zeros"),
)
SPECIAL: Final = ((2, 3, 7, np.inf), (6, 1, 0, np.nan), (6, 4, 39, -np.inf), (12, 5, 11, np.inf), (10, 7, 20, np.nan))


def _scales(way: Way, rng: np.random.Generator) -> Array:
    """Of K and V: of tokens and heads of a page, of groups of 20 dims of those, of heads and dims."""
    if way.scaled == "tokens":
        found = np.exp2(rng.uniform(-1, 1, (PAGES, 2, IN_PAGE, HEADS, 1))).astype(np.float32)
        found[6, 1, 1, HEAD] = np.inf  # of V, of a token that the last columns alone see
        found[11, 1] *= np.float32(2.0**40)
        return found
    if way.scaled == "tables":
        return np.exp2(
            rng.uniform(
                np.reshape([-6, -3], (2, 1, 1, 1)), np.reshape([-2, 3], (2, 1, 1, 1)), (PAGES, 2, IN_PAGE, HEADS, 3)
            )
        ).astype(E4M3)
    if way.scaled == "groups":
        return (rng.uniform(0.5, 1.5, (PAGES, 2, IN_PAGE, HEADS, 2)) / 50).astype(np.float16)
    if way.scaled == "zeros":  # scale, zero point: of keys in the middle of their codes, of values below them
        found = rng.uniform(0.5, 1.5, (PAGES, 2, IN_PAGE, HEADS, 2)) / 50
        found[..., 1] = rng.uniform(100, 156, found.shape[:-1])
        found[:, 1, ..., 1] -= 160
        found[6, 1, 1, HEAD, 1] = np.nan  # of a token that the last columns alone see
        return found.astype(np.float16)
    return (rng.uniform(0.2, 2, (2, HEADS, DIMS)) / 50).astype(np.float16)


def _inputs(way: Way, seed: int, chunks: tuple[tuple[int, ...], ...] = CHUNKS, rows: int = ROWS) -> dict[str, Array]:
    """Of these chunks, the last number of which may be a first column."""
    rng = np.random.default_rng(seed)
    shape = (PAGES, IN_PAGE, HEADS, DIMS)
    keys, values = rng.standard_normal(shape), np.exp2(rng.uniform(-4, 4, shape))  # sums of V do not cancel
    keys[5:8] *= 3
    if way.kernel.endswith("_special"):
        for page, token, dim, x in SPECIAL:
            values[page, token, HEAD, dim] = x
    if way.scaled == "tables":  # two codes a byte; V is not negative
        keys = rng.integers(0, 256, (*shape[:3], DIMS // 2)).astype(np.float64)
        values = (rng.integers(0, 256, keys.shape) & 0x77).astype(np.float64)
    if way.kind is np.int8:
        keys, values = np.clip(np.rint(keys * 30), -127, 127), np.rint(rng.uniform(1, 127, shape))
    if way.scaled == "zeros":
        keys, values = np.clip(np.rint(keys * 30 + 128), 0, 255), np.rint(rng.uniform(0, 255, shape))
    return {
        "keys": pattern(keys.astype(way.kind)),
        "values": pattern(values.astype(way.kind)),
        "scales": pattern(_scales(way, rng)),
        "table": np.array(TABLE, np.uint32),
        "chunks": np.array([[*own[:6], 0, 1, 0, 0, 0, *(own[6:] or [0])] for own in chunks], np.uint32),
        "q": pattern(rng.standard_normal((rows, HEADS * GROUP, DIMS)).astype(BF16)),
        "max": np.full((len(chunks), way.cols), UNUSED, np.uint32),
        "sum": np.full((len(chunks), way.cols), UNUSED, np.uint32),
        "out": np.full((len(chunks), way.cols, DIMS), UNUSED, np.uint32),
        "failures": np.full(len(chunks), UNUSED, np.uint32),
        "errors": np.zeros(len(chunks), np.uint64),
    }


@dataclass
class Memory:
    """K and V of the head that is asked for, as products take them, float64 `[page, token, dim]`, and what else scales them."""

    keys: Floats
    values: Floats
    token_scales: Floats  # of K, then V: [2, page, token]
    channels: Floats  # of K, then V: [2, dim]


def _memory(way: Way, arrays: Arrays) -> Memory:
    if way.scaled == "tables":
        return _memory_of_tables(arrays)
    kinds: dict[str, Any] = {"tokens": np.float32} | dict.fromkeys(("groups", "channels", "zeros", ""), np.float16)
    keys, values = (arrays[name].view(way.kind).astype(np.float64)[:, :, HEAD] for name in ("keys", "values"))
    scales = arrays["scales"].view(kinds[way.scaled]).astype(np.float64)
    found = Memory(keys, values, np.ones((2, PAGES, IN_PAGE)), np.ones((2, DIMS)))
    if way.scaled == "tokens":
        found.token_scales = scales[:, :, :, HEAD, 0].transpose(1, 0, 2)
    elif way.scaled == "zeros":
        found.token_scales = scales[:, :, :, HEAD, 0].transpose(1, 0, 2)
        found.keys, found.values = (x - scales[:, n, :, HEAD, 1, None] for n, x in enumerate((keys, values)))
    elif way.scaled == "channels":
        found.channels = scales[:, HEAD]
    elif way.scaled == "groups":
        each = np.repeat(scales[:, :, :, HEAD], 20, axis=-1)
        found.keys, found.values = (
            (x * each[:, n]).astype(np.float16).astype(np.float64) for n, x in enumerate((keys, values))
        )
    return found


def _memory_of_tables(arrays: Arrays) -> Memory:
    """e4m3 of codes below the scales of 16 dims."""
    scales = np.repeat(arrays["scales"].view(E4M3).astype(np.float64)[:, :, :, HEAD], 16, axis=-1)[..., :DIMS]
    keys, values = (
        (quant.values(quant.unpack_nibbles(arrays[name][:, :, HEAD]), "e2m1") * scales[:, n])
        .astype(E4M3)
        .astype(np.float64)
        for n, name in enumerate(("keys", "values"))
    )
    return Memory(keys, values, np.ones((2, PAGES, IN_PAGE)), np.ones((2, DIMS)))


def _rounded_query(way: Way, q: Floats, scales: Floats) -> Floats:
    """With the scales of K's dims, rounded as f16 has it where the largest is in [1, 2)."""
    x = (q * scales).astype(np.float32)
    if not way.scaled or not x.any():
        return x.astype(np.float64)
    unit = 2.0 ** np.floor(np.log2(np.abs(x).max()))
    rounded: Floats = (x / unit).astype(np.float16).astype(np.float64) * unit
    return rounded


def _column(way: Way, memory: Memory, own: tuple[int, ...], i: int, q: Floats) -> tuple[float, float, Floats]:
    """Maximum, sum and sums of V, relative to a maximum that follows the tiles' when they pass it by 2^SLACK."""
    b, _, rows, tokens, begin, end = own
    position = tokens - rows + i
    query = _rounded_query(way, q, memory.channels[0])
    top, total, out = -np.inf, 0.0, np.zeros(DIMS)
    for first in range(begin // way.tile * way.tile, end, way.tile):
        seen = []
        for token in range(max(first, begin), min(first + way.tile, end)):
            if not (way.sees(position, token) and (position >= 0 or way.scaled == "groups")):
                continue
            page, offset = TABLE[b][token // IN_PAGE], token % IN_PAGE
            if page >= PAGES:
                seen.append((0.0, np.zeros(DIMS)))
                continue
            key, value = memory.token_scales[:, page, offset]
            score = float(query @ memory.keys[page, offset]) * key * 0.5 * np.log2(np.e)
            seen.append((score, memory.values[page, offset] * value * memory.channels[1]))
        high = max((score for score, _ in seen), default=-np.inf)
        if high > top + SLACK:
            shrink = 0.0 if np.isneginf(top) else 2.0 ** (top - high)
            top, total, out = high, total * shrink, out * shrink
        for score, value in seen:
            total += 2.0 ** (score - top)
            out = out + 2.0 ** (score - top) * value
    return top, total, out


def _wanted(way: Way, arrays: Arrays) -> dict[str, Wanted]:
    memory, q = _memory(way, arrays), arrays["q"].view(BF16).astype(np.float64)
    shape = (len(CHUNKS), way.cols)
    top, total, out = np.zeros(shape), np.zeros(shape), np.zeros((*shape, DIMS))
    for n, own in enumerate(CHUNKS):
        for col in range(way.cols):
            i, row = min(col // GROUP, own[2] - 1), own[1] + col // GROUP
            mine = q[row, HEAD * GROUP + col % GROUP] if col // GROUP < own[2] else np.zeros(DIMS)
            top[n, col], total[n, col], out[n, col] = _column(way, memory, own, i, mine)
    errors = np.zeros(len(CHUNKS), np.uint64)
    for n, first in ((3, 2 * IN_PAGE), (5, 2 * IN_PAGE + 2)):
        errors[n] = 2**64 - 1 - (first << 32 | 3 << 8 | PAGE_ID)
    return {
        "max": close(top, 1e-5, 1e-4),
        "sum": close(total, 2e-4),
        "out": close(out, 2.0**-8 if way.kind is BF16 else 2.0**-10),
        "failures": exact(np.array([0, 0, 0, 1, 0, 1], np.uint32)),
        "errors": exact(errors),
    }


def _stages_inputs() -> dict[str, Array]:
    found = _inputs(WAYS[0], 248)
    return {name: found[name] for name in ("keys", "values", "scales", "table", "chunks")} | {
        "runs": np.full((len(CHUNKS), 2, 32, DIMS // 2), UNUSED, np.uint32),
        "tokens": np.full((len(CHUNKS), 2, 16, DIMS // 2), UNUSED, np.uint32),
    }


def _stage(arrays: Arrays, chunks: tuple[tuple[int, ...], ...], tile: int) -> Array:
    """K and V of the first tile's tokens; zeros where these are not the chunk's, or their page is not there."""
    out = np.zeros((len(chunks), 2, tile, DIMS), np.uint16)
    for n, (b, _, _, _, begin, end, *_) in enumerate(chunks):
        for at in range(tile):
            token = begin // tile * tile + at
            page = TABLE[b][token // IN_PAGE]
            if begin <= token < end and page < PAGES:
                for role, memory in enumerate(("keys", "values")):
                    out[n, role, at] = arrays[memory][page, token % IN_PAGE, HEAD]
    return out.view(np.uint32)


def _stages(arrays: Arrays) -> dict[str, Wanted]:
    return {name: exact(_stage(arrays, CHUNKS, tile)) for name, tile in (("runs", 32), ("tokens", 16))}


# What these are made of ---------------------------------------------------------------------------------------------


LANES: Final = np.arange(32)


def _queries_inputs() -> dict[str, Array]:
    return {
        "in": np.random.default_rng(246).integers(0, 2**32, (3, 2, 32, 2), np.uint32),
        "dims": np.zeros((2, 2, 32, 2), np.uint32),
        "out": np.zeros((3, 2, 32, 2), np.uint32),
    }


def _queries(arrays: Arrays) -> dict[str, Wanted]:
    """Pairs in steps of 16 dims: of 16 bits two neighbours, 8 dims on for the other register; of 8 bits four for both."""
    dims = np.zeros((2, 2, 32, 2), np.uint32)
    for lane in range(32):
        step, half, j = lane // 8, lane // 4 % 2, lane % 4
        for e in range(2):
            if lane < 24:  # three steps of 16 dims
                dims[0, 0, lane, e] = 1 + 16 * step + 8 * half + 2 * j + e
            dims[1, 0, lane, e] = 1 + 16 * step + 4 * j + 2 * half + e
    return {"dims": exact(dims), "out": exact(arrays["in"])}


def _numbers_inputs() -> dict[str, Array]:
    return {
        "in": pattern(np.random.default_rng(247).standard_normal(32).astype(np.float32)),
        "largest": np.zeros(32, np.uint32),
        "factors": np.zeros((32, 2), np.uint32),
        "weights": np.zeros((32, 3), np.uint32),
        "rescaled": np.zeros((32, 3, 4), np.uint32),
    }


def _numbers(arrays: Arrays) -> dict[str, Wanted]:
    x = arrays["in"].view(np.float32).astype(np.float64)
    largest = x.reshape(8, 4).max(axis=0)[QUAD]
    weights = np.stack([np.zeros(32), np.exp2(x / 4 - 3), np.exp2(x * (2 + 2 * QUAD) - 3)], axis=1)
    rescaled = np.tile(np.arange(1.0, 13).reshape(3, 4), (32, 1, 1))
    rescaled[:, :, 1::2] *= x[:, None, None]
    return {
        "largest": close(largest, 0.0, 1e-30),
        "factors": close(np.stack([x, LANES + 0.5], axis=1), 0.0, 1e-30),
        "weights": close(weights, 1e-5),
        "rescaled": close(rescaled, 1e-6),
    }


def _bytes_inputs() -> dict[str, Array]:
    scales = np.exp2(np.random.default_rng(250).uniform(-8, 8, 128)).astype(E4M3)
    return {"scales": scales.view(np.uint32), "out": np.full((33, 32), UNUSED, np.uint32)}


def _bytes(arrays: Arrays) -> dict[str, Wanted]:
    """K: a register has a token's dims, of group lane % 4 // 2 of half a block; V: those of two tokens, of group lane // 16."""
    scales = arrays["scales"].view(E4M3).astype(np.float16).reshape(16, 2, 4)
    found = np.zeros((33, 32, 2), np.float16)
    for i in range(4):
        for r in range(4):
            token = ROW + r % 2 * 8
            found[i * 4 + r] = scales[token, 1, i // 2 * 2 + QUAD // 2][:, None]
            token = 2 * QUAD + r // 2 * 8
            for e in range(2):
                found[16 + i * 4 + r, :, e] = scales[token + e, 1, i // 2 * 2 + LANES // 16]
    for e in range(2):
        found[32, :, e] = scales[LANES // 2, 0, LANES % 2 * 2 + e]
    return {"out": exact(np.ascontiguousarray(found).view(np.uint32)[..., 0])}


def _units_inputs() -> dict[str, Array]:
    return {"in": pattern(np.linspace(-3, 3, 32).astype(np.float32)), "out": np.full((32, 8), UNUSED, np.uint32)}


def _units(arrays: Arrays) -> dict[str, Wanted]:
    """row_max follows the largest of a column, half of which is a score; a unit begins 2^100 below it."""
    x = arrays["in"].view(np.float32).astype(np.float64)
    one = np.ones(32)
    found = [one, one, one * 2.0**-50, one * 2.0**-100, one, np.exp2(-x), 8 * np.exp2(-x), 24 * one]
    return {"out": close(np.stack(found, axis=1), 1e-5)}


def _columns_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(249)
    scores, factors = rng.standard_normal((2, 2, 32, 4)), rng.uniform(-2, 2, 19)
    scores[0, 0, 5] = [-np.inf, np.inf, 0, 1e30]  # -inf: a hidden token
    return {
        "in": pattern(scores.astype(np.float32)),
        "factors": pattern(factors.astype(np.float32)),
        "out": np.full((2, 2, 32, 4), UNUSED, np.uint32),
    }


def _columns(arrays: Arrays) -> dict[str, Wanted]:
    """Register r of a lane is of column 2 * (lane % 4) + r % 2 of 8; the factors begin at the fourth."""
    column = 8 * np.arange(2)[:, None, None] + 2 * QUAD[:, None] + np.arange(4) % 2
    product = arrays["in"].view(np.float32) * arrays["factors"].view(np.float32)[3 + column]
    return {"out": exact(pattern(product))}


def _values_inputs() -> dict[str, Array]:
    each = {name: np.full((3, 32, 4), UNUSED, np.uint32) for name in ("keys", "out")}
    return {"keys": each["keys"], "rows": np.full((3, 32), UNUSED, np.uint32), "out": each["out"]}


def _values(_: Arrays) -> dict[str, Wanted]:
    """V begins after 32 tokens of 40 elements of K; registers: dims 8 on, tokens 8 on. There are no dims from 40 on."""
    keys, rows, out = np.zeros((3, 32, 4), np.uint32), np.zeros((3, 32), np.uint32), np.zeros((3, 32, 4), np.uint32)
    for block in range(3):
        for r in range(4):
            dim, token = 16 * block + ROW + r % 2 * 8, 16 + 2 * QUAD + r // 2 * 8
            at = 32 * DIMS + token * DIMS + dim
            out[block, :, r] = np.where(dim < DIMS, at | at + DIMS << 16, 0)
            dim, at = 16 * block + 2 * QUAD + r // 2 * 8, (16 + ROW + r % 2 * 8) * DIMS
            keys[block, :, r] = np.where(dim < DIMS, at + dim | at + dim + 1 << 16, 0)
        rows[block] = 2 * ((32 + 16 + LANES % 8 + LANES // 16 * 8) * DIMS + 16 * block + LANES // 8 % 2 * 8)
    return {"keys": exact(keys), "rows": exact(rows), "out": exact(out)}


def probes() -> list[Probe]:
    """All of this module."""
    chunks = (len(CHUNKS), 1, 1)
    attending = [
        Probe(
            f"library_{way.kernel}", UNIT, way.kernel, partial(_inputs, way, 240 + n), partial(_wanted, way), 32, chunks
        )
        for n, way in enumerate(WAYS)
    ]
    return [
        *attending,
        Probe("library_tile_stages", UNIT, "tile_stages", _stages_inputs, _stages, 32, chunks),
        Probe("library_tile_queries", UNIT, "tile_queries", _queries_inputs, _queries, 32),
        Probe("library_tile_numbers", UNIT, "tile_numbers", _numbers_inputs, _numbers, 32),
        Probe("library_tile_bytes", UNIT, "tile_bytes", _bytes_inputs, _bytes, 32),
        Probe("library_tile_units", UNIT, "tile_units", _units_inputs, _units, 32),
        Probe("library_tile_columns", UNIT, "tile_columns", _columns_inputs, _columns, 32),
        Probe("library_tile_values", UNIT, "tile_values", _values_inputs, _values, 32),
    ]
