"""Attention of a block over tiles of latent rows (kernels/latent_tile.cu), in float64: what it comes to in whatever order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.golden_gpu.column_probes import UNUSED, close
from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe, pattern

UNIT: Final = "latent_tile"
BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
THREADS, TILE, SLACK = 128, 32, 8
ROWS_OF_COLUMNS: Final = 4
QK_SCALE: Final = 0.25
Floats = NDArray[np.float64]

# First row, rows, tokens, first token and the one after the last one.
CHUNKS: Final = (
    (0, 4, 118, 0, 118),
    (4, 1, 90, 40, 73),
    (5, 3, 64, 0, 64),
    (8, 4, 100, 20, 99),  # the last row alone would see one more
    (12, 4, 2, 0, 2),  # more rows than tokens
    (16, 2, 50, 50, 50),  # no tokens
)
ROWS: Final = 18
# Chunk and its token: rows that are not there, and some that are no numbers, which its last rows alone see.
MISSING: Final = ((0, 5), (0, 70), (1, 0), (2, 63))
SPECIAL: Final = ((0, 116), (2, 62))
SPECIAL_SCALES: Final = ((3, 78),)  # token 98


@dataclass(frozen=True)
class Way:
    """A kernel: columns, dims of V, of codes, and of RoPE; where scales and RoPE begin in a row, its bytes; scales. Tokens of a
    tile; whether a token without a row is hidden, or else counts as zeros."""

    kernel: str
    cols: int
    values: int
    latent: int
    rope: int
    scale_at: int
    rope_at: int
    row: int
    groups: int
    tile: int = TILE
    hides: bool = False

    @property
    def kind(self) -> Any:
        return E4M3 if self.groups else BF16

    @property
    def most(self) -> int:
        """Tokens of a chunk: four tiles."""
        return 4 * self.tile

    @property
    def pool(self) -> int:
        """Rows that there are."""
        return self.most + 22

    @property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """CHUNKS, of which the first one takes all four tiles, whatever these have."""
        return tuple(
            (row, rows, tokens + self.more[n], begin, end + self.more[n])
            for n, (row, rows, tokens, begin, end) in enumerate(CHUNKS)
        )

    @property
    def more(self) -> tuple[int, ...]:
        """Tokens that a chunk has besides those of CHUNKS, before the others."""
        return (self.most - 4 * TILE, *[0] * (len(CHUNKS) - 1))

    @property
    def beside(self) -> bool:
        return self.groups == 1

    @property
    def dims(self) -> int:
        return self.latent + self.rope


WAYS: Final = (
    Way("latent_tile_plain", 8, 48, 80, 0, 160, 160, 160, 0),
    Way("latent_tile_groups", 16, 128, 128, 48, 128, 144, 240, 2),
    Way("latent_tile_beside", 16, 128, 128, 48, 128, 128, 224, 1),
)


def _chunks(chunks: tuple[tuple[int, ...], ...] = CHUNKS) -> Array:
    rows = [
        [n, row, rows, tokens, begin, end, 0, 1, 0, 0, 0, 0] for n, (row, rows, tokens, begin, end) in enumerate(chunks)
    ]
    return np.array(rows, np.uint32)


def _places(way: Way, rng: np.random.Generator) -> Array:
    """Rows of the pool that tokens of chunks have; that are no numbers, the last ones of the pool."""
    found = np.stack([rng.permutation(way.pool - 3)[: way.most] for _ in CHUNKS]).astype(np.int32)
    for chunk, n in MISSING:
        found[chunk, n] = -1
    for i, (chunk, n) in enumerate(SPECIAL + SPECIAL_SCALES):
        found[chunk, way.more[chunk] + n] = way.pool - 3 + i
    return found


def attention_inputs(way: Way, seed: int) -> dict[str, Array]:
    """A pool, chunks whose tokens are rows of it, and Q; what the probe writes."""
    rng = np.random.default_rng(seed)
    places, size = _places(way, rng), way.pool
    latent = np.exp2(rng.uniform(-3, 3, (size, way.latent)))  # sums of V do not cancel
    rope = rng.standard_normal((size, way.rope)) * 3
    latent[size - 3 : size - 1, 7] = np.nan
    latent[places[0, 2 * way.tile :][:16]] *= 4  # maxima rise
    scales = np.exp2(rng.uniform(-3, 0, (size, max(way.groups, 1)))).astype(np.float32)
    scales[places[3, 40:60]] *= 3
    scales[size - 1] = np.nan
    pool = np.full((size, way.row), 0xEE, np.uint8)
    codes = latent.astype(way.kind).view(np.uint8)
    pool[:, : codes.shape[1]] = codes
    if way.rope:
        pool[:, way.rope_at :] = rope.astype(BF16).view(np.uint8)
    if way.groups == 2:
        pool[:, way.scale_at :][:, :8] = scales.view(np.uint8)
    if not way.groups:
        pool[size - 1, :2] = np.array([np.inf], BF16).view(np.uint8)
        pool[size - 1, 2:4] = np.array([np.nan], BF16).view(np.uint8)
    q = rng.standard_normal((ROWS, way.cols // ROWS_OF_COLUMNS, way.dims))
    q[1] *= 3
    q[6, 1] = 0
    shape = (len(CHUNKS), way.cols)
    return {
        "pool": pool,
        "scales": pattern(scales),
        "places": places.view(np.uint32),
        "chunks": _chunks(way.chunks),
        "q": pattern(q.astype(BF16)),
        "max": np.full(shape, UNUSED, np.uint32),
        "sum": np.full(shape, UNUSED, np.uint32),
        "out": np.full((*shape, way.values), UNUSED, np.uint32),
    }


def _memory(way: Way, arrays: Arrays) -> Floats:
    """Rows of the pool, then one of zeros: all dims as products take them."""
    pool = arrays["pool"]
    nbytes = way.latent * np.dtype(way.kind).itemsize
    found = np.zeros((way.pool + 1, way.dims))
    latent = np.ascontiguousarray(pool[:, :nbytes]).view(way.kind).astype(np.float64)
    if way.groups:
        scales = arrays["scales"].view(np.float32).astype(np.float64)
        latent *= np.repeat(scales, way.latent // way.groups, axis=1)
        found[:-1, way.latent :] = np.ascontiguousarray(pool[:, way.rope_at :]).view(BF16).astype(np.float64)
    found[:-1, : way.latent] = latent
    return found


def _column(way: Way, rows: Floats, hidden: NDArray[np.bool_], seen: int, q: Floats) -> tuple[float, float, Floats]:
    """Maximum, sum and sums of V, relative to a maximum that follows the tiles' when they pass it by 2^SLACK."""
    top, total, out = -np.inf, 0.0, np.zeros(way.values)
    for first in range(0, seen, way.tile):
        until = min(first + way.tile, seen)
        tile = rows[first:until]
        scores = np.where(hidden[first:until], -np.inf, tile @ q * QK_SCALE)
        high = float(np.fmax.reduce(scores))
        if high > top + SLACK:
            shrink = 0.0 if np.isneginf(top) else 2.0 ** (top - high)
            top, total, out = high, total * shrink, out * shrink
        weights = np.exp2(scores - top)
        total += float(weights.sum())
        out = out + weights @ tile[:, : way.values]
    return top, total, np.full_like(out, np.nan) if np.isnan(total) else out


def _seen(chunk: tuple[int, ...], i: int) -> int:
    """How many of the chunk's tokens its row sees."""
    _, rows, tokens, begin, end = chunk
    return max(min(tokens - rows + i + 1, end) - begin, 0)


def attention_wanted(way: Way, arrays: Arrays) -> dict[str, Wanted]:
    """Of every column of every chunk its maximum, its sum, and sums of V."""
    memory, q = _memory(way, arrays), arrays["q"].view(BF16).astype(np.float64)
    places = arrays["places"].view(np.int32)
    shape, group = (len(CHUNKS), way.cols), way.cols // ROWS_OF_COLUMNS
    top, total, out = np.zeros(shape), np.zeros(shape), np.zeros((*shape, way.values))
    for n, chunk in enumerate(way.chunks):
        for col in range(way.cols):
            i = col // group
            mine = q[chunk[0] + i, col % group] if i < chunk[1] else np.zeros(way.dims)
            seen = _seen(chunk, min(i, chunk[1] - 1))
            hidden = (places[n] < 0) & way.hides
            top[n, col], total[n, col], out[n, col] = _column(way, memory[places[n]], hidden, seen, mine)
    return {
        "max": close(top, 1e-5, 1e-4),
        "sum": close(total, 2e-4),
        "out": close(out, 2.0**-9 if way.groups else 2.0**-8),
    }


# What these are made of ---------------------------------------------------------------------------------------------


def _places_inputs() -> dict[str, Array]:
    return {
        "chunks": _chunks(),
        "out": np.full((THREADS, 18), UNUSED, np.uint32),
        "seen": np.full((len(CHUNKS), 4), UNUSED, np.uint32),
    }


def _places_wanted(_: Arrays) -> dict[str, Wanted]:
    """Two warps along tokens, then two along dims; or along columns. Blocks, one more, 0 where a warp has no such."""
    out = np.zeros((THREADS, 18), np.uint32)
    for thread in range(THREADS):
        warp, lane = thread // 32, thread % 32
        m, k = warp % 2, warp // 2
        blocks = [1 + 2 * n + k if 2 * n + k < 5 else 0 for n in range(3)]
        keys = 1000 + (16 * m + lane % 16) * 176 + lane // 16 * 16
        ring = [(n % 3 + n // 2 + 1) % 3 for n in range(6)]
        largest = [max(thread, 64), max(100, 128 - thread)]
        out[thread] = [m, 0, k, k, *blocks, (2 + 1) * 2 + 1, keys, warp // 2, *ring, *largest]
    seen = [[_seen(chunk, i) if i < chunk[1] else UNUSED for i in range(4)] for chunk in CHUNKS]
    return {"out": exact(out), "seen": exact(np.array(seen, np.uint32))}


def _products_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(262)
    codes = np.zeros((32, 240), np.uint8)
    codes[:, :128] = rng.integers(-8, 9, (32, 128)).astype(np.float32).astype(E4M3).view(np.uint8)
    codes[:, 128:] = 0xFF
    q = rng.integers(-15, 16, (16, 176)) * np.exp2(rng.integers(-9, 9, (16, 1)))
    q[3] = 0
    return {
        "codes": codes.view(np.uint32),
        "q": pattern(q.astype(BF16)),
        "operands": np.full((11, 2, 32, 2), UNUSED, np.uint32),
        "same": np.full((8, 2, 32, 2), UNUSED, np.uint32),
        "factors": np.full((16, 2), UNUSED, np.uint32),
        "out": np.full((2, 16, 32), UNUSED, np.uint32),
    }


def _products(arrays: Arrays) -> dict[str, Wanted]:
    """Columns of q with their largest element in [1, 2): whole numbers over a power of two, so all sums are exact."""
    q = arrays["q"].view(BF16).astype(np.float64)
    q[5] = 0
    high = np.abs(q).max(axis=1)
    down = np.array([2.0 ** -np.floor(np.log2(x)) if x else 1.0 for x in high])
    q *= down[:, None]
    codes = np.ascontiguousarray(arrays["codes"].view(np.uint8)[:, :128]).view(E4M3).astype(np.float64)
    operands = np.zeros((11, 2, 32, 2, 2), np.uint16)
    halves, brains = pattern(q.astype(np.float16)), pattern(q.astype(BF16))
    for step in range(11):
        for col in range(16):
            for j in range(4):
                for half in range(2):
                    of_code, at = step < 8, 16 * step
                    at += 4 * j + 2 * half if of_code else 8 * half + 2 * j
                    pair = (halves if of_code else brains)[col, at : at + 2]
                    operands[step, col // 8, col % 8 * 4 + j, half] = pair
    words = operands.view(np.uint32)[..., 0]
    out = np.stack([q[:, at : at + 64] @ codes[:, at : at + 64].T for at in (0, 64)])
    return {
        "operands": exact(words),
        "same": exact(words[:8].copy()),
        "factors": exact(pattern(np.stack([down, 3 / down], axis=1).astype(np.float32))),
        "out": close(out, 0.0),
    }


def probes() -> list[Probe]:
    """All of this module."""
    chunks = (len(CHUNKS), 1, 1)
    attending = [
        Probe(
            f"library_{way.kernel}",
            UNIT,
            way.kernel,
            partial(attention_inputs, way, 260 + n),
            partial(attention_wanted, way),
            THREADS,
            chunks,
        )
        for n, way in enumerate(WAYS)
    ]
    return [
        *attending,
        Probe("library_latent_tile_places", UNIT, "latent_tile_places", _places_inputs, _places_wanted, THREADS),
        Probe("library_latent_tile_products", UNIT, "latent_tile_products", _products_inputs, _products, THREADS),
    ]
