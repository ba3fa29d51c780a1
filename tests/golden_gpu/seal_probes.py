"""Groups of tokens whose channels are quantized together (kernels/seal_group.cu)."""

from __future__ import annotations

from functools import partial
from typing import Final

import ml_dtypes
import numpy as np

from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe, pattern

UNIT: Final = "seal_group"
BF16: Final = ml_dtypes.bfloat16
TOKENS, HEADS, DIMS, GROUP, ROW = 8, 2, 40, 4, 96
CHANNELS: Final = HEADS * DIMS


def _inputs() -> dict[str, Array]:
    """Tokens 0 and 1 of the group lie in the tail, whose others are no numbers; rows of 96 have 80 elements."""
    rng = np.random.default_rng(321)
    tail, rows = (rng.standard_normal((n, width)).astype(BF16) for n, width in ((GROUP, CHANNELS), (2, ROW)))
    tail[2:], rows[:, CHANNELS:] = np.nan, np.nan
    tail[:2, 7], rows[:, 7] = 0, 0  # a channel of zeros
    tail[:2, 50], rows[:, 50] = -3, -3  # of one number
    tail[1, 61] = np.inf
    return {
        "tail": pattern(tail),
        "rows": pattern(rows),
        "codes": np.full((TOKENS, CHANNELS), 77, np.uint8),
        "scales": np.full((TOKENS, CHANNELS * 2), 77, np.uint16),
        "ranges": np.zeros((CHANNELS, 2), np.uint32),
    }


def _sealed(zero: bool, arrays: Arrays) -> dict[str, Wanted]:
    """Scale and zero point of each channel at the group's first token, codes of its tokens, the range's end, token 1."""
    tail, rows = (arrays[name].view(BF16).astype(np.float32) for name in ("tail", "rows"))
    x = np.concatenate([tail[:2], rows[:, :CHANNELS]])
    codes = arrays["codes"].copy()
    low, high = x.min(axis=0), x.max(axis=0) if zero else np.abs(x).max(axis=0)
    scales = arrays["scales"].view(np.float16).reshape(-1).copy()
    with np.errstate(invalid="ignore", divide="ignore"):
        if zero:
            least = np.abs(low) * np.float32(2**-15)
            scale = np.where(
                low == high, np.where(low == 0, 1, np.abs(low)), np.maximum((high - low) / np.float32(255), least)
            )
            scale = scale.astype(np.float16)
            point = np.where(low == high, 0 - np.sign(low), (0 - low) / scale.astype(np.float32)).astype(np.float16)
        else:
            scale, point = (high / np.float32(127)).astype(np.float16), np.zeros(CHANNELS, np.float16)
        wide = scale.astype(np.float32)
        quotient = np.where(wide == 0, np.float32(0), x / wide).astype(np.float32)
        number = quotient + point.astype(np.float32)
    lowest, highest = (0, 255) if zero else (-127, 127)
    code = np.clip(np.nan_to_num(np.rint(number), nan=0.0), lowest, highest).astype(np.int64)
    codes[4 : 4 + GROUP] = code.astype(np.uint8)
    each = 1 + zero
    at = 4 * CHANNELS * each
    scales[at : at + CHANNELS * each : each] = scale
    if zero:
        scales[at + 1 : at + CHANNELS * each : each] = point
    return {
        "codes": exact(codes),
        "scales": exact(pattern(scales).reshape(TOKENS, -1)),
        "ranges": exact(pattern(np.stack([high, x[1]], axis=1).astype(np.float32))),
    }


def probes() -> list[Probe]:
    """All of this module."""
    return [
        Probe(f"library_seal_{name}", UNIT, f"seal_{name}", _inputs, partial(_sealed, zero), 32)
        for name, zero in (("zero", True), ("amax", False))
    ]
