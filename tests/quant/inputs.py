"""What the exhaustive tests feed the kernels."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

Singles = NDArray[np.float32]

# 1, powers of two, ordinary ones, the ends of where one reciprocal serves all, subnormal, huge, and what is no scale.
SCALES = np.array(
    [1, 0.25, 1024, 0.7, 3.1415927, 1.7e-3, 2.0**-50, np.nextafter(2.0**-50, 0), 2.0**50 * 1.3, 1e-30, 1e-40, 3e38, -0.7,
     0.0, -0.0, np.inf, np.nan], np.float32
)  # fmt: skip


@cache
def every_half() -> Singles:
    """Every bf16, every f16, as f32."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        return np.concatenate([bits.view(bfloat16).astype(np.float32), bits.view(np.float16).astype(np.float32)])


@cache
def every_bf16() -> Singles:
    return every_half()[: 1 << 16]


@cache
def patterns(count: int = 1 << 18) -> Singles:
    """Random f32 bits, and random ones of ordinary size."""
    rng = np.random.default_rng(11)
    bits = rng.integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32)
    ordinary = (bits & 0x807FFFFF) | (rng.integers(127 - 20, 127 + 20, count).astype(np.uint32) << 23)
    return np.concatenate([bits, ordinary]).view(np.float32)


def around(middles: Any) -> Singles:
    """Those numbers, the f32 below and above each, and their opposites; repeated to a multiple of 1024."""
    x = np.asarray(middles, np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(-np.inf)), np.nextafter(x, np.float32(np.inf))])
    x = np.concatenate([x, -x])
    return np.resize(x, -(-len(x) // 1024) * 1024).astype(np.float32)


def hard_quotients() -> tuple[Singles, Singles]:
    """Divisors `[n]` and dividends `[n, 8]` whose quotients lie as near to the middle of two f32 as quotients can: of
    X / S = (M -+ 1 / S) / 2^25 with odd M of 25 bits, that is M * S = +-1 modulo 2^25.
    """
    rng = np.random.default_rng(23)
    divisor = rng.integers(1 << 22, 1 << 23, 1 << 15) * 2 + 1
    inverse = divisor.copy()
    for _ in range(5):  # Newton: three bits are right, then six, ...
        inverse = inverse * (2 - divisor * inverse) % (1 << 25)
    rows = []
    for middle, off in ((inverse, -1), ((1 << 25) - inverse, 1)):
        dividend = (middle * divisor + off) >> 25
        rows += [np.where(middle >= 1 << 24, dividend, divisor)] * 4  # a smaller M is the middle of nothing
    powers = np.exp2(rng.integers(-6, 7, 8)) * rng.choice([-1, 1], 8)
    x, scale = np.stack(rows, axis=1) * powers, divisor * np.exp2(rng.integers(-40, 20, len(divisor)))
    return scale.astype(np.float32), (x * (scale / divisor)[:, None]).astype(np.float32)
