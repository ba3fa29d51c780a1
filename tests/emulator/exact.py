"""Exact rounding of rational numbers to binary formats: the oracle for float operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property


@cache
def two_to(exponent: int) -> Fraction:
    """A power of two: hundreds of thousands are asked for, and few differ."""
    return Fraction(2) ** exponent


@dataclass(frozen=True)
class Format:
    precision: int  # bits of the significand, the hidden one included
    least: int  # exponent of the smallest normal number
    most: int  # exponent of the largest one
    top: Fraction | None = None  # the largest finite number, where it has not all significand bits set

    @cached_property
    def largest(self) -> Fraction:
        return self.top or (2 - two_to(1 - self.precision)) * two_to(self.most)


F16 = Format(11, -14, 15)
BF16 = Format(8, -126, 127)
TF32 = Format(11, -126, 127)
F32 = Format(24, -126, 127)
F64 = Format(53, -1022, 1023)
E4M3 = Format(4, -6, 8, Fraction(448))
E5M2 = Format(3, -14, 15)
E2M1 = Format(2, 0, 2)
E2M3 = Format(4, 0, 2)
E3M2 = Format(3, -2, 4)


def _away(x: Fraction) -> int:
    return math.floor(x + Fraction(1, 2)) if x > 0 else math.ceil(x - Fraction(1, 2))


_TO_INTEGER: dict[str, Callable[[Fraction], int]] = {
    "rn": round, "rz": math.trunc, "rm": math.floor, "rp": math.ceil, "rna": _away,
}  # fmt: skip


def rounded(x: Fraction, form: Format, mode: str = "rn", finite: bool = False) -> float:
    """The nearest number of the format in direction `mode` (rn rz rm rp rna); `finite`: no infinity."""
    if x == 0:
        return 0.0
    magnitude, sign = abs(x), 1 if x > 0 else -1
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if two_to(exponent) > magnitude:
        exponent -= 1
    quantum = two_to(max(exponent, form.least) - form.precision + 1)
    value = _TO_INTEGER[mode](x / quantum) * quantum
    if abs(value) > form.largest:
        outward = mode in ("rn", "rna") or (mode == "rp" and x > 0) or (mode == "rm" and x < 0)
        return math.copysign(math.inf if outward and not finite else float(form.largest), sign)
    return math.copysign(float(value), sign)


def root(x: Fraction, form: Format, mode: str) -> float:
    """The square root: 80 bits of it and whether there are more decide every rounding."""
    shift = 2 * max(0, 80 - (x.numerator.bit_length() - x.denominator.bit_length()) // 2)
    scaled = x * 2**shift
    whole = math.isqrt(scaled.numerator // scaled.denominator)
    inexact = Fraction(whole) ** 2 != scaled
    return rounded(Fraction(2 * whole + inexact, 2 * 2 ** (shift // 2)), form, mode)
