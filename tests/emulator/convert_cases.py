"""cvt: every float source over all 2**16 inputs of 16 bits, over as many chosen ones of f32 and f64; integers at random.

The references round in float64 by scaling with powers of two, which is exact, or in Python's rationals.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from tests.emulator.cases import KINDS, Array, Suite, clamp
from tests.emulator.exact import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, F16, F32, F64, TF32, Format, rounded
from tests.emulator.float_cases import dotted, saturated

FORMATS = {
    "f16": F16, "bf16": BF16, "f32": F32, "f64": F64, "tf32": TF32, "e4m3x2": E4M3, "e5m2x2": E5M2,
    "e2m1x2": E2M1, "e2m3x2": E2M3, "e3m2x2": E3M2, "f16x2": F16, "bf16x2": BF16,
}  # fmt: skip
FINITE_ONLY = ("e2m1x2", "e2m3x2", "e3m2x2")
INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
MODES = ("rn", "rz", "rm", "rp")
INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
Columns = Callable[..., Array]
ALL16 = np.arange(1 << 16, dtype=np.uint16)


# ---------------------------------------------------------------- operands: 2**16 of each kind
def exhaustive(inputs: Sequence[str], rng: np.random.Generator) -> list[Array]:
    """All 16-bit patterns; of wider floats all upper halves, and lower ones on, just above and just below a tie."""
    out: list[Array] = []
    for kind in inputs:
        first = (ALL16 * np.uint16(40503 if out else 1)).astype(np.uint32)  # another order for a second operand
        below = np.array([0, 0, 1, 0xFFFF, 0x8000, 0x7FFF, 0x8001, 0x0FFF, 0x1000, 0x1001], np.uint32)[ALL16 % 10]
        below = np.where(ALL16 % 11 == 0, rng.integers(0, 1 << 16, 1 << 16), below).astype(np.uint32)
        if kind in ("f32", "u32"):
            values = first << 16 | below
        elif kind == "f64":  # f32 values, and their neighbours that an f32 between would lose
            with np.errstate(invalid="ignore"):
                values = (first << 16 | below).view(np.float32).astype(np.float64).view(np.uint64)
            values = values + np.array([0, 1, -1], np.int64).astype(np.uint64)[(ALL16 >> 2) % 3]
        elif kind in ("f16x2", "bf16x2"):
            values = first << 16 | first * np.uint32(27) & 0xFFFF
        elif kind == "e2m1x2":
            values = (ALL16 & 255).astype(np.uint8)
        elif kind in ("e2m3x2", "e3m2x2"):
            values = first & 0x3F3F
        else:
            values = first
        dtype = np.dtype(KINDS[kind].dtype)
        out.append(values.astype(f"u{dtype.itemsize}").view(dtype))
    return out


# ---------------------------------------------------------------- references over columns
def flush(x: Array) -> Array:
    return np.where(np.abs(x) < 2.0**-126, np.copysign(0.0, x), x)


def unit(x: Array) -> Array:
    return np.where(np.isnan(x), 0.0, np.clip(x, 0, 1)) + 0.0


def relu(x: Array) -> Array:
    return np.where(np.isnan(x), x, np.maximum(x, 0) + 0.0)


def same(x: Array) -> Array:
    return x


def narrowed(form: Format, mode: str = "rn", finite: bool = False) -> Columns:
    steps_of = {"rn": np.rint, "rz": np.trunc, "rm": np.floor, "rp": np.ceil,
                "rna": lambda s: np.copysign(np.floor(np.abs(s) + 0.5), s)}[mode]  # fmt: skip

    def reference(x: Array) -> Array:
        _, exponent = np.frexp(x)
        quantum = np.maximum(exponent - 1, form.least) - form.precision + 1
        y = np.copysign(np.ldexp(steps_of(np.ldexp(x, -quantum)), quantum), x)
        largest = float(form.largest)
        outward = {"rm": x < 0, "rp": x > 0, "rz": False}.get(mode, True)
        over = np.where(finite, largest, np.where(outward, np.inf, largest))
        y = np.where(np.abs(y) > largest, np.copysign(over, x), y)
        y = np.where(np.isinf(x), x if not finite else np.copysign(largest, x), y)
        return np.where(np.isnan(x), x, y)

    return reference


def to_integer(target: str, mode: str, wide: bool) -> Columns:
    n = int(target[1:])
    low, high = (-(2 ** (n - 1)), 2 ** (n - 1) - 1) if target[0] == "s" else (0, 2**n - 1)
    of_nan = (low if target[0] == "s" else 2 ** (n - 1)) if wide else 0
    dtype = KINDS[target].dtype

    def reference(x: Array) -> Array:
        y = INTEGRAL[mode](x)
        inside = (y >= low) & (y < float(high) + (1 if n < 64 else 0)) & ~np.isnan(y)
        out = np.where(inside, y, 0).astype(dtype)
        out = np.where(y >= float(high), np.array(high, dtype), np.where(y < low, np.array(low, dtype), out))
        return np.where(np.isnan(x), np.array(of_nan & (2**n - 1)).astype(f"u{n // 8}").view(dtype), out)

    return reference


def after(*steps: Columns) -> Columns:
    def reference(x: Array) -> Array:
        for step in steps:
            x = step(x)
        return x

    return reference


def capped(kind: str) -> Columns:
    """NaN has no code in the formats of 6 and 4 bits."""
    largest = float(FORMATS[kind].largest)
    return lambda x: np.where(np.isnan(x), largest, x) if kind in FINITE_ONLY else x


WIDE = Suite("convert", rows=1 << 16, vectorised=True, operands=exhaustive)
for source in ("f32", "f64", "f16", "bf16"):
    ftzs = ("", "ftz") if source == "f32" else ("",)
    for target, mode, ftz, sat in itertools.product(INTEGERS, INTEGRAL, ftzs, ("", "sat")):
        if sat and source == "bf16":
            continue
        wide = source == "f64" or target.endswith("64")
        reference = after(flush if ftz else same, to_integer(target, mode, wide))
        WIDE.add(f"cvt.{mode}{dotted(ftz, sat)}.{target}.{source} {{d}}, {{a}};", source, target, reference)
for source, target in itertools.product(("f32", "f64", "f16", "bf16"), repeat=2):
    f32 = "f32" in (source, target)
    bfloat = "bf16" in (source, target)
    loses = {"f16": 11, "bf16": 8, "f32": 24, "f64": 53}
    must_round = KINDS[target].dtype(0).itemsize < KINDS[source].dtype(0).itemsize or {source, target} == {
        "f16",
        "bf16",
    }
    modes = MODES if must_round else ("", *MODES) if source == "bf16" and target in ("f32", "f64") else ("",)
    if source == target:
        modes = ("", *INTEGRAL)
    for mode, ftz, sat in itertools.product(modes, ("", "ftz") if f32 else ("",), ("",) if bfloat else ("", "sat")):
        before = flush if ftz and source == "f32" else same
        rounding = INTEGRAL[mode] if mode in INTEGRAL else narrowed(FORMATS[target], mode or "rn")
        behind = flush if ftz and target == "f32" else same
        steps = (
            (before, unit, rounding, behind)
            if sat and must_round
            else (before, rounding, unit if sat else same, behind)
        )
        canonical = source != target
        code = f"cvt{dotted(mode, ftz, sat)}.{target}.{source} {{d}}, {{a}};"
        WIDE.add(code, source, target, after(*steps), canonical=canonical)

# ---------------------------------------------------------------- pairs and small formats
for t in ("f16", "bf16"):
    for mode, clamp_, finite in itertools.product(("rn", "rz"), ("", "relu"), ("", "satfinite")):
        reference = after(relu if clamp_ else same, narrowed(FORMATS[t], mode, bool(finite)))
        words = f"cvt.{mode}{dotted(clamp_, finite)}"
        if clamp_ or finite:
            WIDE.add(f"{words}.{t}.f32 {{d}}, {{a}};", "f32", t, reference)
        WIDE.add(f"{words}.{t}x2.f32 {{d}}, {{a}}, {{b}};", "f32 f32", f"{t}x2", reference, spread=True)
for mode, clamp_, finite in itertools.product(("rn", "rz", "rna"), ("", "relu"), ("", "satfinite")):
    if not (mode == "rna" and clamp_):
        reference = after(relu if clamp_ else same, narrowed(TF32, mode, bool(finite)))
        WIDE.add(f"cvt.{mode}{dotted(clamp_, finite)}.tf32.f32 {{d}}, {{a}};", "f32", "tf32", reference)
for small, clamp_ in itertools.product(("e4m3x2", "e5m2x2", "e2m1x2", "e2m3x2", "e3m2x2"), ("", "relu")):
    before = relu if clamp_ else same
    reference = after(before, narrowed(FORMATS[small], "rn", True), capped(small))
    words = f"cvt.rn.satfinite{dotted(clamp_)}.{small}"
    WIDE.add(f"{words}.f32 {{d}}, {{a}}, {{b}};", "f32 f32", small, reference, spread=True)
    for pair in ("f16x2", "bf16x2"):
        WIDE.add(f"{words}.{pair} {{d}}, {{a}};", pair, small, reference)
    WIDE.add(f"cvt.rn{dotted(clamp_)}.f16x2.{small} {{d}}, {{a}};", small, "f16x2", before)


def to_scale(upwards: bool, finite: bool) -> Columns:
    """The power of two at or below |x|, or at or above it; at least 2**-127, and NaN for what lies above 2**127."""

    def reference(x: Array) -> Array:
        mantissa, exponent = np.frexp(np.abs(x))
        exponent = np.where(upwards & (mantissa > 0.5), exponent, exponent - 1)
        exponent = np.where(x == 0, -127, np.maximum(exponent, -127))
        over = (exponent > 127) | np.isinf(x)
        y = np.ldexp(1.0, np.where(over | np.isnan(x), 127, exponent))
        return np.where(np.isnan(x) | (over & (not finite)), np.nan, y)

    return reference


for mode, finite in itertools.product(("rz", "rp"), ("", "satfinite")):
    reference = to_scale(mode == "rp", bool(finite))
    WIDE.add(
        f"cvt.{mode}{dotted(finite)}.ue8m0x2.f32 {{d}}, {{a}}, {{b}};", "f32 f32", "ue8m0x2", reference, spread=True
    )
    WIDE.add(f"cvt.{mode}{dotted(finite)}.ue8m0x2.bf16x2 {{d}}, {{a}};", "bf16x2", "ue8m0x2", reference)
WIDE.add("cvt.rn.bf16x2.ue8m0x2 {d}, {a};", "ue8m0x2", "bf16x2", same)


def stochastic(x: Array, random: Array) -> Array:
    """Away from zero where the dropped fraction and the random one, both of 16 bits, add up to 1 or more."""
    down = narrowed(BF16, "rz")(x)
    _, exponent = np.frexp(x)
    quantum = np.maximum(exponent - 1, BF16.least) - BF16.precision + 1
    fraction = np.ldexp(np.abs(x - down), 16 - quantum)
    return np.where(
        np.isfinite(x), down + np.copysign(np.where(fraction + random >= 65536, np.ldexp(1.0, quantum), 0), x), x
    )


def stochastic_lane(shift: int) -> Columns:
    return lambda x, random: np.where(
        np.abs(y := stochastic(x, random >> shift & 0xFFFF)) > float(BF16.largest), np.copysign(np.inf, x), y
    )


WIDE.add("cvt.rs.bf16x2.f32 %r60, {a}, {a}, {b}; shl.b32 %r60, %r60, 16; mov.b32 {d}, %r60;", "f32 u32", "f32",
         stochastic_lane(0), canonical=False)  # fmt: skip
WIDE.add("cvt.rs.bf16x2.f32 %r60, {a}, {a}, {b}; and.b32 %r60, %r60, 0xffff0000; mov.b32 {d}, %r60;", "f32 u32", "f32",
         stochastic_lane(16), canonical=False)  # fmt: skip

# ---------------------------------------------------------------- integers
INTEGER = Suite("integer_sources")
for source, target in itertools.product(INTEGERS, repeat=2):
    INTEGER.add(f"cvt.{target}.{source} {{d}}, {{a}};", source, target, lambda a: a)
    covers = target[0] == source[0] and int(target[1:]) >= int(source[1:])
    covers |= target[0] == "s" and source[0] == "u" and int(target[1:]) > int(source[1:])
    if not covers:
        code = f"cvt.sat.{target}.{source} {{d}}, {{a}};"
        INTEGER.add(code, source, target, lambda a, t=target: clamp(a, t))
for source, target, mode in itertools.product(INTEGERS, ("f32", "f64", "f16", "bf16"), MODES):
    ftzs, sats = ("", "ftz") if target == "f32" else ("",), ("", "sat") if target != "bf16" else ("",)
    for ftz, sat in itertools.product(ftzs, sats):

        def from_integer(a: int, f=FORMATS[target], mode=mode, sat=sat) -> float:
            y = rounded(Fraction(a), f, mode)
            return saturated(y) if sat else y

        code = f"cvt.{mode}{dotted(ftz, sat)}.{target}.{source} {{d}}, {{a}};"
        INTEGER.add(code, source, target, from_integer)
for kind in ("u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2"):
    n = int(kind[1:])

    def packed(a: int, b: int, c: int, kind=kind, n=n) -> int:
        low, high = (clamp(x, kind) & (2**n - 1) for x in (b, a))
        return (low | high << n | c << 2 * n) & 0xFFFFFFFF

    third = "" if n == 16 else ".b32"
    code = f"cvt.pack.sat.{kind}.s32{third} {{d}}, {{a}}, {{b}}{', {c}' if third else ''};"
    INTEGER.add(code, "s32 s32 u32", "u32", packed)

SUITES = (WIDE, INTEGER)
