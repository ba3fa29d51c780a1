"""K with a scale and a zero point a channel, and rows that wait (kernels/tile_channels.cu)."""

from __future__ import annotations

from typing import Final

import numpy as np

from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe

TOKENS, HEADS, HEAD, DIMS, PITCH, STEPS = 16, 2, 1, 40, 48, 4
FIRST_ROW: Final = 2  # the tile's first token that is asked for


def _inputs() -> dict[str, Array]:
    rng = np.random.default_rng(260)
    codes = np.zeros((TOKENS, PITCH), np.uint8)
    codes[:, : DIMS // 2] = rng.integers(0, 256, (TOKENS, DIMS // 2))
    scales = np.stack([rng.uniform(0.01, 2, (HEADS, DIMS)), rng.uniform(-3, 20, (HEADS, DIMS))], axis=-1)
    each = {name: np.zeros((STEPS, 32, 4), np.uint32) for name in ("scaled", "waiting")}
    return {
        "codes": codes.view(np.uint32),
        "scales": scales.astype(np.float16).view(np.uint16),
        "rows": rng.standard_normal((TOKENS, HEADS, DIMS)).astype(np.float16).view(np.uint16),
        **each,
        "staged": np.zeros((2, DIMS), np.uint32),
    }


def _fragments(values: Array) -> Array:
    """[token, dim] as registers hold them: of a word's 8 codes those that are 4 apart."""
    out = np.zeros((STEPS, 32, 4, 2), np.float16)
    for step in range(STEPS):
        for lane in range(32):
            for register in range(4):
                for e in range(2):
                    dim = step // 2 * 32 + 8 * (lane % 4) + 2 * (step % 2) + register // 2 + 4 * e
                    if dim < DIMS:
                        out[step, lane, register, e] = values[lane // 4 + register % 2 * 8, dim]
    return out.view(np.uint32)[..., 0]


def _wanted(arrays: Arrays) -> dict[str, Wanted]:
    packed = arrays["codes"].view(np.uint8)[:, : DIMS // 2]
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(TOKENS, DIMS).astype(np.float16)
    scales = arrays["scales"].view(np.float16)[HEAD]
    rows = arrays["rows"].view(np.float16)[:, HEAD].copy()
    rows[:FIRST_ROW] = 0
    staged = np.zeros((2, DIMS), np.uint32)
    staged[0] = arrays["scales"][HEAD].copy().view(np.uint32)[:, 0]
    return {
        "scaled": exact(_fragments((codes - scales[:, 1]) * scales[:, 0])),
        "waiting": exact(_fragments(rows)),
        "staged": exact(staged),
    }


def _dims_inputs() -> dict[str, Array]:
    return {"out": np.zeros(16, np.uint32)}


def _dims(_: Arrays) -> dict[str, Wanted]:
    """Of 4 bits codes that are 4 apart, of 8 bits neighbours."""
    return {"out": exact(np.array([0, 4, 1, 5, 2, 6, 3, 7, *range(8)], np.uint32))}


def probes() -> list[Probe]:
    """All of this module."""
    return [
        Probe("library_channel_fragments", "tile_channels", "channel_fragments", _inputs, _wanted, 32),
        Probe("library_channel_dims", "tile_channels", "channel_dims", _dims_inputs, _dims, 8),
    ]
