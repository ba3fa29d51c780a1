"""Quantization: the codes of every element type, and how a block of values gets a scale.

A code's byte holds its bits as memory has them: floats as they are, signed integers in two's complement, narrower codes in the
low bits (`pack_codes` joins them). Values are float64; where the kernels round to f32, so does the oracle, and says
where. Nothing raises or warns for values that have no code: NaN, infinities and overflow have defined results.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn, float8_e8m0fnu
from numpy.typing import NDArray

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]
Singles = NDArray[np.float32]

# Exponent bits, mantissa bits, largest finite number, whether what follows it is infinity.
FLOATS: Final = {"e4m3": (4, 3, 448.0, False), "e5m2": (5, 2, 57344.0, True), "e2m1": (2, 1, 6.0, False)}
# Bits of a code, smallest and largest code that casting makes.
_INTEGERS: Final = {
    "i8": (8, -127, 127), "u8": (8, 0, 255), "i4": (4, -7, 7), "u4": (4, 0, 15), "u3": (3, 0, 7), "u2": (2, 0, 3)
}  # fmt: skip
_ROUNDED: Final[dict[str, Any]] = {"f32": np.float32, "f16": np.float16, "bf16": bfloat16, "e4m3": float8_e4m3fn}

LARGEST: Final = {**{n: f[2] for n, f in FLOATS.items()}, **{n: float(i[2]) for n, i in _INTEGERS.items()}}
"""The largest code of each element type: what a block's amax is divided by."""


def code_dtype(dtype: str, zero: bool) -> str:
    """The element type in memory of a spec's dtype: with zero points, integers are unsigned."""
    return {"i8": "u8", "i4": "u4", "i3": "u3", "i2": "u2"}.get(dtype, dtype) if zero else dtype


def values(codes: Array, dtype: str) -> Floats:
    """The numbers that codes (uint8, of any shape) stand for: every byte, or every number of so many bits, has one."""
    codes = np.asarray(codes, np.int64)
    if dtype in _INTEGERS:
        bits, least, _ = _INTEGERS[dtype]
        negative = (least < 0) & (codes >= 1 << (bits - 1))
        return np.where(negative, codes - (1 << bits), codes).astype(np.float64)
    exponent_bits, mantissa_bits, largest, infinite = FLOATS[dtype]
    magnitude = codes & ((1 << (exponent_bits + mantissa_bits)) - 1)
    exponent, mantissa = magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1)
    significand = np.where(exponent > 0, mantissa + (1 << mantissa_bits), mantissa)
    bias = (1 << (exponent_bits - 1)) - 1
    value = np.ldexp(significand.astype(np.float64), np.maximum(exponent, 1) - bias - mantissa_bits)
    beyond = value > largest
    value = np.where(beyond, np.inf if infinite else np.nan, value)
    if infinite:
        value = np.where(beyond & (mantissa > 0), np.nan, value)
    return np.where(codes > (1 << (exponent_bits + mantissa_bits)) - 1, -value, value)


def cast(x: Array, dtype: str) -> Bytes:
    """The codes nearest to x, ties to even; what is too large, infinities too, becomes the largest.

    NaN: fp8 0x7f, e2m1 +6, integers 0. Zero: fp8 keeps its sign, e2m1 gives +0 for all that rounds to zero.
    """
    with np.errstate(invalid="ignore"):  # a signalling NaN
        x = np.asarray(x, np.float64)
    nan = np.isnan(x)
    if dtype in _INTEGERS:
        bits, least, most = _INTEGERS[dtype]
        whole = np.rint(np.clip(np.where(nan, 0.0, x), least, most)).astype(np.int64)
        return np.asarray(whole & ((1 << bits) - 1), np.uint8)
    largest = FLOATS[dtype][2]
    # Codes of magnitudes ascend with them: the nearest is at one side of the midpoints around x, the even one at a midpoint.
    middles = _middles(dtype)
    magnitude = np.where(nan, largest, np.abs(x))
    below, above = np.searchsorted(middles, magnitude, "left"), np.searchsorted(middles, magnitude, "right")
    code = np.where(below % 2 == 0, below, above)
    sign = np.signbit(x) & ~nan
    if dtype == "e2m1":
        return np.where(sign & (code > 0), code | 8, code).astype(np.uint8)
    return np.where(nan, 0x7F, code | sign * 128).astype(np.uint8)


@cache
def _middles(dtype: str) -> Floats:
    """Halfway between neighbouring magnitudes of a float type."""
    exponent_bits, mantissa_bits, _, _ = FLOATS[dtype]
    every = values(np.arange(1 << (exponent_bits + mantissa_bits)), dtype)
    grid = every[np.isfinite(every)]
    return (grid[:-1] + grid[1:]) / 2


def round_to(x: Array, dtype: str) -> Array:
    """x rounded to a dtype of scales or outputs (f32, f16, bf16, e4m3, e8m0), as an array of it; e4m3 saturates, and e8m0
    is of powers of two alone."""
    if dtype == "e4m3":
        return cast(x, "e4m3").view(float8_e4m3fn)
    if dtype == "e8m0":
        return _exponents(x).view(float8_e8m0fnu)
    with np.errstate(over="ignore"):
        rounded: Array = np.asarray(x).astype(_ROUNDED[dtype])
    return rounded


def _exponents(x: Array) -> Bytes:
    """The e8m0 bytes of powers of two from 2^-127 to 2^127: the exponent + 127; 255, NaN, of all that is not finite."""
    significand, exponent = np.frexp(np.asarray(x).astype(np.float64))
    finite = np.isfinite(significand)
    if not (significand[finite] == 0.5).all():
        raise ValueError("x: got numbers that are no powers of two")
    return np.where(finite, exponent - 1 + 127, 255).astype(np.uint8)


def _single(x: Array) -> Singles:
    return np.asarray(x).astype(np.float32)


def choose(
    x: Array,
    dtype: str,
    scale_dtype: str,
    recipe: str = "amax",
    zero: bool = False,
    global_scale: float | None = None,
    *,
    amax_min: float | None = None,
    scale_min: float | None = None,
    codebook: Sequence[float] | None = None,
) -> tuple[Array, Array | None]:
    """The scale of every block, and its zero with `zero`, both arrays of `scale_dtype`; a block is x's last axis.

    `dtype` is the spec's ("i8" also with `zero`); `global_scale` belongs to recipe "global" alone, the floors `amax_min` of
    the largest magnitude and `scale_min` of its quotient to "amax" and "pow2".
    """
    x = _single(x)
    with np.errstate(all="ignore"):
        if recipe in ("norm", "unit", "signs"):
            assert codebook is not None
            return _norms(x, recipe, scale_dtype, codebook)
        if recipe == "min":
            return _from_least(x, np.float32(LARGEST[code_dtype(dtype, True)]), scale_dtype)
        if zero:
            return _asymmetric(x, np.float32(LARGEST[code_dtype(dtype, True)]), scale_dtype)
        amax = np.abs(x).max(axis=-1)
        largest = np.float32(LARGEST[dtype] if codebook is None else np.abs(codebook).max())
        if recipe in ("amax", "pow2"):
            raised = amax if amax_min is None else np.maximum(amax, np.float32(amax_min))
            quotient = raised / largest
            if scale_min is not None:
                quotient = np.maximum(quotient, np.float32(scale_min))
            return round_to(quotient if recipe == "amax" else _power_above(quotient), scale_dtype), None
        if recipe == "max":
            wanted = np.minimum(np.maximum(amax, np.float32(1e-12)) / largest, np.float32(448))
            return round_to(np.maximum(values(cast(wanted, "e4m3"), "e4m3"), 2.0**-9), "e4m3"), None
        assert recipe == "global" and global_scale is not None, recipe
        return round_to(amax / (largest * np.float32(global_scale)), "e4m3"), None


def _power_above(x: Singles) -> Singles:
    """2^ceil(log2 x), at least 2^-126; NaN and infinity as they are."""
    significand, exponent = np.frexp(x.astype(np.float64))
    power = np.ldexp(1.0, np.where(significand == 0.5, exponent - 1, exponent))
    return _single(np.where(np.isfinite(x), np.maximum(np.where(x == 0, 0.0, power), 2.0**-126), x))


def _asymmetric(x: Singles, largest: np.float32, scale_dtype: str) -> tuple[Array, Array]:
    low, high = x.min(axis=-1), x.max(axis=-1)
    wanted = (high - low) / largest
    if scale_dtype == "f16":  # or the zero point of a block far from 0 would be infinite
        wanted = np.maximum(wanted, np.abs(low) * np.float32(2.0**-15))
    scale = round_to(wanted, scale_dtype)
    rounded = _single(scale)
    zero = np.where(rounded == 0, np.float32(0), (np.float32(0) - low) / rounded)
    constant = low == high
    scale = np.where(constant, round_to(np.where(low == 0, np.float32(1), np.abs(low)), scale_dtype), scale)
    return scale, round_to(np.where(constant, -np.sign(low) + np.float32(0), zero), scale_dtype)


def norms(x: Array) -> Singles:
    """Euclidean norms along the last axis, added up in float64."""
    with np.errstate(all="ignore"):
        return _single(np.sqrt((np.asarray(x, np.float64) ** 2).sum(axis=-1)))


def _norms(x: Singles, recipe: str, scale_dtype: str, codebook: Sequence[float]) -> tuple[Array, Array | None]:
    """Norms, with "unit" over those of what the codes of x / norm stand for; with "signs" the root mean squares of what these
    leave of x / norm, in f32."""
    norm, book = norms(x), np.asarray(codebook, np.float32)
    if recipe == "norm":
        return round_to(norm, scale_dtype), None
    with np.errstate(all="ignore"):
        direction = np.where(norm[..., None] == 0, np.float32(0), x / norm[..., None])
    stand_for = book[_nearest(direction, codebook)]
    if recipe == "signs":
        left = (direction - stand_for).astype(np.float64)
        return round_to(norm, scale_dtype), round_to(_single(np.sqrt((left**2).mean(axis=-1))), scale_dtype)
    of_codes = norms(stand_for)
    return round_to(np.where(of_codes == 0, np.float32(0), norm / of_codes), scale_dtype), None


def corrected(norm: Array, codes: Bytes, codebook: Sequence[float]) -> Singles:
    """The factor of the values of codes `[..., block]` where readers correct norms `[...]`: the norm over that of the
    values, of which each square is rounded to a whole number of units; the norm where all are 0."""
    book = np.asarray(codebook, np.float32).astype(np.float64)
    _, exponent = np.frexp(np.abs(book).max())
    unit = 4.0 ** (int(exponent) - 11)
    squares = np.rint(book[codes] ** 2 / unit).sum(axis=-1)
    with np.errstate(all="ignore"):
        of_values = np.sqrt(_single(squares)) * np.float32(np.sqrt(unit))
        return np.where(squares == 0, _single(norm), _single(norm) / of_values)


def _nearest(x: Singles, codebook: Sequence[float]) -> Bytes:
    """The codes whose values are nearest to x, the larger one of two; 0 for NaN."""
    book = np.asarray(codebook, np.float32)
    codes = np.searchsorted((book[:-1] + book[1:]) / np.float32(2), x, "right")
    return np.where(np.isnan(x), 0, codes).astype(np.uint8)


def _from_least(x: Singles, largest: np.float32, scale_dtype: str) -> tuple[Array, Array]:
    low, high = x.min(axis=-1), x.max(axis=-1)
    return round_to((high - low) / largest, scale_dtype), round_to(low + np.float32(0), scale_dtype)


def _divisor(scale: Array, global_scale: float | None) -> Singles:
    s = _single(scale)
    return s if global_scale is None else s * np.float32(global_scale)


def quantize(
    x: Array,
    scale: Array | None,
    zero: Array | None,
    dtype: str,
    recipe: str = "amax",
    global_scale: float | None = None,
    *,
    codebook: Sequence[float] | None = None,
) -> Bytes:
    """The codes of x `[..., block]` with scale and zero `[...]`; without a scale, x is cast as it is.

    Quotients are rounded to f32, and so is quotient + zero. A scale of zero makes all codes 0.
    """
    x = _single(x)
    if scale is None:
        return cast(x, dtype)
    with np.errstate(all="ignore"):
        divisor = _divisor(scale, global_scale if recipe == "global" else None)[..., None]
        code = (x - _single(zero)[..., None] if recipe == "min" and zero is not None else x) / divisor
        if zero is not None and recipe not in ("min", "signs"):
            code = code + _single(zero)[..., None]
    if codebook is not None:
        direction = np.where(divisor == 0, np.float32(0), code)
        nearest = _nearest(direction, codebook)
        if recipe == "signs":
            above = direction >= np.asarray(codebook, np.float32)[nearest]
            return np.where(above, nearest + len(codebook), nearest).astype(np.uint8)
        return nearest
    return cast(np.where(divisor == 0, np.float32(0), code), code_dtype(dtype, zero is not None))


def dequantize(
    codes: Bytes,
    scale: Array | None,
    zero: Array | None,
    dtype: str,
    recipe: str = "amax",
    out_dtype: str = "f32",
    global_scale: float | None = None,
    *,
    codebook: Sequence[float] | None = None,
) -> Array:
    """The values of codes `[..., block]` with scale and zero `[...]`, as an array of `out_dtype`.

    (code - zero) and its product with the scale are rounded to f32 each, with "signs" the sum of what the code stands for and
    what is in the zero's place, with "min" the product and its sum with what stands there; "max" rounds the product to e4m3,
    "global" to f32 once before and once after the global scale; the result is rounded to `out_dtype`.
    """
    if codebook is None:
        code = _single(values(codes, code_dtype(dtype, zero is not None)))
    else:
        code = np.asarray(codebook, np.float32)[codes % len(codebook)]
    with np.errstate(all="ignore"):
        if zero is not None and codebook is not None:  # "signs"
            code = code + np.where(codes >= len(codebook), _single(zero)[..., None], -_single(zero)[..., None])
        elif zero is not None and recipe != "min":
            code = code - _single(zero)[..., None]
        if scale is not None:
            code = code * _single(scale)[..., None]
        if zero is not None and recipe == "min":
            code = code + _single(zero)[..., None]
        if recipe == "max":
            code = _single(values(cast(code, "e4m3"), "e4m3"))
        if recipe == "global":
            code = code * np.float32(1 if global_scale is None else global_scale)
        return round_to(code, out_dtype)


def pack_nibbles(codes: Bytes) -> Bytes:
    """Bytes `[..., n]` of 4-bit codes `[..., 2 n]`: code 2 i in the low nibble."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def unpack_nibbles(packed: Bytes) -> Bytes:
    """The 4-bit codes `[..., 2 n]` of bytes `[..., n]`."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def pack_codes(codes: Bytes, bits: int, strided: bool = False) -> Bytes:
    """Bytes `[..., n bits / 8]` of codes `[..., n]` of so many bits, each behind the one before, from a byte's lowest bit up.

    `strided`: the codes of a byte stand as far from each other as the row has bytes.
    """
    if strided:
        beside: Bytes = codes.reshape(*codes.shape[:-1], 8 // bits, -1).swapaxes(-1, -2)
        return pack_codes(beside.reshape(codes.shape), bits)
    if bits == 4:
        return pack_nibbles(codes)
    each = codes[..., None] >> np.arange(bits, dtype=np.uint8) & 1
    return np.packbits(each.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")


def unpack_codes(packed: Bytes, bits: int, strided: bool = False) -> Bytes:
    """The codes `[..., n]` of bytes `[..., n bits / 8]`."""
    if strided:
        codes: Bytes = unpack_codes(packed, bits).reshape(*packed.shape, 8 // bits)
        return codes.swapaxes(-1, -2).reshape(*packed.shape[:-1], -1)
    if bits == 4:
        return unpack_nibbles(packed)
    each = np.unpackbits(np.ascontiguousarray(packed), axis=-1, bitorder="little")
    weights = (1 << np.arange(bits)).astype(np.uint8)
    found: Bytes = (each.reshape(*packed.shape[:-1], -1, bits) * weights).sum(axis=-1, dtype=np.uint8)
    return found
