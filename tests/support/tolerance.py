"""Attention held to the oracle, row by row, within what kvgen.cases.closeness allows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.closeness import HALF_ULP as HALF_ULP
from kvgen.cases.closeness import TINY as TINY
from kvgen.cases.closeness import Numerics as Numerics
from kvgen.cases.closeness import bounds as bounds
from kvgen.cases.closeness import limits as limits
from kvgen.cases.closeness import numerics as numerics
from kvgen.cases.closeness import rounder as rounder
from kvgen.reference import Decoded

Raw = NDArray[Any]


def hold(
    wanted: Decoded, given: Numerics, q: Raw, out: Raw, lse: Raw | None, rows: Iterable[int] | None = None
) -> float:
    """Every row (or those of `rows`) of out and lse against the oracle: NaN where it has NaN, exactly 0 and the empty
    log-sum-exp where it saw nothing, else within the rule. Returns the largest share of what is allowed."""
    values, share = out.astype(np.float64), 0.0
    for row in range(len(wanted.seen)) if rows is None else rows:
        seen = wanted.seen[row]
        if seen is None:
            assert np.isnan(values[row]).all(), f"row {row} is not NaN"
            assert lse is None or np.isnan(lse[row]).all(), f"row {row}: log-sum-exp is not NaN"
            continue
        empty = wanted.lse[row] == float(given.lse_empty)
        assert not values[row][empty].any(), f"row {row} sees no token, and is not 0"
        assert lse is None or (lse[row][empty] == float(given.lse_empty)).all(), f"row {row}: log-sum-exp of nothing"
        if empty.all():
            continue
        assert np.isfinite(values[row]).all(), f"row {row} is not finite"
        allowed, lse_allowed = limits(wanted, given, q, row)
        error = np.abs(values[row] - wanted.out[row])
        worst = float((error / allowed).max())
        assert worst <= 1, (
            f"row {row} (place {seen.at.places[0]}): off by {error.max():.3g}, {worst:.2f} times the bound"
        )
        share = max(share, worst)
        if lse is not None:
            off = np.abs(lse[row][~empty].astype(np.float64) - wanted.lse[row][~empty])
            assert (off <= lse_allowed[~empty]).all(), f"row {row}: log-sum-exp off by {off.max():.3g}"
    return share


def hold_counts(wanted: Decoded, given: Numerics, lse: Raw) -> None:
    """Where all scores are 0 and there are no sinks, sums are counts of tokens, exact in f32: so is the log-sum-exp, nearly."""
    assert given.score is None and given.sinks is None
    for row, seen in enumerate(wanted.seen):
        if seen is not None and len(seen.k):
            off = np.abs(lse[row].astype(np.float64) - wanted.lse[row]).max()
            assert off <= 2.0**-20 * (1 + math.log(len(seen.k))), (
                f"row {row} counts {len(seen.k)} tokens wrong: off by {off}"
            )
