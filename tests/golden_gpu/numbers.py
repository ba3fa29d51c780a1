"""Element types as bit patterns, and exact arithmetic on Python numbers: what PTX says, without the emulator's help."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.emulator.exact import BF16, F16, F32, F64, Format, rounded, two_to

Array = NDArray[Any]
FORMATS: Final[dict[str, Format]] = {
    "f16": F16,
    "bf16": BF16,
    "f32": F32,
    "f64": F64,
    "e4m3": Format(4, -6, 8),
    "e5m2": Format(3, -14, 15),
    "tf32": Format(11, -126, 127),
}
DTYPES: Final[dict[str, Any]] = {
    **{f"{s}{n}": np.dtype(f"{'u' if s == 'u' else 'i'}{n // 8}") for s in "us" for n in (8, 16, 32, 64)},
    **{f"b{n}": np.dtype(f"u{n // 8}") for n in (8, 16, 32, 64)},
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "tf32": np.dtype(np.float32),
}
# What arithmetic answers where it answers NaN.
NAN: Final = {
    "f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "tf32": 0x7FFFFFFF, "f64": 0x7FF8 << 48, "e4m3": 0x7F, "e5m2": 0x7F,
}  # fmt: skip


def is_float(kind: str) -> bool:
    """Whether a type's values are Python floats."""
    return kind in FORMATS


def bits_of(kind: str) -> int:
    """Its width."""
    return 8 * int(DTYPES[kind].itemsize)


def decode(kind: str, words: Array) -> list[Any]:
    """The low bits of unsigned words as Python numbers."""
    values = words.astype(f"u{DTYPES[kind].itemsize}").view(DTYPES[kind])
    with np.errstate(invalid="ignore"):  # signalling NaN
        return values.astype(np.float64).tolist() if is_float(kind) else values.tolist()  # type: ignore[no-any-return]


def encode(kind: str, value: float) -> int:
    """The bit pattern of a number that the type has; an int for a float type is a pattern already."""
    if not is_float(kind):
        return int(value) & ((1 << bits_of(kind)) - 1)
    if isinstance(value, int):
        return value
    if math.isnan(value):
        return NAN[kind]
    with np.errstate(over="ignore"):
        return int(np.array([value]).astype(DTYPES[kind]).view(f"u{DTYPES[kind].itemsize}")[0])


def flushed(x: float) -> float:
    """What .ftz makes of a subnormal f32."""
    return math.copysign(0.0, x) if abs(x) < 2.0**-126 else x


@cache
def largest(form: Format) -> Fraction:
    """The largest number of a format."""
    return (2 - two_to(1 - form.precision)) * two_to(form.most)


def once(x: Fraction, form: Format, mode: str) -> float:
    """One rounding; unlike a float, the rational number may be of any size."""
    if abs(x) > 2 * largest(form):
        outward = mode == "rn" or mode == ("rp" if x > 0 else "rm")
        value = math.inf if outward else float(largest(form))
    else:
        value = abs(rounded(x, form, mode))
    return value if x > 0 else -value


def nearest_away(x: Fraction, form: Format) -> float:
    """Ties away from zero (.rna)."""
    magnitude = abs(x)
    exponent = max(math.frexp(float(magnitude))[1] - 1, form.least)
    quantum = two_to(exponent - form.precision + 1)
    return math.copysign(float(math.floor(magnitude / quantum + Fraction(1, 2)) * quantum), x)


def converted(x: float, kind: str, mode: str = "rn", *, relu: bool = False, satfinite: bool = False) -> float:
    """cvt between float types; the signs of zeros stay, .relu makes negative numbers +0."""
    if math.isnan(x):
        return x
    form = FORMATS[kind]
    top = 448.0 if kind == "e4m3" else float(largest(form))
    if math.isinf(x) or x == 0:
        value = x
    else:
        value = nearest_away(Fraction(x), form) if mode == "rna" else once(Fraction(x), form, mode)
    if satfinite and abs(value) > top:
        value = math.copysign(top, value)
    return 0.0 if relu and (value < 0 or value == 0) else value


def integral(x: float, mode: str) -> float:
    """Rounding to a whole number (rni rzi rmi rpi)."""
    if not math.isfinite(x):
        return x
    ways: dict[str, Callable[[Fraction], int]] = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}
    whole = ways[mode](Fraction(x))
    return math.copysign(float(whole), x)


def to_integer(x: float, kind: str, mode: str, *, nan: int = 0) -> int:
    """cvt to an integer, which saturates."""
    width = bits_of(kind)
    low, high = (-(1 << width - 1), (1 << width - 1) - 1) if kind[0] == "s" else (0, (1 << width) - 1)
    if math.isnan(x):
        return nan
    if math.isinf(x):
        return high if x > 0 else low
    return max(low, min(high, int(integral(x, mode))))


def special(function: Callable[..., Any], values: list[float]) -> float:
    """IEEE doubles, for zeros, infinities and NaN."""
    with np.errstate(all="ignore"):
        return float(function(*(np.float64(v) for v in values)))


def exactly(
    function: Callable[..., Any],
    kind: str,
    mode: str = "rn",
    *,
    ftz: bool = False,
    sat: bool = False,
    relu: bool = False,
) -> Callable[..., float]:
    """A float operation as one rounding of the rational one."""
    form = FORMATS[kind]

    def reference(*given: float) -> float:
        values = [flushed(x) for x in given] if ftz else list(given)
        result = None
        if all(math.isfinite(v) for v in values):
            try:
                exact = function(*(Fraction(v) for v in values))
            except ZeroDivisionError:
                exact = 0
            if exact:
                result = once(exact, form, mode)
                result = flushed(result) if ftz else result
        if result is None:
            result = special(function, values)
            if result == 0 and mode == "rm" and function in SUMS and not same_sign_zeros(function, values):
                result = -0.0  # rounding down, x - x is -0
        if sat:
            result = 0.0 if math.isnan(result) or result <= 0 else min(result, 1.0)
        if relu and not math.isnan(result) and result <= 0:
            result = 0.0
        return result

    return reference


def add(a: Any, b: Any) -> Any:
    return a + b


def sub(a: Any, b: Any) -> Any:
    return a - b


def mul(a: Any, b: Any) -> Any:
    return a * b


def div(a: Any, b: Any) -> Any:
    return a / b


def fma(a: Any, b: Any, c: Any) -> Any:
    return a * b + c


SUMS: Final = (add, sub, fma)


def same_sign_zeros(function: Callable[..., Any], values: list[float]) -> bool:
    """Whether both terms of the sum are zeros of one sign."""
    first = values[0] * values[1] if function is fma else values[0]
    second = -values[1] if function is sub else values[-1]
    return first == 0 == second and math.copysign(1, first) == math.copysign(1, second)


def sign(x: float) -> float:
    return math.copysign(1.0, x)


def larger(a: float, b: float, *, nan: bool = False, xorsign: bool = False) -> float:
    """max; min is -larger(-a, -b). A NaN loses, unless .NaN."""
    return _pick(a, b, max, nan, xorsign)


def smaller(a: float, b: float, *, nan: bool = False, xorsign: bool = False) -> float:
    """min."""
    return _pick(a, b, min, nan, xorsign)


def _pick(a: float, b: float, choose: Callable[..., Any], nan: bool, xorsign: bool) -> float:
    negative = xorsign and (sign(a) < 0) != (sign(b) < 0)
    if xorsign:
        a, b = abs(a), abs(b)
    if math.isnan(a) or math.isnan(b):
        if nan or (math.isnan(a) and math.isnan(b)):
            return math.nan
        value = b if math.isnan(a) else a
    else:
        value = choose(((a, sign(a)), (b, sign(b))))[0]  # +0 is larger than -0
    return (-value if negative else value) if xorsign else value


def wrapped(value: int, kind: str) -> int:
    """An integer modulo the type's range."""
    width = bits_of(kind)
    value &= (1 << width) - 1
    return value - (1 << width) if kind[0] == "s" and value >> (width - 1) else value


def clamped(value: int, kind: str) -> int:
    """An integer saturated to the type's range."""
    width = bits_of(kind)
    low, high = (-(1 << width - 1), (1 << width - 1) - 1) if kind[0] == "s" else (0, (1 << width) - 1)
    return max(low, min(high, value))
