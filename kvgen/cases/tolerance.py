"""Rows that a kernel stores, held to the oracle's: as near as f32 and one rounding allow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen.reference import Place, Rows
from kvgen.reference.append import Changed
from kvgen.reference.elements import Elements
from kvgen.reference.quant import FLOATS, LARGEST, norms, values
from kvgen.reference.rounding import ulp
from kvgen.reference.segments import Coded, Part, Plain

Raw = NDArray[Any]
_LOST: Final = 2.0**-20  # of a number: f32's roundings on the way to a code
_STEP: Final = 1.001
_INTEGERS: Final = {"i8": 0.502, "i4": 0.51, "i3": 0.51, "i2": 0.51}


@dataclass
class Distance:
    """The largest difference that was recorded, and the largest share of what is allowed."""

    error: float = 0.0
    share: float = 0.0

    def record(self, off: Raw, allowed: Raw) -> None:
        """Count differences in; NaN is as far as anything can be, and where anything goes nothing is."""
        off = np.where(np.isinf(allowed), 0.0, np.where(np.isnan(off), np.inf, off))
        if off.size:
            self.error = max(self.error, float(off.max()))
            self.share = max(self.share, float((off / np.maximum(allowed, 1e-300)).max()))

    def add(self, other: Distance) -> None:
        """Count another distance in."""
        self.error, self.share = max(self.error, other.error), max(self.share, other.share)


def take_row(mine: Rows, oracle: Rows, place: Place, token: int, change: Changed, row: int) -> Distance:
    """How far a token's row, as a kernel stored it, is from `row` of `change`; the oracle's memory then takes it, bit for bit."""
    begin, found = 0, Distance()
    for got, kept in zip(mine.parts, oracle.parts, strict=True):
        dims = slice(begin, begin + got.dim)
        want, lost = change.rows[row, :, dims], change.lost[row, :, dims]
        compare(got, place, token, want, lost, found)
        _take(got, kept, place, token)
        begin += got.dim
    return found


def compare_rows(got: Raw, change: Changed, rows: NDArray[np.bool_], scale: float = 1.0) -> Distance:
    """How far rows `[T, heads, dim]` of an output are from the oracle's divided by `scale`, where `rows` says."""
    found, most = Distance(), _most(got.dtype)
    want = np.clip(change.rows[rows] / scale, -most, most)
    allowed = ulp(want, got.dtype) * 0.5001 + change.lost[rows] / scale + np.abs(want) * 2.0**-22
    found.record(np.abs(got[rows].astype(np.float64) - want), allowed)
    return found


def _most(kind: np.dtype[Any]) -> float:
    """The largest number of a type that saturates; kernels let other floats overflow."""
    return LARGEST["e4m3"] if kind.name == "float8_e4m3fn" else np.inf


def compare(part: Part, place: Place, token: int, want: Raw, lost: Raw, found: Distance) -> None:
    """How far a part of a token's row is from what it should be, `lost` being what that may be off by."""
    if isinstance(part, Plain):
        got = part.read(place, token)
        found.record(np.abs(got.astype(np.float64) - want), ulp(want, got.dtype) / 2 + lost)
        return
    scale, zero = part._stored(part.scales.read(place.scales, token) if part.scales is not None else None)
    if part.scales is not None:
        assert scale is not None
        _compare_scale(part, scale, want, lost, found)
    step = part._spread(scale)
    unit = np.ones(want.shape) if step is None else step.astype(np.float64)
    unit = unit * (1.0 if part.global_scale is None else part.global_scale)
    if part.quant.codebook is not None:
        codes = part.codes.read(place.page, token)
        if part.quant.recipe == "signs":
            assert zero is not None
            _compare_signs(part, codes, zero, want, lost, found)
            codes = codes % len(part.quant.codebook)
        return _compare_codebook(part, codes, unit, want, lost, found)
    codes = np.abs(values(part.codes.read(place.page, token), part.quant.codes.name))
    if part.scales is None:  # nobody chose a scale for these rows: codes saturate
        most = unit * LARGEST[part.quant.codes.name]
        want = np.clip(want, -most, most)
    numbers = part.numbers(place, token)
    allowed = unit * _half_step(part.quant.dtype, codes) * _STEP + lost + np.abs(want) * _LOST + 1e-30
    if (
        part.quant.recipe == "min" and zero is not None and scale is not None
    ):  # the ends of a block may lie past rounded ones
        ends = (part._spread(x.astype(np.float64)) for x in (ulp(zero, zero.dtype), ulp(scale, scale.dtype)))
        least, steps = (np.zeros(want.shape) if x is None else x for x in ends)
        allowed = allowed + least / 2 + steps * LARGEST[part.quant.codes.name] / 2
    if part.quant.recipe == "max":  # values go through e4m3
        allowed = allowed + np.abs(numbers) * 2.0**-4
    found.record(np.abs(numbers - want), allowed)


def _compare_codebook(part: Coded, codes: Raw, unit: Raw, want: Raw, lost: Raw, found: Distance) -> None:
    """Codes whose values are the nearest: within half of the wider gap beside each, at the ends as far as numbers go."""
    book = np.asarray(part.quant.codebook, np.float32).astype(np.float64)
    numbers, gaps = book[codes], np.diff(book)
    rounded = np.zeros(want.shape)
    if part.quant.recipe == "unit":  # codes are of number / norm, of which the scale is the norm over that of the codes
        of_codes = part._spread(norms(part._blocks_of(numbers[None].astype(np.float32))))
        assert of_codes is not None
        unit = unit * of_codes
    if part.quant.recipe in ("unit", "signs") or part.quant.norm_correction:  # divided before norms are rounded
        rounded = np.abs(want) * 2.0**-8
    half = np.maximum(np.append(gaps, gaps[-1]), np.append(gaps[0], gaps))[codes] / 2
    inside = np.clip(want, unit * book[0], unit * book[-1])
    allowed = unit * half * _STEP + lost + np.abs(want) * _LOST + rounded + 1e-30
    found.record(np.abs(numbers * unit - inside), allowed)


def _compare_signs(part: Coded, codes: Raw, stored: Raw, want: Raw, lost: Raw, found: Distance) -> None:
    """The rest of a row beyond its codes has their signs, but where it is as small as what rows may be off by; and its root mean
    square."""
    book = np.asarray(part.quant.codebook, np.float32).astype(np.float64)
    norm = part._spread(norms(part._blocks_of(want[None])).astype(np.float64))
    assert norm is not None
    reach = lost + np.abs(want) * _LOST + 1e-30
    left = want - book[codes % len(book)] * norm
    found.record(np.where((left >= 0) == (codes >= len(book)), 0.0, np.abs(left)), reach)
    unit = np.where(norm == 0, 1.0, norm)
    square = np.where(norm == 0, book[codes % len(book)], left / unit)[None] ** 2
    exact = np.sqrt(part._blocks_of(square).mean(axis=-1))
    off = part._blocks_of((reach / unit)[None]).max(axis=-1)
    found.record(np.abs(stored.astype(np.float64) - exact), ulp(exact, stored.dtype) + off)


def _compare_scale(part: Coded, scale: Raw, want: Raw, lost: Raw, found: Distance) -> None:
    """A computed scale, within an ulp of that of the exact row, and of what rows may be off by."""
    exact, _ = part._chosen(want[None].astype(np.float32))
    assert exact is not None
    reach = np.sign(want) * (lost + np.abs(want) * _LOST)
    sides = [part._chosen((want + sign * reach)[None].astype(np.float32))[0] for sign in (-1, 1)]
    low, high = (np.zeros(exact.shape) if s is None else s.astype(np.float64) for s in sides)
    allowed = ulp(exact.astype(np.float64), exact.dtype) + np.abs(high - low)
    found.record(np.abs(scale.astype(np.float64) - exact.astype(np.float64)), allowed)


def _half_step(kind: str, codes: Raw) -> Raw:
    """Half the distance of the codes around each, with room for a neighbour's wider half and for the rounding of the zero."""
    if kind in _INTEGERS:
        return np.full(codes.shape, _INTEGERS[kind])
    # Codes around one of exponent e are 2^(e - mantissa) apart, below the least exponent always as far.
    exponent_bits, mantissa, *_ = FLOATS[kind]
    least = 2 - (1 << (exponent_bits - 1))
    exponent = np.floor(np.log2(np.maximum(codes, 2.0**least)))
    found: Raw = 2.0 ** (exponent - mantissa - 1) * 1.07
    return found


def _take(mine: Part, oracle: Part, place: Place, token: int) -> None:
    if isinstance(mine, Coded) and isinstance(oracle, Coded):
        _copy(mine.codes, oracle.codes, place.page, token)
        if mine.scales is not None and oracle.scales is not None:
            _copy(mine.scales, oracle.scales, place.scales, token)
    elif isinstance(mine, Plain) and isinstance(oracle, Plain):
        _copy(mine.elements, oracle.elements, place.page, token)


def _copy(mine: Elements, oracle: Elements, page: int, token: int) -> None:
    oracle.write(page, token, mine.read(page, token))
