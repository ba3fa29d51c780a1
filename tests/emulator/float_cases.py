"""Float opcodes and conversions against exact rationals. Importing this fills CASES."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np

from tests.emulator.cases import DTYPES, bits_of, case, clamp
from tests.emulator.exact import BF16, F16, F32, F64, Format, rounded

FORMATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}


def tiny(x: float) -> float:
    return math.copysign(0.0, x) if abs(x) < 2.0**-126 else x


def exactly(
    function: Callable[..., Fraction], form: Format, mode: str = "rn", ftz: bool = False
) -> Callable[..., float]:
    """A float operation as the rounding of a rational one; zeros, infinities and NaN fall back to IEEE doubles."""

    def reference(*values: float) -> float:
        v = [tiny(x) for x in values] if ftz else list(values)
        if all(math.isfinite(x) for x in v):
            try:
                exact = function(*(Fraction(x) for x in v))
            except ZeroDivisionError:
                return special(function, v)
            if exact:
                out = rounded(exact, form, mode)
                return tiny(out) if ftz else out
            if mode == "rm" and function in (ADD, SUB):  # rounding down, a sum of 0 is +0 only for +0 + +0
                second = v[1] if function is ADD else -v[1]
                return 0.0 if v[0] == 0 and math.copysign(1, v[0]) + math.copysign(1, second) == 2 else -0.0
        return special(function, v)

    return reference


def special(function: Callable[..., Any], values: list[float]) -> float:
    with np.errstate(all="ignore"):
        return float(function(*(np.float64(x) for x in values)))


ADD: Callable[..., Any] = lambda a, b: a + b  # noqa: E731
SUB: Callable[..., Any] = lambda a, b: a - b  # noqa: E731
MUL: Callable[..., Any] = lambda a, b: a * b  # noqa: E731
DIV: Callable[..., Any] = lambda a, b: a / b  # noqa: E731
FMA: Callable[..., Any] = lambda a, b, c: a * b + c  # noqa: E731


for t in ("f32", "f64"):
    form = FORMATS[t]
    for op, function in (("add", ADD), ("sub", SUB), ("mul", MUL)):
        for mode in ("", "rn", "rz", "rm", "rp"):
            dotted = f".{mode}" if mode else ""
            case(
                f"{op}_{t}_{mode}",
                f"{op}{dotted}.{t} {{d}}, {{a}}, {{b}};",
                f"{t} {t}",
                t,
                exactly(function, form, mode or "rn"),
            )
    for mode in ("rn", "rz", "rp"):
        case(
            f"fma_{t}_{mode}",
            f"fma.{mode}.{t} {{d}}, {{a}}, {{b}}, {{c}};",
            f"{t} {t} {t}",
            t,
            exactly(FMA, form, mode),
        )
        case(f"div_{t}_{mode}", f"div.{mode}.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, exactly(DIV, form, mode))
    case(f"rcp_{t}", f"rcp.rn.{t} {{d}}, {{a}};", t, t, exactly(lambda a: 1 / a, form))
    case(f"abs_{t}", f"abs.{t} {{d}}, {{a}};", t, t, abs)
    case(f"neg_{t}", f"neg.{t} {{d}}, {{a}};", t, t, lambda a: -a)
    case(f"copysign_{t}", f"copysign.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, lambda a, b: math.copysign(b, a))
case("add_ftz", "add.ftz.f32 {d}, {a}, {b};", "f32 f32", "f32", exactly(ADD, F32, ftz=True))
case("mul_ftz", "mul.ftz.f32 {d}, {a}, {b};", "f32 f32", "f32", exactly(MUL, F32, ftz=True))
case("fma_ftz", "fma.rn.ftz.f32 {d}, {a}, {b}, {c};", "f32 f32 f32", "f32", exactly(FMA, F32, ftz=True))
case("sqrt_rn", "abs.f32 {a}, {a}; sqrt.rn.f32 {d}, {a};", "f32", "f32", lambda a: float(np.sqrt(np.float32(abs(a)))))
case("div_approx", "div.approx.f32 {d}, {a}, {b};", "f32 f32", "f32", exactly(DIV, F32), tolerance=1e-6, ranges="small")
case("div_full", "div.full.ftz.f32 {d}, {a}, {b};", "f32 f32", "f32", exactly(DIV, F32), tolerance=1e-6, ranges="small")
for op, ref in {
    "rcp.approx.ftz": lambda a: 1 / a, "sqrt.approx": math.sqrt, "rsqrt.approx": lambda a: 1 / math.sqrt(a),
    "ex2.approx.ftz": lambda a: 2.0**a, "lg2.approx": math.log2, "sin.approx": math.sin, "cos.approx": math.cos,
    "tanh.approx": math.tanh,
}.items():  # fmt: skip
    case(op.replace(".", "_"), f"{op}.f32 {{d}}, {{a}};", "f32", "f32", ref, tolerance=2e-6, ranges="positive")
case(
    "mul_sat",
    "mul.sat.f32 {d}, {a}, {b};",
    "f32 f32",
    "f32",
    lambda a, b: 0.0 if math.isnan(r := exactly(MUL, F32)(a, b)) else min(max(r, 0.0), 1.0) + 0.0,
)


def pick(a: float, b: float, largest: bool) -> float:
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    order = sorted((a, b), key=lambda x: (x, math.copysign(1, x)))
    return order[1] if largest else order[0]


def nan_or(function: Callable[[float, float], float]) -> Callable[[float, float], float]:
    return lambda a, b: math.nan if math.isnan(a) or math.isnan(b) else function(a, b)


for t in ("f32", "f64", "f16", "bf16"):
    for op, largest in (("min", False), ("max", True)):
        choose = functools.partial(pick, largest=largest)
        case(f"{op}_{t}", f"{op}.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, choose)
        if t != "f64":
            case(f"{op}_nan_{t}", f"{op}.NaN.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, nan_or(choose))
for t in ("f16", "bf16"):
    form = FORMATS[t]
    for op, function in (("add", ADD), ("sub", SUB), ("mul", MUL)):
        case(f"{op}_{t}", f"{op}.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, exactly(function, form))
    case(f"fma_{t}", f"fma.rn.{t} {{d}}, {{a}}, {{b}}, {{c}};", f"{t} {t} {t}", t, exactly(FMA, form))
    case(
        f"fma_relu_{t}",
        f"fma.rn.relu.{t} {{d}}, {{a}}, {{b}}, {{c}};",
        f"{t} {t} {t}",
        t,
        lambda a, b, c, form=form: r if math.isnan(r := exactly(FMA, form)(a, b, c)) else max(r, 0.0) + 0.0,
    )
    case(f"neg_{t}", f"neg.{t} {{d}}, {{a}};", t, t, lambda a: -a)
    case(f"abs_{t}", f"abs.{t} {{d}}, {{a}};", t, t, abs)
for t in ("f32", "f64", "f16", "bf16"):
    for op, sign in (("eq", "=="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">=")):
        ordered = eval(f"lambda a, b: int(a {sign} b)")
        unordered = eval(f"lambda a, b: int(a {sign} b or a != a or b != b)")
        for suffix, compare in (("", ordered), ("u", unordered)):
            code = f"setp.{op}{suffix}.{t} %p1, {{a}}, {{b}}; selp.u32 {{d}}, 1, 0, %p1;"
            case(f"setp_{op}{suffix}_{t}", code, f"{t} {t}", "u32", compare)
    for op, compare in (
        ("ne", lambda a, b: int(a < b or a > b)), ("neu", lambda a, b: int(a != b)),
        ("num", lambda a, b: int(a == a and b == b)), ("nan", lambda a, b: int(a != a or b != b)),
    ):  # fmt: skip
        code = f"setp.{op}.{t} %p1, {{a}}, {{b}}; selp.u32 {{d}}, 1, 0, %p1;"
        case(f"setp_{op}_{t}", code, f"{t} {t}", "u32", compare)


def to_integer(target: str, mode: str, wide: bool) -> Callable[[float], int]:
    def convert(a: float) -> int:
        if math.isnan(a):
            if not wide:
                return 0
            return -(1 << (bits_of(target) - 1)) if target[0] == "s" else 1 << (bits_of(target) - 1)
        if math.isinf(a):
            return clamp(10**40 if a > 0 else -(10**40), target)
        return clamp({"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode](a), target)

    return convert


for source in ("f32", "f64", "f16"):
    for target in ("s32", "u32", "s64", "u64", "s16", "u8"):
        if target == "u8" and source == "f64":
            continue
        for mode in ("rni", "rzi", "rmi", "rpi"):
            wide = source == "f64" or target.endswith("64")
            case(
                f"cvt_{mode}_{target}_{source}",
                f"cvt.{mode}.{target}.{source} {{d}}, {{a}};",
                source,
                target,
                to_integer(target, mode, wide),
            )
for source in ("s32", "u32", "s64", "u64", "u8", "s16"):
    for target in ("f32", "f64", "f16"):
        for mode in ("rn", "rz", "rp"):
            case(
                f"cvt_{mode}_{target}_{source}",
                f"cvt.{mode}.{target}.{source} {{d}}, {{a}};",
                source,
                target,
                lambda a, f=FORMATS[target], mode=mode: rounded(Fraction(a), f, mode),
            )


def between(form: Format, mode: str) -> Callable[[float], float]:
    return lambda a: rounded(Fraction(a), form, mode) if math.isfinite(a) and a else a


for source, target in (("f32", "f16"), ("f32", "bf16"), ("f64", "f32"), ("f64", "f16")):
    for mode in ("rn", "rz", "rm", "rp") if source == "f64" or target == "f16" else ("rn", "rz"):
        case(
            f"cvt_{mode}_{target}_{source}",
            f"cvt.{mode}.{target}.{source} {{d}}, {{a}};",
            source,
            target,
            between(FORMATS[target], mode),
        )
for source, target in (("f16", "f32"), ("bf16", "f32"), ("f16", "f64"), ("f32", "f64")):
    case(f"cvt_{target}_{source}", f"cvt.{target}.{source} {{d}}, {{a}};", source, target, lambda a: a)
for mode, function in {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}.items():
    case(
        f"cvt_{mode}_f32",
        f"cvt.{mode}.f32.f32 {{d}}, {{a}};",
        "f32",
        "f32",
        lambda a, f=function: math.copysign(float(f(a)), a) if math.isfinite(a) else a,
    )
case(
    "cvt_sat_f32",
    "cvt.sat.f32.f32 {d}, {a};",
    "f32",
    "f32",
    lambda a: 0.0 if math.isnan(a) else min(max(a, 0.0), 1.0) + 0.0,
)


def half_pair(kind: str, high: float, low: float) -> int:
    with np.errstate(over="ignore"):
        pair = np.array([low, high], np.float32).astype(DTYPES[kind])
    pair = np.where(np.isnan(pair), np.array([0x7FFF] * 2, np.uint16).view(DTYPES[kind]), pair).astype(DTYPES[kind])
    return int(pair.view(np.uint32)[0])


case("cvt_f16x2", "cvt.rn.f16x2.f32 {d}, {a}, {b};", "f32 f32", "u32", lambda a, b: half_pair("f16", a, b))
case("cvt_bf16x2", "cvt.rn.bf16x2.f32 {d}, {a}, {b};", "f32 f32", "u32", lambda a, b: half_pair("bf16", a, b))


def fp8_pair(kind: Any, top: float, high: float, low: float) -> int:
    out = 0
    for i, x in enumerate((low, high)):
        x = math.nan if math.isnan(x) else min(max(x, -top), top)
        byte = 0x7F if math.isnan(x) else int(np.array([x], np.float32).astype(kind).view(np.uint8)[0])
        out |= byte << 8 * i
    return out


for name, kind, top in (("e4m3", ml_dtypes.float8_e4m3fn, 448.0), ("e5m2", ml_dtypes.float8_e5m2, 57344.0)):
    case(
        f"cvt_{name}x2",
        f"cvt.rn.satfinite.{name}x2.f32 {{d}}, {{a}}, {{b}};",
        "f32 f32",
        "u16",
        lambda a, b, kind=kind, top=top: fp8_pair(kind, top, a, b),
        ranges="small",
    )

case("cvt_ftz_f32_f16", "cvt.ftz.f32.f16 {d}, {a};", "f16", "f32", lambda a: a)
case(
    "cvt_ftz_f16_f32",
    "cvt.rn.ftz.f16.f32 {d}, {a};",
    "f32",
    "f16",
    lambda a: tiny(a) if tiny(a) == 0 else between(F16, "rn")(a),
)
case(
    "cvt_relu_bf16",
    "cvt.rn.relu.bf16.f32 {d}, {a};",
    "f32",
    "bf16",
    lambda a: a if math.isnan(a) else max(between(BF16, "rn")(a), 0.0) + 0.0,
)
case("cvt_bf16_s32", "cvt.rn.bf16.s32 {d}, {a};", "s32", "bf16", lambda a: rounded(Fraction(a), BF16))
case("ex2_f16", "ex2.approx.f16 {d}, {a};", "f16", "f16", lambda a: 2.0**a, tolerance=2e-3, ranges="positive")
case(
    "ex2_bf16x2",
    "mov.b32 {d}, {{{a}, {a}}}; ex2.approx.ftz.bf16x2 {d}, {d}; and.b32 {d}, {d}, 0xffff; shl.b32 {d}, {d}, 16;",
    "bf16",
    "f32",
    lambda a: 2.0**a,
    tolerance=1e-2,
    ranges="positive",
)
case(
    "tf32",
    "cvt.rna.tf32.f32 {d}, {a};",
    "f32",
    "f32",
    lambda a: math.copysign(
        float(math.floor(abs(Fraction(a)) / (q := Fraction(2) ** (math.frexp(a)[1] - 11)) + Fraction(1, 2)) * q), a
    ),
    ranges="positive",
)
case(
    "setp_f16x2",
    "mov.b32 {d}, {{{a}, {b}}}; mov.b32 %r30, {{{b}, {a}}}; setp.lt.f16x2 %p1|%p2, {d}, %r30;"
    " selp.b32 {d}, 1, 0, %p1; @%p2 add.u32 {d}, {d}, 2;",
    "f16 f16",
    "u32",
    lambda a, b: int(a < b) + 2 * int(b < a),
)
case(
    "set_f16x2",
    "mov.b32 {d}, {{{a}, {b}}}; mov.b32 %r30, {{{b}, {a}}}; set.ge.f16x2.f16x2 {d}, {d}, %r30;",
    "f16 f16",
    "u32",
    lambda a, b: 0x3C00 * int(a >= b) + (0x3C00 << 16) * int(b >= a),
)
for test, holds in (("finite", math.isfinite), ("infinite", math.isinf), ("notanumber", math.isnan),
                    ("subnormal", lambda a: 0 < abs(a) < 2.0**-126)):  # fmt: skip
    case(
        f"testp_{test}",
        f"testp.{test}.f32 %p1, {{a}}; selp.u32 {{d}}, 1, 0, %p1;",
        "f32",
        "u32",
        lambda a, holds=holds: int(holds(a)),
    )

PACKED = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}


def packed(kind: str, function: Callable[..., float]) -> Callable[..., int]:
    def reference(*words: int) -> int:
        halves = [np.array([w], np.uint32).view(PACKED[kind]).astype(np.float64) for w in words]
        out = np.array([function(*(float(h[i]) for h in halves)) for i in range(2)])
        with np.errstate(over="ignore"):
            bits = out.astype(PACKED[kind]).view(np.uint16)
        bits = np.where(np.isnan(out), 0x7FFF, bits).astype(np.uint16)
        return int(bits.view(np.uint32)[0])

    return reference


for kind in ("f16", "bf16"):
    for op, function in (("add", ADD), ("sub", SUB), ("mul", MUL)):
        case(
            f"{op}_{kind}x2",
            f"{op}.{kind}x2 {{d}}, {{a}}, {{b}};",
            "u32 u32",
            "u32",
            packed(kind, exactly(function, FORMATS[kind])),
        )
    case(
        f"fma_{kind}x2",
        f"fma.rn.{kind}x2 {{d}}, {{a}}, {{b}}, {{c}};",
        "u32 u32 u32",
        "u32",
        packed(kind, exactly(FMA, FORMATS[kind])),
    )
    case(
        f"max_{kind}x2",
        f"max.{kind}x2 {{d}}, {{a}}, {{b}};",
        "u32 u32",
        "u32",
        packed(kind, lambda a, b: pick(a, b, True)),
    )
