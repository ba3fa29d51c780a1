"""Every form of cvt: between floats, to and from integers, packed, fp8."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Final

import numpy as np

from tests.golden_gpu.float_families import float_words, opened, pairs
from tests.golden_gpu.forms import Family
from tests.golden_gpu.numbers import FORMATS, bits_of, clamped, converted, flushed, integral, once, to_integer, wrapped

INTEGERS: Final = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
ROUNDINGS: Final = ("rn", "rz", "rm", "rp")
INTEGRAL: Final = ("rni", "rzi", "rmi", "rpi")


def from_f32() -> Family:
    """f32 to everything of at most 32 bits."""
    family = Family("cvt_from_f32", tuple(float_words("f32", 192, seed) for seed in (20, 21)))
    for kind in ("f16", "bf16"):
        for mode in ROUNDINGS if kind == "f16" else ("rn", "rz"):
            family.add(f"cvt.{mode}.{kind}.f32 %0, %1;", "f32", kind, lambda a, k=kind, m=mode: converted(a, k, m))
        for mode in ("rn", "rz"):
            for relu in (False, True):
                for finite in (False, True):
                    dots = f"{mode}{'.relu' if relu else ''}{'.satfinite' if finite else ''}"
                    one = _narrowing(kind, mode, relu, finite)
                    if relu or finite:
                        family.add(f"cvt.{dots}.{kind}.f32 %0, %1;", "f32", kind, one, any_zero=relu)
                    family.add(
                        f"cvt.{dots}.{kind}x2.f32 %0, %1, %2;",
                        "f32 f32",
                        f"{kind}x2",
                        lambda high, low, f=one: (f(low), f(high)),
                        any_zero=relu,
                    )
    family.add("cvt.rn.sat.f16.f32 %0, %1;", "f32", "f16", lambda a: unit(converted(a, "f16")))
    family.add("cvt.rn.ftz.f16.f32 %0, %1;", "f32", "f16", lambda a: converted(flushed(a), "f16"))
    for mode in ("rna", "rn", "rz"):
        # The low 13 bits are not the result's.
        text = f"{{ cvt.{mode}.tf32.f32 %0, %1; and.b32 %0, %0, 0xffffe000; }}"
        family.add(text, "f32", "f32", lambda a, m=mode: converted(a, "tf32", m), any_nan=True)
    for kind in ("e4m3", "e5m2"):
        for relu in (False, True):
            family.add(
                f"cvt.rn.satfinite{'.relu' if relu else ''}.{kind}x2.f32 %0, %1, %2;",
                "f32 f32",
                "u8x2",
                lambda high, low, k=kind, r=relu: (fp8(low, k, r), fp8(high, k, r)),
            )
    for ftz in (False, True):
        dots = ".ftz" if ftz else ""
        for mode in INTEGRAL:
            for kind in INTEGERS[:6]:
                family.add(
                    f"cvt.{mode}{dots}.{kind}.f32 %0, %1;",
                    "f32",
                    kind,
                    opened(lambda a, k=kind, m=mode: to_integer(a, k, m), ftz),
                )
            family.add(
                f"cvt.{mode}{dots}.f32.f32 %0, %1;",
                "f32",
                "f32",
                opened(lambda a, m=mode: integral(a, m), ftz),
                any_nan=True,
            )
        family.add(f"cvt.sat{dots}.f32.f32 %0, %1;", "f32", "f32", opened(unit, ftz))
    return family


def _narrowing(kind: str, mode: str, relu: bool, finite: bool) -> Callable[[float], float]:
    return lambda a: converted(a, kind, mode, relu=relu, satfinite=finite)


def unit(x: float) -> float:
    """.sat of a float: NaN and -0 become +0."""
    return min(x, 1.0) if x > 0 else 0.0


def fp8(x: float, kind: str, relu: bool = False) -> int:
    """The byte of a number, saturated to finite; either zero of .relu is written as +0."""
    value = converted(x, kind, satfinite=True, relu=relu)
    if math.isnan(value):
        return 0x7F
    form, negative = FORMATS[kind], math.copysign(1.0, value) < 0
    magnitude, bits = abs(Fraction(value)), form.precision - 1
    if magnitude < Fraction(2) ** form.least:
        pattern = int(magnitude / Fraction(2) ** (form.least - bits))
    else:
        exponent = math.frexp(abs(value))[1] - 1
        pattern = (exponent - form.least + 1 << bits) + int((magnitude / Fraction(2) ** exponent - 1) * (1 << bits))
    return pattern | 0x80 * negative


def from_fp8() -> Family:
    """Every e4m3 and e5m2 number, to f16; and f16 pairs to them."""
    word = np.arange(256, dtype=np.uint32) | np.random.default_rng(22).permutation(256).astype(np.uint32) << 8
    family = Family("cvt_from_fp8", (word, pairs("f16", 256, 23)))
    for kind in ("e4m3", "e5m2"):
        for relu in ("", ".relu"):
            family.add(
                f"cvt.rn{relu}.f16x2.{kind}x2 %0, %1;",
                f"{kind}x2",
                "f16x2",
                lambda a, r=bool(relu): converted(a, "f16", relu=r),
                any_nan=True,
                any_zero=bool(relu),
            )
            family.add(
                f"cvt.rn.satfinite{relu}.{kind}x2.f16x2 %0, %2;",
                "_ f16x2",
                "u8x2",
                lambda a, k=kind, r=bool(relu): fp8(a, k, r),
            )
    return family


def from_16() -> Family:
    """f16 and bf16 to all else; the low half of a word is the f16, the next word's the bf16."""
    words = float_words("f16", 128, 24).astype(np.uint32), float_words("bf16", 128, 25).astype(np.uint32)
    family = Family("cvt_from_16", words)
    family.add("cvt.f32.f16 %0, %1;", "f16", "f32", lambda a: a, any_nan=True)
    family.add("cvt.ftz.f32.f16 %0, %1;", "f16", "f32", lambda a: a, any_nan=True)
    family.add("cvt.sat.f32.f16 %0, %1;", "f16", "f32", unit)
    family.add("cvt.f32.bf16 %0, %2;", "_ bf16", "f32", lambda b: b, any_nan=True)
    family.add("cvt.rn.bf16.f16 %0, %1;", "f16", "bf16", lambda a: converted(a, "bf16"), any_nan=True)
    family.add("cvt.rn.f16.bf16 %0, %2;", "_ bf16", "f16", lambda b: converted(b, "f16"), any_nan=True)
    for mode in INTEGRAL:
        family.add(f"cvt.{mode}.f16.f16 %0, %1;", "f16", "f16", lambda a, m=mode: integral(a, m), any_nan=True)
        for kind in INTEGERS[:6]:
            family.add(f"cvt.{mode}.{kind}.f16 %0, %1;", "f16", kind, lambda a, k=kind, m=mode: to_integer(a, k, m))
            if bits_of(kind) > 8:
                family.add(
                    f"cvt.{mode}.{kind}.bf16 %0, %2;", "_ bf16", kind, lambda b, k=kind, m=mode: to_integer(b, k, m)
                )
    return family


def _from_integer(kind: str, mode: str) -> Callable[[int], float]:
    return lambda a: once(Fraction(a), FORMATS[kind], mode) if a else 0.0


def from_integers(width: int) -> Family:
    """Integers of at most 32, or of 64 bits, to floats and to one another."""
    rng = np.random.default_rng(26)
    dtype = f"u{width // 8}"
    top = 1 << width
    corners = [0, 1, 2, 127, 128, 129, 255, 256, 2047, 2049, 32767, 32768, 65535, 65536, 2**24 + 1, 2**25 + 3, top - 1,
               top - 2, top // 2, top // 2 - 1, top // 2 + 1, top - 128, top - 129, 65504, 65519, 65520]  # fmt: skip
    words = np.concatenate(
        [np.array(corners, np.uint64), rng.integers(0, top, 128 - len(corners), np.uint64, endpoint=False)]
    )
    family = Family(f"cvt_from_i{width}", (words.astype(dtype),))
    sources = INTEGERS[:6] if width == 32 else INTEGERS[6:]
    floats = ("f32", "f16", "bf16") if width == 32 else ("f32", "f16", "f64")
    for source in sources:
        for target in floats:
            for mode in ROUNDINGS if (bits_of(source), target) != (8, "bf16") else ():  # there is no such form
                family.add(f"cvt.{mode}.{target}.{source} %0, %1;", source, target, _from_integer(target, mode))
        for target in INTEGERS[:6] if width == 32 else INTEGERS:
            if target != source:
                family.add(f"cvt.{target}.{source} %0, %1;", source, target, lambda a, t=target: wrapped(a, t))
            if _saturates(source, target):
                family.add(f"cvt.sat.{target}.{source} %0, %1;", source, target, lambda a, t=target: clamped(a, t))
    return family


def _saturates(source: str, target: str) -> bool:
    """Whether .sat is allowed: the target lacks some of the source's numbers."""
    low = -(1 << bits_of(source) - 1) if source[0] == "s" else 0
    high = (1 << bits_of(source) - (source[0] == "s")) - 1
    return clamped(low, target) != low or clamped(high, target) != high


def wide() -> Family:
    """f64 to and from the rest, and f32 and f16 to 64-bit integers."""
    family = Family("cvt_wide", (float_words("f64", 96, 27), float_words("f32", 96, 28).astype(np.uint64)))
    for mode in ROUNDINGS:
        family.add(f"cvt.{mode}.f32.f64 %0, %1;", "f64", "f32", lambda a, m=mode: converted(a, "f32", m), any_nan=True)
    family.add("cvt.rn.f16.f64 %0, %1;", "f64", "f16", lambda a: converted(a, "f16"), any_nan=True)
    family.add("cvt.f64.f32 %0, %2;", "_ f32", "f64", lambda b: b, any_nan=True)
    for mode in INTEGRAL:
        family.add(f"cvt.{mode}.f64.f64 %0, %1;", "f64", "f64", lambda a, m=mode: integral(a, m), any_nan=True)
        for kind in ("u32", "s32", "u64", "s64"):
            width = bits_of(kind)
            family.add(
                f"cvt.{mode}.{kind}.f64 %0, %1;",
                "f64",
                kind,
                lambda a, k=kind, m=mode, w=width: to_integer(a, k, m, nan=1 << w - 1),
            )
        for kind in ("u64", "s64"):
            family.add(
                f"cvt.{mode}.{kind}.f32 %0, %2;",
                "_ f32",
                kind,
                lambda b, k=kind, m=mode: to_integer(b, k, m, nan=1 << 63),
            )
    return family


def families() -> list[Family]:
    """All of this module."""
    return [from_f32(), from_fp8(), from_16(), from_integers(32), from_integers(64), wide()]
