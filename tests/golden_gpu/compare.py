"""When two results are the same: bit for bit, or as close as PTX says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.golden_gpu.numbers import DTYPES, Array, bits_of, is_float


@dataclass(frozen=True)
class Rule:
    """How an output's elements are compared: as `count` numbers of type `kind` in each element.

    Bit patterns must agree, but for floats: any NaN will do where `any_nan` (PTX leaves payload and sign open), either
    zero where `any_zero`, and what lies within `absolute` + `relative` * |right value|.
    """

    kind: str
    count: int = 1
    relative: float = 0.0
    absolute: float = 0.0
    any_nan: bool = False
    any_zero: bool = False

    @property
    def close(self) -> bool:
        """Whether it tolerates anything."""
        return self.relative > 0 or self.absolute > 0


@dataclass(frozen=True)
class Wanted:
    """What an output must be: bit patterns, one rule or one for each row, and, where a rule tolerates, exact values.

    `exact` has an axis more than `bits`, for the numbers in an element; None or NaN where the patterns say it.
    """

    bits: Array
    rules: Rule | tuple[Rule, ...]
    exact: NDArray[np.float64] | None = None


def lanes(rule: Rule, words: Array) -> Array:
    """The patterns in each element, along a new last axis."""
    width = bits_of(rule.kind)
    unsigned = words.view(f"u{words.itemsize}").astype(np.uint64)
    parts = [unsigned >> np.uint64(width * i) & np.uint64((1 << width) - 1) for i in range(rule.count)]
    return np.stack(parts, axis=-1)


def values(kind: str, patterns: Array) -> NDArray[np.float64]:
    """Patterns of a float type as float64."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        found: NDArray[np.float64] = patterns.astype(f"u{DTYPES[kind].itemsize}").view(DTYPES[kind]).astype(np.float64)
    return found


def wrong(rule: Rule, got: Array, wanted: Array, exact: Any = None, *, slack: float = 1.0) -> NDArray[np.bool_]:
    """Which elements break the rule; `slack` widens what it tolerates."""
    one, two = lanes(rule, got), lanes(rule, wanted)
    same = one == two
    if is_float(rule.kind):
        a, b = values(rule.kind, one), values(rule.kind, two)
        if rule.close and exact is not None:
            b = np.where(np.isnan(exact[..., : rule.count]), b, exact[..., : rule.count])
        if rule.any_nan or rule.close:
            same |= np.isnan(a) & np.isnan(b)
        if rule.any_zero:
            same |= (a == 0) & (b == 0)
        if rule.close:
            with np.errstate(invalid="ignore", over="ignore"):
                near = np.abs(a - b) <= slack * (rule.absolute + rule.relative * np.abs(b))
            same |= (a == b) | (near & np.isfinite(a) & np.isfinite(b))
    broken: NDArray[np.bool_] = ~same.all(axis=-1)
    return broken


def differences(wanted: Wanted, got: Array, other: Array | None = None, *, slack: float = 1.0) -> NDArray[np.bool_]:
    """Which elements of `got` are wrong: against what is wanted, or against `other` results under the same rules."""
    right = wanted.bits if other is None else other
    exact = wanted.exact if other is None else None
    if isinstance(wanted.rules, Rule):
        return wrong(wanted.rules, got, right, exact, slack=slack)
    broken = np.empty(got.shape, np.bool_)
    for rule in set(wanted.rules):  # all rows of a rule at once: a family has hundreds of rows and a handful of rules
        rows = [i for i, own in enumerate(wanted.rules) if own == rule]
        broken[rows] = wrong(rule, got[rows], right[rows], None if exact is None else exact[rows], slack=slack)
    return broken
