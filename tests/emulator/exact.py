"""Exact rounding of rational numbers to binary formats: the oracle for float operations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Format:
    precision: int  # bits of the significand, the hidden one included
    least: int  # exponent of the smallest normal number
    most: int  # exponent of the largest one


F16 = Format(11, -14, 15)
BF16 = Format(8, -126, 127)
F32 = Format(24, -126, 127)
F64 = Format(53, -1022, 1023)


def rounded(x: Fraction, form: Format, mode: str = "rn") -> float:
    """The nearest number of the format in direction `mode` (rn rz rm rp)."""
    if x == 0:
        return 0.0
    magnitude = abs(x)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, form.least) - form.precision + 1)
    steps = x / quantum
    whole = {"rn": round, "rz": math.trunc, "rm": math.floor, "rp": math.ceil}[mode](steps)
    value = whole * quantum
    top = (2 - Fraction(2) ** (1 - form.precision)) * Fraction(2) ** form.most
    if abs(value) > top:
        outward = mode == "rn" or (mode == "rp" and x > 0) or (mode == "rm" and x < 0)
        return math.copysign(math.inf if outward else float(top), x)
    return math.copysign(float(value), x)
