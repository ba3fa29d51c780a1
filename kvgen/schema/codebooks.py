"""Codebooks: what codes stand for where they are no numbers themselves."""

from __future__ import annotations

import functools
import math
from itertools import pairwise

_STEPS = 500


@functools.lru_cache(maxsize=64)
def lloyd_max(bits: int, dim: int) -> tuple[float, ...]:
    """The 2^bits ascending values with the least mean square error for numbers of N(0, 1 / dim), the distribution of the
    elements of a rotated unit vector of `dim` elements (Lloyd 1982, Max 1960; TurboQuant, arXiv 2504.19874).
    """
    if not 1 <= bits <= 8 or dim < 1:
        raise ValueError(
            f"lloyd_max: got bits={bits}, dim={dim}; bits are 1 to 8, and dim is 1 at least; use bits=4, dim=128"
        )
    count = 2**bits
    values = [7 * (i + 0.5) / count - 3.5 for i in range(count)]
    for _ in range(_STEPS):  # each value becomes the mean of what is nearest to it
        middles = [-math.inf, *((a + b) / 2 for a, b in pairwise(values)), math.inf]
        means = [_mean(a, b) for a, b in pairwise(middles)]
        if max(abs(a - b) for a, b in zip(values, means, strict=True)) < 1e-14:
            break
        values = means
    return tuple(v / math.sqrt(dim) for v in values)


def _mean(low: float, high: float) -> float:
    """Of a standard normal number between two."""
    return (_density(low) - _density(high)) / (_below(high) - _below(low))


def _density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _below(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2
