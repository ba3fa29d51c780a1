"""The Hadamard transform of heads, in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def signs(dim: int) -> Floats:
    """H[i, j], `[dim, dim]`: -1 to the number of bits that i and j have in common (Sylvester's order)."""
    found = [[-1.0 if (i & j).bit_count() % 2 else 1.0 for j in range(dim)] for i in range(dim)]
    return np.array(found)


def hadamard(x: Floats, lost: Floats) -> tuple[Floats, Floats]:
    """(x H / sqrt(dim) over the last axis, how far log2(dim) sums in f32 of what has lost `lost` may be from it)."""
    dim = x.shape[-1]
    steps = int(dim).bit_length() + 1  # sums, and a factor that is rounded
    off = lost + steps * 2.0**-24 * np.abs(x)
    return x @ signs(dim) * dim**-0.5, off.sum(axis=-1, keepdims=True) * np.full(dim, dim**-0.5)
