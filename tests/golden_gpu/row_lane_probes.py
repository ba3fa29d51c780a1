"""Attention of a block's warps over a tile of tokens on CUDA cores (kernels/row_lanes.cu) in float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from tests.golden_gpu.attend_probes import BF16, DIMS, E4M3, HEAD, HEADS, IN_PAGE, PAGES, Floats
from tests.golden_gpu.column_probes import UNUSED, close
from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe, pattern

UNIT: Final = "row_lanes"
# The pages of the tile's tokens; 99 is none.
TABLE: Final = (5, 2, 99, 7, 0, 0, 0, 0)
# Tokens that nobody sees, with NaN in K and in V; one with an infinity in V, whose weights are 0 in f32 where it is seen.
HIDDEN, SMALL = 3, 6


@dataclass(frozen=True)
class Way:
    """A kernel: the type of codes, tokens, columns, warps, of which `parts` share columns and have so many dims of V each."""

    kernel: str
    kind: Any
    tokens: int
    cols: int
    warps: int
    parts: int
    part_dims: int

    @property
    def dims(self) -> int:
        """Of V in shared memory."""
        return self.parts * self.part_dims


WAYS: Final = (Way("lanes_parts", BF16, 16, 32, 4, 2, 32), Way("lanes_whole", E4M3, 32, 64, 2, 1, 48))


def _inputs(way: Way, seed: int) -> dict[str, Array]:
    """The first column sees nothing, the last ones almost all."""
    rng = np.random.default_rng(seed)
    shape = (PAGES, IN_PAGE, HEADS, DIMS)
    q = rng.standard_normal((way.cols, DIMS))
    q[:, 0] = 8
    keys, values = rng.standard_normal(shape), np.exp2(rng.uniform(-4, 4, shape))
    keys[TABLE[0], SMALL, HEAD, 0] = -240
    keys[TABLE[0], HIDDEN, HEAD, 9] = values[TABLE[0], HIDDEN, HEAD, 30] = np.nan
    if way.kind is BF16:
        values[TABLE[0], SMALL, HEAD, 7] = np.inf
    sees = rng.random((way.cols, way.tokens)) < np.linspace(0, 0.95, way.cols)[:, None]
    sees[:, HIDDEN] = False
    scales = np.exp2(rng.uniform(-1, 1, (PAGES, 2, IN_PAGE, HEADS)))
    outs = {
        "lanes": (32 * way.warps, 2),
        "tokens": (32 * way.warps,),
        "query": (way.cols, DIMS),
        "keys": (way.tokens, DIMS),
        "values": (2, way.tokens, way.dims),
        "scores": (way.parts, way.cols, way.tokens),
        "weights": (way.cols, way.tokens),
        "max": (way.cols,),
        "sum": (way.cols,),
        "out": (way.cols, way.dims),
    }
    return {
        "keys_in": pattern(keys.astype(way.kind)),
        "values_in": pattern(values.astype(way.kind)),
        "scales": pattern(scales.astype(np.float32)),
        "table": np.array(TABLE, np.uint32),
        "q": pattern(q.astype(BF16)),
        "lives": (np.arange(way.cols) % 5 != 3).astype(np.uint32),
        "sees": sees.astype(np.uint32),
        **{name: np.full(size, UNUSED, np.uint32) for name, size in outs.items()},
    }


def _rows(way: Way, arrays: Arrays) -> tuple[Floats, Floats]:
    """K and V of the tile, values in float64; zeros where there is no page."""
    found = []
    scales = arrays["scales"].view(np.float32).astype(np.float64)
    for n, name in enumerate(("keys_in", "values_in")):
        cached, rows = arrays[name].view(way.kind).astype(np.float64), np.zeros((way.tokens, DIMS))
        for token in range(way.tokens):
            page, offset = TABLE[token // IN_PAGE], token % IN_PAGE
            if page < PAGES:
                scale = 1.0 if way.kind is BF16 else scales[page, n, offset, HEAD]
                rows[token] = cached[page, offset, HEAD] * scale
        found.append(rows)
    return found[0], found[1]


def _wanted(way: Way, arrays: Arrays) -> dict[str, Wanted]:
    threads, sees = 32 * way.warps, arrays["sees"] != 0
    keys, values = _rows(way, arrays)
    query = arrays["q"].view(BF16).astype(np.float64) * arrays["lives"][:, None]
    scores = query @ keys.T
    weights, out = np.zeros(sees.shape), np.zeros((way.cols, way.dims))
    top = np.full(way.cols, -np.inf)
    for col, seen in enumerate(sees):
        if not seen.any():
            continue
        top[col] = 0.5 * scores[col, seen].max()
        # A seen token's weight is never 0: the least normal number of f32.
        weights[col, seen] = np.maximum(np.exp2(0.5 * scores[col, seen] - top[col]), 2.0**-126)
        out[col, :DIMS] = (weights[col, seen, None] * values[seen]).sum(axis=0)
    thread, each = np.arange(threads), threads // way.tokens
    part = thread // 32 % way.parts
    lanes = np.stack([part * way.part_dims + thread % 4 * 4, (thread % 4 == 0) & (part == 0)], axis=1)
    rows = np.zeros((2, way.tokens, way.dims))
    rows[0, :, :DIMS] = values
    return {
        "lanes": exact(lanes.astype(np.uint32)),
        "tokens": exact((thread // each).astype(np.uint32)),
        "query": close(query, 0.0),
        "keys": close(keys, 1e-7),
        "values": close(rows, 1e-7),
        "scores": close(np.stack([scores] * way.parts), 1e-5, 1e-3),
        "weights": close(weights, 1e-3, 1e-40),
        "max": close(top, 1e-5, 1e-3),
        "sum": close(weights.sum(axis=1), 1e-3),
        "out": close(out, 1e-3),
    }


def probes() -> list[Probe]:
    """All of this module."""
    return [
        Probe(
            f"library_{way.kernel}",
            UNIT,
            way.kernel,
            partial(_inputs, way, 300 + n),
            partial(_wanted, way),
            32 * way.warps,
        )
        for n, way in enumerate(WAYS)
    ]
