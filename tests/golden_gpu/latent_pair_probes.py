"""A pair of warps over a tile of latent rows (kernels/latent_pairs.cu). Sums are of few bits, exact in whatever order."""

from __future__ import annotations

from typing import Final

import ml_dtypes
import numpy as np

from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.mma_probes import QUAD, ROW
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe, pattern

BF16: Final = ml_dtypes.bfloat16
CODES, DIMS, TOKENS, COLUMNS = 448, 512, 16, 8
ABSENT: Final = [3, 11]


def _inputs() -> dict[str, Array]:
    rng = np.random.default_rng(270)
    q = np.zeros((COLUMNS, DIMS), np.float32)
    for col in range(COLUMNS):  # a dim of codes, and one of codes of the other half or of what is plain
        q[col, [rng.integers(256), 256 + rng.integers(192) if col % 4 else CODES + rng.integers(64)]] = rng.choice(
            [-1, 1], 2
        )
    rows = np.zeros((TOKENS, 592), np.uint8)
    rows[:, :CODES] = rng.choice([-1, 0, 1], (TOKENS, CODES)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    plain = rng.choice([-1, 0, 1], (TOKENS, DIMS - CODES)).astype(BF16)
    rows[:, CODES:576] = np.ascontiguousarray(plain).view(np.uint8)
    rows[ABSENT] = 0
    scales = np.zeros((TOKENS, 8), np.uint8)
    scales[:, :7] = 127 + rng.integers(0, 2, (TOKENS, 7))
    scales[:, 7] = 255  # what lies behind the last scale is none
    scales[ABSENT, :7] = 0
    return {
        "q": pattern(q.astype(BF16)),
        "in": rows.reshape(-1).view(np.uint32),
        "scales_in": scales.reshape(-1).view(np.uint32),
        "parts": np.zeros((2, TOKENS, COLUMNS), np.uint32),
        "scores": np.zeros((TOKENS, COLUMNS), np.uint32),
        "operands": np.zeros((2, 2, 32), np.uint32),
        "scales_of": np.zeros((2, 4, TOKENS), np.uint32),
        "flags": np.zeros(64, np.uint32),
        "merged": np.zeros(COLUMNS * (DIMS + 2), np.uint32),
    }


def _tile(arrays: Arrays) -> dict[str, Wanted]:
    rows = arrays["in"].view(np.uint8).reshape(TOKENS, 592)
    bytes_of = arrays["scales_in"].view(np.uint8).reshape(TOKENS, 8).astype(int)
    scales = np.where(bytes_of == 255, np.inf, np.where(bytes_of == 0, 0, np.exp2(bytes_of - 127.0)))
    codes = rows[:, :CODES].view(ml_dtypes.float8_e4m3fn).astype(np.float64) * np.repeat(scales[:, :7], 64, axis=1)
    k = np.concatenate([codes, np.ascontiguousarray(rows[:, CODES:576]).view(BF16).astype(np.float64)], axis=1)
    products = k[:, None] * arrays["q"].view(BF16).reshape(COLUMNS, DIMS).astype(np.float64)
    parts = np.stack([products[..., :256].sum(-1), products[..., 256:].sum(-1)])
    scores = parts.sum(axis=0) * np.tile([2, 1], 4)
    scores[ABSENT] = -np.inf
    top = scores.max(axis=0)
    weights = np.exp2(scores - top)
    assert np.isin(weights, [0, *2.0 ** np.arange(-16, 1)]).all()
    token = np.arange(TOKENS)
    by = np.where(token < 8, 2.0 ** (token % 8 % 3), 2.0 ** (token % 8 % 2))
    scaled = (weights * by[:, None]).astype(np.float16)
    first = 2 * QUAD + 8 * np.arange(2)[:, None]
    pairs = np.stack([scaled[first, ROW], scaled[first + 1, ROW]], axis=-1).view(np.uint32)[..., 0]
    out = (weights.T @ k) * np.tile([2.0, 4.0], 4)[:, None]
    out[:, :CODES] *= 0.5
    flags = np.array([3 | 1 << 3 | 1 << 4] * 32 + [3 | 1 << 3] * 32, np.uint32)
    merged = np.concatenate([top, weights.sum(axis=0), out.reshape(-1)])
    return {
        "parts": exact(pattern(parts.astype(np.float32))),
        "scores": exact(pattern(scores.astype(np.float32))),
        "operands": exact(np.stack([pairs, pairs])),
        "scales_of": exact(pattern(scales.T.reshape(2, 4, TOKENS).astype(np.float32))),
        "flags": exact(flags),
        "merged": exact(pattern(merged.astype(np.float32))),
    }


def probes() -> list[Probe]:
    """All of this module."""
    return [Probe("library_latent_pairs", "latent_pairs", "latent_pairs_tile", _inputs, _tile, 64)]
