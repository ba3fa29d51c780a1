"""Float opcodes: f32, f64, f16, bf16 and packed pairs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.golden_gpu.forms import Family
from tests.golden_gpu.numbers import (
    DTYPES,
    Array,
    add,
    bits_of,
    div,
    exactly,
    flushed,
    fma,
    larger,
    mul,
    sign,
    smaller,
    sub,
)

CORNERS = [
    0.0, -0.0, 1.0, -1.0, 0.5, 1.5, -2.5, 3.0, 2.0**-126, -(2.0**-126), 2.0**-149, -1e-40, 1e-38, 2.0**-24, 2.0**-14,
    6e-8, 5.9e-8, 1e-8, 65504.0, 65519.0, 65520.0, -65536.0, 448.0, 464.0, 57344.0, 61440.0, 3.4e38, -3e38, 3.39e38,
    16777217.0, 2147483648.0, -2147483904.0, 4294967296.0, 9.3e18, 1.9e19, 127.5, 255.5, 32767.5, 1 / 3,
    math.inf, -math.inf, math.nan,
]  # fmt: skip


def float_words(kind: str, count: int, seed: int) -> Array:
    """Patterns of a float type: corners, numbers of moderate size, any bits."""
    rng = np.random.default_rng(seed)
    dtype, unsigned = DTYPES[kind], f"u{DTYPES[kind].itemsize}"
    with np.errstate(over="ignore"):
        corners = rng.choice(CORNERS, count // 2).astype(dtype).view(unsigned)
        moderate = (
            (rng.standard_normal(count // 4) * 2.0 ** rng.integers(-8, 9, count // 4)).astype(dtype).view(unsigned)
        )
    rest = rng.integers(0, 1 << bits_of(kind), count - count // 2 - count // 4, np.uint64).astype(unsigned)
    return np.concatenate([corners, moderate, rest])


def pairs(kind: str, count: int, seed: int) -> Array:
    """Words of two numbers."""
    low, high = (float_words(kind, count, s).astype(np.uint32) for s in (seed, seed + 100))
    return low | np.roll(high, 7) << 16


COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a < b or a > b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "equ": lambda a, b: not (a < b or a > b),
    "neu": lambda a, b: a != b,
    "ltu": lambda a, b: not a >= b,
    "leu": lambda a, b: not a > b,
    "gtu": lambda a, b: not a <= b,
    "geu": lambda a, b: not a < b,
    "num": lambda a, b: not (math.isnan(a) or math.isnan(b)),
    "nan": lambda a, b: math.isnan(a) or math.isnan(b),
}


def opened(reference: Callable[..., Any], ftz: bool) -> Callable[..., Any]:
    """The reference, its f32 arguments flushed first where the opcode says .ftz."""
    return (lambda *v: reference(*(flushed(x) for x in v))) if ftz else reference


def _arithmetic(family: Family, kind: str, *, ftz: bool, loose: dict[str, Any]) -> None:
    dots = ".ftz" if ftz else ""
    for mode in ("rn", "rz", "rm", "rp"):
        for op, function, count in (("add", add, 2), ("sub", sub, 2), ("mul", mul, 2), ("fma", fma, 3)):
            text = f"{op}.{mode}{dots}.{kind} %0, {', '.join(f'%{i + 1}' for i in range(count))};"
            family.add(text, " ".join([kind] * count), kind, exactly(function, kind, mode, ftz=ftz), **loose)
        family.add(
            f"div.{mode}{dots}.{kind} %0, %1, %2;", f"{kind} {kind}", kind, exactly(div, kind, mode, ftz=ftz), **loose
        )
        family.add(
            f"rcp.{mode}{dots}.{kind} %0, %1;", kind, kind, exactly(lambda a: 1 / a, kind, mode, ftz=ftz), **loose
        )
    family.add(f"sqrt.rn{dots}.{kind} %0, %1;", kind, kind, lambda a: _root(kind, a, ftz), **loose)


def _root(kind: str, a: float, ftz: bool) -> float:
    with np.errstate(invalid="ignore"):
        return float(np.sqrt(np.array(flushed(a) if ftz else a, DTYPES[kind])))


def f32() -> Family:
    """f32 arithmetic, comparison, selection."""
    family = Family("f32", tuple(float_words("f32", 192, seed) for seed in (1, 2, 3)))
    two = "f32 f32"
    for ftz in (False, True):
        dots = ".ftz" if ftz else ""
        _arithmetic(family, "f32", ftz=ftz, loose={})
        for op, pick in (("min", smaller), ("max", larger)):
            for nan in (False, True):
                for xorsign in (False, True):
                    more = f"{dots}{'.NaN' if nan else ''}{'.xorsign.abs' if xorsign else ''}"
                    family.add(
                        f"{op}{more}.f32 %0, %1, %2;",
                        two,
                        "f32",
                        opened(lambda a, b, p=pick, n=nan, x=xorsign: p(a, b, nan=n, xorsign=x), ftz),
                    )
        family.add(f"abs{dots}.f32 %0, %1;", "f32", "f32", opened(abs, ftz), any_nan=True)
        family.add(f"neg{dots}.f32 %0, %1;", "f32", "f32", opened(lambda a: -a, ftz), any_nan=True)
        for op, function, count in (("add", add, 2), ("mul", mul, 2), ("fma.rn", fma, 3)):
            text = f"{op}{dots}.sat.f32 %0, {', '.join(f'%{i + 1}' for i in range(count))};"
            family.add(text, " ".join(["f32"] * count), "f32", exactly(function, "f32", ftz=ftz, sat=True))
        for name, holds in COMPARISONS.items():
            text = f"{{ .reg .pred p; setp.{name}{dots}.f32 p, %1, %2; selp.u32 %0, 1, 0, p; }}"
            family.add(text, two, "u32", opened(lambda a, b, h=holds: int(h(a, b)), ftz))
    family.add("copysign.f32 %0, %1, %2;", two, "f32", lambda a, b: math.copysign(b, a), any_nan=True)
    family.add("set.le.f32.f32 %0, %1, %2;", two, "f32", lambda a, b: float(a <= b))
    family.add("slct.f32.f32 %0, %1, %2, %3;", "u32 u32 f32", "u32", lambda a, b, c: a if c >= 0 else b)
    for test, passes in (
        ("finite", math.isfinite), ("infinite", math.isinf), ("number", lambda a: not math.isnan(a)),
        ("notanumber", math.isnan), ("normal", lambda a: math.isfinite(a) and (a == 0 or abs(a) >= 2.0**-126)),
        ("subnormal", lambda a: 0 < abs(a) < 2.0**-126),
    ):  # fmt: skip
        text = f"{{ .reg .pred p; testp.{test}.f32 p, %1; selp.u32 %0, 1, 0, p; }}"
        family.add(text, "f32", "u32", lambda a, t=passes: int(t(a)))
    return family


def f64() -> Family:
    """f64 arithmetic; which NaN comes out is nobody's promise."""
    family = Family("f64", tuple(float_words("f64", 96, seed) for seed in (4, 5, 6)))
    _arithmetic(family, "f64", ftz=False, loose={"any_nan": True})
    for op, pick in (("min", smaller), ("max", larger)):
        family.add(f"{op}.f64 %0, %1, %2;", "f64 f64", "f64", pick, any_nan=True)
    family.add("neg.f64 %0, %1;", "f64", "f64", lambda a: -a, any_nan=True)
    for name, holds in COMPARISONS.items():
        text = f"{{ .reg .pred p; setp.{name}.f64 p, %1, %2; selp.u64 %0, 1, 0, p; }}"
        family.add(text, "f64 f64", "u64", lambda a, b, h=holds: int(h(a, b)))
    return family


def halves(kind: str) -> Family:
    """16-bit floats, one and two in a register."""
    family = Family(kind, tuple(pairs(kind, 128, seed) for seed in (7, 8, 9)))
    flush: Callable[[float], float] = lambda x: math.copysign(0.0, x) if abs(x) < 2.0**-14 else x  # noqa: E731
    for form in (kind, f"{kind}x2"):
        two, three = f"{form} {form}", f"{form} {form} {form}"
        for op, function in (("add", add), ("sub", sub), ("mul", mul)):
            family.add(f"{op}.{form} %0, %1, %2;", two, form, exactly(function, kind))
        family.add(f"fma.rn.{form} %0, %1, %2, %3;", three, form, exactly(fma, kind))
        family.add(f"fma.rn.relu.{form} %0, %1, %2, %3;", three, form, exactly(fma, kind, relu=True), any_zero=True)
        for op, pick in (("min", smaller), ("max", larger)):
            for nan in (False, True):
                for xorsign in (False, True):
                    dots = f"{'.NaN' if nan else ''}{'.xorsign.abs' if xorsign else ''}"
                    family.add(
                        f"{op}{dots}.{form} %0, %1, %2;",
                        two,
                        form,
                        lambda a, b, p=pick, n=nan, x=xorsign: p(a, b, nan=n, xorsign=x),
                    )
        family.add(f"abs.{form} %0, %1;", form, form, abs, any_nan=True)
        family.add(f"neg.{form} %0, %1;", form, form, lambda a: -a, any_nan=True)
        # .ftz is not optional for bf16, and not there for the rest.
        dots, least = ("", 2.0**-24) if kind == "f16" else (".ftz", 2.0**-126)
        precision = {"f16": (2.0**-9.9, 2.0**-10.987), "bf16": (2.0**-7, 2.0**-8)}[kind]
        family.add(
            f"ex2.approx{dots}.{form} %0, %1;", form, form, _half_power(kind), relative=precision[0], absolute=least
        )
        family.add(f"tanh.approx.{form} %0, %1;", form, form, math.tanh, absolute=precision[1])
        if kind == "f16":
            for op, function in (("add", add), ("sub", sub), ("mul", mul)):
                exact, sat = exactly(function, kind), exactly(function, kind, sat=True)
                family.add(
                    f"{op}.ftz.{form} %0, %1, %2;", two, form, lambda a, b, e=exact: flush(e(flush(a), flush(b)))
                )
                family.add(f"{op}.sat.{form} %0, %1, %2;", two, form, sat)
    for name, holds in COMPARISONS.items():
        text = f"{{ .reg .pred p; setp.{name}.{kind} p, %1, %2; selp.u32 %0, 1, 0, p; }}"
        family.add(text, f"{kind} {kind}", "u32", lambda a, b, h=holds: int(h(a, b)))
        text = (
            f"{{ .reg .pred p, q; setp.{name}.{kind}x2 p|q, %1, %2; selp.u32 %0, 1, 0, p; @q or.b32 %0, %0, 0x10000; }}"
        )
        family.add(text, f"{kind}x2 {kind}x2", "u16x2", lambda a, b, h=holds: int(h(a, b)))
    return family


def approximations() -> Family:
    """Approximate functions of f32, on what their error is stated for."""
    rng = np.random.default_rng(10)
    special = [
        0.0,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        1.0,
        -1.0,
        0.5,
        2.0,
        -2.0,
        1e-3,
        100.0,
        -99.5,
        1e10,
        2.0**-126,
        3e38,
    ]
    spread = rng.standard_normal(56) * 2.0 ** rng.integers(-30, 30, 56)
    a = np.concatenate([special, rng.uniform(-6, 6, 56), spread]).astype(np.float32)
    b = np.concatenate([special[::-1], rng.uniform(-6, 6, 56), spread[::-1]]).astype(np.float32)
    family = Family("approximations", (a.view(np.uint32), b.view(np.uint32)))
    for ftz in (False, True):
        dots = ".ftz" if ftz else ""
        for name, reference, rule in (
            ("ex2", power_of_two, {"relative": 2.0**-22, "absolute": 2.0**-149}),
            ("lg2", log2, {"relative": 2.0**-22, "absolute": 2.0**-22}),
            ("rcp", _inverse, {"relative": 2.0**-23, "absolute": 2.0**-149}),
            ("sqrt", lambda x: math.nan if x < 0 else math.sqrt(x) if x else x, {"relative": 2.0**-23}),
            ("rsqrt", lambda x: math.nan if x < 0 else _inverse(math.sqrt(x) if x else x), {"relative": 2.0**-22.9}),
        ):
            family.add(
                f"{name}.approx{dots}.f32 %0, %1;",
                "f32",
                "f32",
                (lambda x, r=reference: flushed(r(flushed(x)))) if ftz else reference,
                **rule,
            )
        for name, function in (("sin", math.sin), ("cos", math.cos)):
            # Beyond 100 pi the error has no bound: fold the operand into it first.
            text = f"{{ .reg .b32 x; min.f32 x, %1, 0f42C80000; max.f32 x, x, 0fC2C80000; {name}.approx{dots}.f32 %0, x; }}"
            family.add(text, "f32", "f32", lambda x, f=function: f(max(-100.0, smaller(x, 100.0))), absolute=2.0**-14.7)
    family.add("tanh.approx.f32 %0, %1;", "f32", "f32", math.tanh, relative=2.0**-11)
    family.add("div.approx.f32 %0, %1, %2;", "f32 f32", "f32", _fast_quotient, relative=2.0**-22, absolute=2.0**-126)
    family.add("div.full.f32 %0, %1, %2;", "f32 f32", "f32", exactly(div, "f32"), relative=2.0**-22, absolute=2.0**-126)
    return family


def power_of_two(x: float) -> float:
    return math.inf if x >= 128 else 2.0**x if x > -200 else x if math.isnan(x) else 0.0


def _half_power(kind: str) -> Callable[[float], float]:
    top = 16 if kind == "f16" else 128
    return lambda x: math.inf if x >= top else power_of_two(x)


def log2(x: float) -> float:
    return math.nan if x < 0 or math.isnan(x) else -math.inf if x == 0 else math.log2(x) if math.isfinite(x) else x


def _inverse(x: float) -> float:
    if x == 0 or abs(x) < 2.0**-128:
        return math.copysign(math.inf, x)
    return 1 / x


def _fast_quotient(a: float, b: float) -> float:
    """For large divisors div.approx gives 0, or NaN for an infinite dividend."""
    if 2.0**126 < abs(b) < math.inf:
        return math.nan if not math.isfinite(a) else math.copysign(0.0, sign(a) * sign(b))
    return exactly(div, "f32")(a, b)


def families() -> list[Family]:
    """All of this module."""
    return [f32(), f64(), halves("f16"), halves("bf16"), approximations()]
