"""Tokens moved between caches (kernels/convert_rows.cu), over the arrays of paged_probes."""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.oracle import floats
from tests.golden_gpu.paged_probes import BF16, DIMS, HEADS, PAGES, TOKENS, memory
from tests.golden_gpu.probe import Arrays, Probe
from tests.golden_gpu.segment_probes import Run, stored

UNIT: Final = "convert_rows"
ROW, SCALES, MOVED, LAST = HEADS * DIMS, 12, 20, 39


def _inputs() -> dict[str, Array]:
    arrays = memory()
    table = np.zeros((1, 8), np.uint32)
    table[0, :PAGES] = np.random.default_rng(151).permutation(PAGES)
    return {
        "table": table,
        **{name: arrays[name] for name in ("codes", "scales", "values")},
        "parts": np.zeros((64, 5), np.uint32),
    }


def _wanted(tokens_first: bool, arrays: Arrays) -> dict[str, Wanted]:
    """Runs go through the tokens first where blocks do not."""
    codes, scales, values = (arrays[name].reshape(PAGES, -1).copy() for name in ("codes", "scales", "values"))
    rows = values[:, : TOKENS * ROW].reshape(PAGES * TOKENS, ROW)
    places = [int(arrays["table"][0, t // TOKENS]) * TOKENS + t % TOKENS for t in range(2 * MOVED)]
    x = rows[places[:MOVED]].view(BF16).astype(np.float32).reshape(MOVED, HEADS, DIMS)
    chosen = np.zeros((MOVED, SCALES), np.float16)
    quantized, _, _ = stored(Run("u8", "f16", zero=True), x, chosen)
    parts = []
    for i in range(64):
        row, part = (i % MOVED, i // MOVED) if tokens_first else divmod(i, 10)
        block_row, block = divmod(i, 6) if tokens_first else (i % MOVED, i // MOVED)
        head, dim = divmod(i % 6, 3)
        value = x[block_row, block // 3, block % 3 * 16 + 4] if block_row % 3 != 2 else np.float32(0)
        parts.append([row, part, head, dim * 16, int(np.float32(value).view(np.uint32))])
    for i in range(MOVED):
        if i % 3 == 2:
            continue
        page, at = divmod(places[LAST - i], TOKENS)
        values[page, at * ROW : (at + 1) * ROW] = arrays["values"].reshape(PAGES * TOKENS, ROW)[places[i]]
        codes[page, at * ROW : (at + 1) * ROW] = quantized[i].reshape(-1)
        scales[page, at * SCALES : (at + 1) * SCALES] = chosen[i].view(np.uint16)
    return {
        "codes": exact(codes.reshape(-1)),
        "scales": floats(scales.reshape(-1).view(np.float16), "f16"),
        "values": exact(values.reshape(-1)),
        "parts": exact(np.array(parts, np.uint32)),
    }


def probes() -> list[Probe]:
    """All of this module."""
    return [
        Probe("library_convert_held", UNIT, "convert_held", _inputs, partial(_wanted, False), 64),
        Probe("library_convert_anew", UNIT, "convert_anew", _inputs, partial(_wanted, True), 64),
    ]
