"""Attention on CUDA cores, some lanes a token (kernels/simt_tokens.cu), in float64."""

from __future__ import annotations

from functools import partial
from typing import Final

import ml_dtypes
import numpy as np

from tests.golden_gpu.column_probes import UNUSED, close
from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.oracle import quant
from tests.golden_gpu.probe import Arrays, Probe, pattern

UNIT: Final = "simt_tokens"
BF16 = ml_dtypes.bfloat16
PAGES, IN_PAGE, HEADS, DIMS, GROUP, HEAD, COLS, WINDOW = 6, 8, 2, 40, 2, 1, 6, 12
TABLE: Final = ((0, 1, 2, 3, 4, 5), (3, 5, 0, 4, 2, 1))
# Request, first row, rows, tokens, first token and the one after the last one.
CHUNKS: Final = (
    (0, 0, 3, 45, 0, 45),
    (1, 3, 1, 30, 19, 30),
    (1, 4, 4, 26, 10, 21),
    (0, 8, 3, 2, 0, 2),
    (0, 11, 1, 0, 0, 0),
)
ROWS: Final = 12
LANES: Final = {"simt_eighths": 8, "simt_halves": 16}
BOOK: Final = (-2.5, -1.25, -0.5, -0.25, 0.125, 0.75, 1.5, 3.0)


def _inputs(seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    shape = (PAGES, IN_PAGE, HEADS, DIMS)
    scales = (np.exp2(rng.uniform(-3, 3, (*shape[:3], 2))) / 50).astype(np.float16)
    scales[0, 2], scales[1, 4] = np.nan, np.inf  # of tokens that no row of the first chunk sees
    sums = np.full((len(CHUNKS), 2, COLS), UNUSED, np.uint32)
    return {
        "keys": pattern(rng.standard_normal(shape).astype(BF16)),
        "values": pattern(rng.integers(1, 128, shape).astype(np.int8)),
        "scales": pattern(scales),
        "table": np.array(TABLE, np.uint32),
        "chunks": np.array([[*own, 0, 1, 0, 0, 0, 0] for own in CHUNKS], np.uint32),
        "q": pattern(rng.standard_normal((ROWS, HEADS * GROUP, DIMS)).astype(BF16)),
        "max": sums,
        "sum": sums.copy(),
        "out": np.full((*sums.shape, DIMS), UNUSED, np.uint32),
    }


def _wanted(lanes: int, arrays: Arrays) -> dict[str, Wanted]:
    """A warp's sums are of the tokens that come to it; columns without a row have a query of zeros."""
    keys = arrays["keys"].view(BF16).astype(np.float64)
    scales = np.repeat(arrays["scales"].view(np.float16).astype(np.float64), 20, axis=-1)
    return _attended(lanes, arrays, keys, arrays["values"].view(np.int8).astype(np.float64) * scales)


def _coded_inputs() -> dict[str, Array]:
    """Codes of 3 bits of both; norms of tokens that no row of the first chunk sees are none."""
    rng, found = np.random.default_rng(260), _inputs(260)
    for name, norms in (("keys", "norms"), ("values", "scales")):
        found[name] = quant.pack_codes(rng.integers(0, 8, (PAGES, IN_PAGE, HEADS, DIMS)).astype(np.uint8), 3)
        numbers = np.exp2(rng.uniform(-2, 2, (PAGES, IN_PAGE, HEADS))).astype(np.float16)
        numbers[0, 2], numbers[1, 4] = np.nan, np.inf
        found[norms] = pattern(numbers)
    return {**found, "masks": np.zeros(64, np.uint32)}


def _coded(arrays: Arrays) -> dict[str, Wanted]:
    book = np.array(BOOK, np.float32).astype(np.float64)
    rows = []
    for name, norms in (("keys", "norms"), ("values", "scales")):
        codes = quant.unpack_codes(arrays[name].reshape(-1), 3).reshape(PAGES, IN_PAGE, HEADS, DIMS)
        factor = quant.corrected(arrays[norms].view(np.float16).reshape(codes.shape[:3]), codes, BOOK)
        rows.append(book[codes] * factor[..., None].astype(np.float64))
    masks = np.uint32(0xFF) << np.arange(64, dtype=np.uint32) % 32 // 8 * 8
    return {**_attended(8, arrays, *rows), "masks": exact(masks)}


def _attended(lanes: int, arrays: Arrays, keys: Array, values: Array) -> dict[str, Wanted]:
    q = arrays["q"].view(BF16).astype(np.float64)
    shape, group = (len(CHUNKS), 2, COLS), 32 // lanes
    top, total, out = np.full(shape, -np.inf), np.zeros(shape), np.zeros((*shape, DIMS))
    for n, (b, row, rows, tokens, begin, end) in enumerate(CHUNKS):
        for col in range(COLS):
            live = col // GROUP < rows
            i = col // GROUP if live else rows - 1
            mine = q[row + i, HEAD * GROUP + col % GROUP] if live else np.zeros(DIMS)
            position = tokens - rows + i
            for warp in range(2):
                seen = [
                    (TABLE[b][token // IN_PAGE], token % IN_PAGE, HEAD)
                    for token in range(begin, end)
                    if (token - begin) // group % 2 == warp and position - WINDOW < token <= position
                ]
                if not seen:
                    continue
                scores = [float(mine @ keys[at]) * 0.5 * np.log2(np.e) for at in seen]
                top[n, warp, col] = max(scores)
                weights = np.exp2(np.array(scores) - max(scores))
                total[n, warp, col] = weights.sum()
                out[n, warp, col] = weights @ np.array([values[at] for at in seen])
    return {"max": close(top, 1e-5, 1e-5), "sum": close(total, 1e-4), "out": close(out, 1e-4)}


def probes() -> list[Probe]:
    """All of this module."""
    chunks = (len(CHUNKS), 1, 1)
    return [
        Probe(f"library_{kernel}", UNIT, kernel, partial(_inputs, 250 + lanes), partial(_wanted, lanes), 64, chunks)
        for kernel, lanes in LANES.items()
    ] + [Probe("library_simt_corrected", UNIT, "simt_corrected", _coded_inputs, _coded, 64, chunks)]
