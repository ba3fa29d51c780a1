"""The surface over a paged cache (kernels/kv_cache.cu) and the operands of attention (kernels/operands.cu).

The cache is that of kernels/paged.cuh: pages of 8 tokens, 2 heads of 40 dims. K are bytes with f16 scales and zero points
of 16 dims each, its last 8 dims bf16 behind them; V is bf16. Five pages; K's take 12 rows of 80 bytes, of which 8 are
tokens, and their scales 10 rows of 12.
"""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np

from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.oracle import floats
from tests.golden_gpu.probe import Arrays, Probe, pattern

BF16: Final = ml_dtypes.bfloat16
NONE: Final = 2**64 - 1
NO_ROW: Final = 0x7FFFFF00
BAD_PAGE, BAD_POSITION = 1, 2
PAGES, TOKENS, HEADS, DIMS, COLUMNS = 5, 8, 2, 40, 6
OFFSETS: Final = (2, 17, 17, 38)


def hashed(text: str) -> int:
    """What the kernels make of a name."""
    found = 5381
    for byte in text.encode():
        found = (found * 33 + byte) % 2**64
    return found


def encoded(token: int) -> int:
    """The sparse index that a query asks for, an int32."""
    return (token - 3 + 2**31) % 2**32 - 2**31


def memory() -> dict[str, Array]:
    """The cache's arrays, in the order of the parameters."""
    rng = np.random.default_rng(98)
    codes = rng.integers(0, 256, PAGES * 960, np.uint8)
    rope = rng.standard_normal((PAGES, 128)).astype(BF16)
    codes.reshape(PAGES, 960)[:, 640:896] = rope.view(np.uint8)
    scales = rng.uniform(0.01, 2, PAGES * 120).astype(np.float16)
    scales[1::2] = rng.integers(-5, 260, PAGES * 60)
    table = rng.integers(0, PAGES, (3, 8)).astype(np.uint32)
    table[0, 3], table[2, 0], table[1, 5] = PAGES, 2**32 - 1, 2**31 + 4
    values = rng.standard_normal(PAGES * 640).astype(BF16)
    lengths = np.array([11, -1, 48], np.int32)
    return {"codes": codes, "scales": pattern(scales), "values": pattern(values), "lengths": lengths, "table": table}


def queries() -> Array:
    """[n, 4]: (b, token, head, dim), also past the table and in the RoPE part."""
    rng = np.random.default_rng(99)
    found = rng.integers(0, (3, 52, HEADS, 24), (128, 4), np.uint32)
    found[:, 3] *= 2
    found[:8, 1] = [48, 49, 2**31, 2**32 - 1, 0, 7, 8, 47]
    return found


class Paged:
    """The arrays as the semantics have them."""

    def __init__(self, arrays: Arrays) -> None:
        self.codes, self.table = arrays["codes"], arrays["table"]
        self.scales = arrays["scales"].view(np.float16).astype(np.float32).reshape(PAGES, -1)
        self.values = arrays["values"].view(BF16).astype(np.float32).reshape(PAGES, -1)
        self.lengths = [int(n) if n >= 0 else 2**32 - 1 for n in arrays["lengths"]]

    def page(self, b: int, token: int) -> tuple[int, int]:
        """The id, and what is wrong with it."""
        if token // TOKENS >= COLUMNS:
            return 2**32 - 1, BAD_POSITION
        found = int(self.table[b, token // TOKENS])
        return found, 0 if found < PAGES else BAD_PAGE

    def rows(self, b: int, token: int, step: int) -> int:
        """A token's row where a page takes `step` of them."""
        page, fault = self.page(b, token)
        return NONE if fault else page * step + token % TOKENS

    @staticmethod
    def place(token: int, head: int, dim: int) -> int:
        return (token % TOKENS * HEADS + head) * DIMS + dim

    @staticmethod
    def scale_place(token: int, head: int, dim: int) -> int:
        return token % TOKENS * 12 + (head * 3 + dim // 16) * 2

    def k(self, page: int, token: int, head: int, dim: int) -> Any:
        """A value of K."""
        if dim >= DIMS:
            rope = self.codes.reshape(PAGES, 960)[page, 640:896].copy().view(BF16)
            return np.float32(rope[(token % TOKENS * HEADS + head) * 8 + dim - DIMS])
        at = self.scale_place(token, head, dim)
        code = np.float32(self.code(page, token, head, dim))
        return (code - self.scales[page, at + 1]) * self.scales[page, at]

    def code(self, page: int, token: int, head: int, dim: int) -> int:
        return int(self.codes[page * 960 + self.place(token, head, dim)])

    def v(self, page: int, token: int, head: int, dim: int) -> Any:
        return np.float32(self.values[page, self.place(token, head, dim)])

    def facts(self, is_v: bool, b: int, token: int, head: int, dim: int) -> list[int]:
        """The numbers of kv_cache_ask."""
        page, fault = self.page(b, token)
        step = 8 if is_v else 12
        sparse = encoded(token)
        pointer, scale = page * 960 + self.place(token, head, dim), page * 120 + self.scale_place(token, head, dim)
        if is_v:
            pointer, scale = (page * 640 + self.place(token, head, dim)) * 2, 0
        return [
            self.lengths[b],
            0,
            1,
            9,
            44,
            TOKENS,
            page << 32 | token % TOKENS << 1 | (fault == 0),
            step,
            (PAGES - 1) * step + TOKENS,
            self.rows(b, token, step),
            head * DIMS,
            sparse if sparse < 0 else sparse // TOKENS * step + sparse % TOKENS,
            # The RoPE part has another type, and no scales.
            NONE if fault or (not is_v and dim >= DIMS) else pointer,
            NONE if fault or is_v or dim >= DIMS else scale * 2,
            NONE if is_v else 0,
            hashed("PagedKVCache"),
            token & -token,
            HEADS << 32 | DIMS << 1,
            TOKENS << 16 | (1 << 8 | 40 << 1 if is_v else 16 << 8 | 3 << 1 | 1),
            0 if is_v else (PAGES - 1) * 10 + TOKENS,
            0 if is_v else self.rows(b, token, 10),
            1 << 9 | (fault == 0) << 8 | fault,  # no tail: every token is an element
        ]

    def reads(self, is_v: bool, b: int, token: int, head: int, dim: int) -> list[Any]:
        """The floats of kv_cache_ask."""
        page, fault = self.page(b, token)
        if fault:
            return [0.0] * 11
        value = self.v if is_v else self.k
        two = [value(page, token, head, dim + i) for i in range(2)]
        wide = [np.float32(BF16(value(page, token, head, dim // 4 * 4 + i))) for i in (0, 3)]
        if is_v:
            return [*two, *wide, *two, 0, 0, 0, 0, 0]
        plain = dim >= DIMS  # the RoPE part has no codes and no scales
        codes = [0 if plain else self.code(page, token, head, dim + i) for i in range(2)]
        at = self.scale_place(token, head, dim % 24)
        zero = 0 if plain else self.scales[page, self.scale_place(token, head, dim) + 1]
        return [*two, *wide, *two, *codes, self.scales[page, at], self.scales[page, at + 2], zero]


# kv_cache.cuh -------------------------------------------------------------------------------------------------------


def _ask_inputs() -> dict[str, Array]:
    found = queries()
    return {
        "queries": found,
        **memory(),
        "numbers": np.zeros((128, 2, 22), np.uint64),
        "floats": np.zeros((128, 2, 12), np.uint32),
    }


def _ask(arrays: Arrays) -> dict[str, Wanted]:
    cache = Paged(arrays)
    numbers, reads = np.zeros((128, 2, 22), np.uint64), np.zeros((128, 2, 12), np.float32)
    for i, (b, token, head, dim) in enumerate(arrays["queries"].tolist()):
        for is_v in (False, True):
            place = (b, token, head, dim % DIMS if is_v else dim)
            numbers[i, int(is_v)] = [n % 2**64 for n in cache.facts(is_v, *place)]
            reads[i, int(is_v), :11] = cache.reads(is_v, *place)
    return {"numbers": exact(numbers), "floats": floats(reads)}


def _store_inputs() -> dict[str, Array]:
    """Places that no two threads share; the last ones are nowhere."""
    rng = np.random.default_rng(100)
    arrays, free = (
        memory(),
        {(p, t, h, d) for p in range(PAGES) for t in range(TOKENS) for h in range(HEADS) for d in range(0, DIMS, 8)},
    )
    rows: list[list[int]] = []
    while len(rows) < 56:
        b, token, head, dim = (int(n) for n in rng.integers(0, (3, 48, HEADS, 5)))
        page, place = int(arrays["table"][b, token // TOKENS]), dim * 8
        if (page, token % TOKENS, head, place) in free:
            free.remove((page, token % TOKENS, head, place))
            rows.append([b, token, head, place])
    rows += [[0, 24 + i, 0, 0] for i in range(4)] + [[1, 48 + i, 1, 16] for i in range(4)]
    x = rng.uniform(-4, 260, (64, 8)).astype(np.float32)
    return {"queries": np.array(rows, np.uint32), "in": pattern(x), **arrays}


def _store(arrays: Arrays) -> dict[str, Wanted]:
    cache, x = Paged(arrays), arrays["in"].view(np.float32)
    codes, scales = arrays["codes"].copy(), arrays["scales"].copy().view(np.float16)
    values = arrays["values"].copy().view(BF16)
    for row, (b, token, head, dim) in zip(x, arrays["queries"].tolist(), strict=True):
        page, fault = cache.page(b, token)
        if fault:
            continue
        at = cache.place(token, head, dim)
        codes[page * 960 + at :][:8] = np.rint(np.clip(row, 0, 255)).astype(np.uint8)
        values[page * 640 + at :][:8] = row.astype(BF16)
        if dim == 0:
            codes[page * 960 + 640 + (token % TOKENS * HEADS + head) * 16 :][:16] = row.astype(BF16).view(np.uint8)
        if dim == 16:
            scales[page * 120 + cache.scale_place(token, head, dim)] = row[0]
    return {"codes": exact(codes), "scales": exact(pattern(scales)), "values": exact(pattern(values))}


# Forms of kv_cache_populate: rows of a tile, alignment of its first, rows of a page, whether the second of a pair.
TILES: Final = ((64, 64, 12, False), (32, 16, 12, True), (16, 8, 8, False), (4, 4, 8, True))


def _tile_inputs() -> dict[str, Array]:
    places = np.array(
        [[b, tile] for b in range(3) for tile in (0, 1, 2, 3, 5, 7, 11, 13, 300)] + [[0, 2**26]] * 5, np.uint32
    )
    return {"places": places, **memory(), "rows": np.zeros((32, 4, 16), np.uint32)}


def _tiles(arrays: Arrays) -> dict[str, Wanted]:
    cache, out = Paged(arrays), np.zeros((32, 4, 16), np.uint32)
    for i, (b, tile) in enumerate(arrays["places"].tolist()):
        for form, (size, align, step, second) in enumerate(TILES):
            start, piece = tile * align % 2**32, min(size, TOKENS)
            rows = [min(cache.rows(b, start + at, step), NO_ROW) for at in range(0, size, piece)]

            def row(offset: int, rows: list[int] = rows, piece: int = piece) -> int:
                return rows[offset // piece] + offset % piece

            shift = size // 2 if second else 0
            out[i, form, : len(rows)] = rows
            out[i, form, 8:14] = [
                len(rows),
                row(0),
                row(size - 1),
                row(size // 2 + 1),
                row(shift),
                row(shift + size // 2 - 1),
            ]
    return {"rows": exact(out)}


# operands.cuh -------------------------------------------------------------------------------------------------------


def _operand_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(101)
    found = queries()
    found[:, 3] %= DIMS
    found[3, 1] -= 16  # no tile ends past 2^32
    found[64:, 1] %= 24  # tokens that rows have
    more: dict[str, Array] = {"tensor": rng.integers(0, 256, 2 * 30 * HEADS * DIMS // 2, np.uint8)}
    more["factors"] = pattern(rng.standard_normal(2 * 30 * HEADS * 3).astype(np.float32))
    more["ragged"] = pattern(rng.standard_normal(40 * HEADS * DIMS).astype(BF16))
    more["small"] = pattern(rng.standard_normal(40 * HEADS * 2).astype(np.float16))
    more["offsets"] = np.array(OFFSETS, np.int32)
    return {"queries": found, **memory(), **more, "numbers": np.zeros((128, 4, 16), np.uint64)}


def _bits(x: float) -> int:
    return int(np.float32(x).view(np.uint32))


def _clipped(row: int) -> int:
    return min(row, NO_ROW)


def _of_cache(cache: Paged, of_scales: bool, b: int, token: int, head: int, dim: int) -> list[int]:
    """A cache, or its scales, as an operand."""
    page, fault = cache.page(b, token)
    place = cache.scale_place(token, head, dim)
    scale = NONE if fault else (page * 120 + place) * 2
    step = 10 if of_scales else 12
    start = token // 8 * 8
    tile = [_clipped(cache.rows(b, start + at, step)) for at in (0, 8)]
    sparse = encoded(token)
    return [
        scale if of_scales else NONE if fault else page * 960 + cache.place(token, head, dim),
        scale,
        0 if fault else _bits(float(cache.scales[page, place])),
        cache.lengths[b],
        44,
        (PAGES - 1) * step + TOKENS,
        cache.rows(b, token, step),
        cache.rows(b, token, 10),
        0,
        2,
        *tile,
        (_clipped(cache.rows(b, token // 4 * 4, step)) + 3) % 2**32,
        hashed("KVCacheScalesMHAOperand" if of_scales else "KVCacheMHAOperand"),
        TOKENS << 16 | (DIMS << 1 if of_scales else 16 << 1 | 1),
        0 if of_scales else sparse if sparse < 0 else sparse // TOKENS * step + sparse % TOKENS,
    ]


def _of_rows(
    scales: Array,
    row_of: dict[int, int],
    total: int,
    count: tuple[int, int],
    layout: tuple[int, int, int, int],
    name: str,
    place: tuple[int, int, int],
) -> list[int]:
    """Rows, contiguous or ragged. `count`: tokens of the request, of the longest; `layout`: elements that share a byte or
    bytes an element (negative), scales of a row, bytes of a scale, its dims.
    """
    token, head, dim = place
    row = row_of.get(token, NONE)
    size, each, scale_bytes, granularity = layout
    element = (row * HEADS + head) * DIMS + dim
    at = (row * HEADS + head) * each + dim // granularity
    first, pair = row_of.get(token // 8 * 8, NONE), row_of.get(token // 4 * 4, NONE)
    missing = row == NONE
    sparse = encoded(token)
    return [
        NONE if missing else element // size if size > 0 else element * -size,
        NONE if missing else at * scale_bytes,
        0 if missing else _bits(float(scales[at])),
        *count,
        total,
        row,
        row,
        0,
        1,
        _clipped(first),
        _clipped(first),
        (_clipped(pair) + 3) % 2**32,
        hashed(name),
        granularity << 1 | 1,
        sparse,
    ]


def _operands(arrays: Arrays) -> dict[str, Wanted]:
    cache, out = Paged(arrays), np.zeros((128, 4, 16), np.uint64)
    factors, small = arrays["factors"].view(np.float32), arrays["small"].view(np.float16).astype(np.float32)
    begins = arrays["offsets"].tolist()
    for i, (b, token, head, dim) in enumerate(arrays["queries"].tolist()):
        whole = {t: b * 30 + t for t in range(30)} if b < 2 else {}
        length = begins[b + 1] - begins[b]
        ragged = {t: begins[b] + t for t in range(length)}
        place = (token, head, dim)
        rows = [
            _of_cache(cache, False, b, *place),
            _of_cache(cache, True, b, *place),
            _of_rows(factors, whole, 60, (30, 30), (2, 3, 4, 14), "LayoutTensorMHAOperand", place),
            _of_rows(small, ragged, 40, (length, 21), (-2, 2, 2, 20), "RaggedMHAOperand", place),
        ]
        out[i] = [[n % 2**64 for n in row] for row in rows]
    return {"numbers": exact(out)}


def probes() -> list[Probe]:
    """All of this module."""
    return [
        Probe("library_kv_cache_ask", "kv_cache", "kv_cache_ask", _ask_inputs, _ask, 64, (2, 1, 1)),
        Probe("library_kv_cache_store", "kv_cache", "kv_cache_store", _store_inputs, _store, 64),
        Probe("library_kv_cache_populate", "kv_cache", "kv_cache_populate", _tile_inputs, _tiles, 32),
        Probe("library_operands", "operands", "operands_ask", _operand_inputs, _operands, 64, (2, 1, 1)),
    ]
