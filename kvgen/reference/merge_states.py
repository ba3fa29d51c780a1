"""merge_states: attention over disjoint sets of keys, made one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def merge_states(
    outs: NDArray[Any], lses: NDArray[Any], *, base: str = "e", empty: str = "-inf"
) -> tuple[Floats, Floats]:
    """outs `[S, T, heads, dim]` and lses `[S, T, heads]` -> (out `[T, heads, dim]`, lse `[T, heads]`), float64.

    A state's share is base^lse over the sum of them. One whose lse is `empty` (or -inf) saw no key and has no share,
    whatever its values; where there is no other, out is 0 and lse `empty`. NaN stays NaN.
    """
    none = float(empty)
    values, sums = outs.astype(np.float64), lses.astype(np.float64)
    out, lse = np.zeros(values.shape[1:]), np.full(sums.shape[1:], none)
    unit = math.log(2) if base == "2" else 1.0
    for t, h in np.ndindex(*lse.shape):
        saw = [s for s in range(len(sums)) if sums[s, t, h] not in (none, -np.inf)]
        if not saw:
            continue
        natural = sums[saw, t, h] * unit
        if not np.isfinite(natural).all():  # an overflow, or no number: there are no shares
            out[t, h], lse[t, h] = np.nan, np.nan
            continue
        top = natural.max()
        weights = np.exp(natural - top)
        out[t, h] = weights @ values[saw, t, h] / weights.sum()
        lse[t, h] = (top + math.log(weights.sum())) / unit
    return out, lse
