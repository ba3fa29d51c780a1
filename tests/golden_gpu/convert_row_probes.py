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


def _wanted(tokens_first: bool, moved: int, arrays: Arrays) -> dict[str, Wanted]:
    """Runs go through the tokens first where blocks do not. The last `moved` heads become the first ones."""
    codes, scales, values = (arrays[name].reshape(PAGES, -1).copy() for name in ("codes", "scales", "values"))
    rows = values[:, : TOKENS * ROW].reshape(PAGES * TOKENS, ROW)
    places = [int(arrays["table"][0, t // TOKENS]) * TOKENS + t % TOKENS for t in range(2 * MOVED)]
    x = rows[places[:MOVED]].view(BF16).astype(np.float32).reshape(MOVED, HEADS, DIMS)
    chosen = np.zeros((MOVED, SCALES), np.float16)
    quantized, _, _ = stored(Run("u8", "f16", zero=True), x, chosen)
    parts = []
    for i in range(64):
        row, part = (i % MOVED, i // MOVED) if tokens_first else divmod(i, 5 * moved)
        block_row, block = divmod(i, 3 * moved) if tokens_first else (i % MOVED, i // MOVED)
        head, dim = divmod(i % (3 * moved), 3)
        found = block_row < MOVED and block_row % 3 != 2
        value = x[block_row, HEADS - moved + block // 3, block % 3 * 16 + 4] if found else np.float32(0)
        parts.append([row, part, head, dim * 16, int(np.float32(value).view(np.uint32))])
    for i in range(MOVED):
        if i % 3 == 2:
            continue
        page, at = divmod(places[LAST - i], TOKENS)
        row, some = at * ROW, moved * DIMS  # of values and codes
        values[page, row : row + some] = arrays["values"].reshape(PAGES * TOKENS, ROW)[places[i]][ROW - some :]
        codes[page, row : row + some] = quantized[i].reshape(-1)[ROW - some :]
        row, some = at * SCALES, moved * SCALES // HEADS
        scales[page, row : row + some] = chosen[i, SCALES - some :].view(np.uint16)
    return {
        "codes": exact(codes.reshape(-1)),
        "scales": floats(scales.reshape(-1).view(np.float16), "f16"),
        "values": exact(values.reshape(-1)),
        "parts": exact(np.array(parts, np.uint32)),
    }


def probes() -> list[Probe]:
    """All of this module."""
    return [
        Probe("library_convert_held", UNIT, "convert_held", _inputs, partial(_wanted, False, HEADS), 64),
        Probe("library_convert_anew", UNIT, "convert_anew", _inputs, partial(_wanted, True, 1), 64),
    ]
