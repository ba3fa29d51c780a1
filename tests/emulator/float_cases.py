"""Arithmetic on f32, f64, f16, bf16 and packed pairs against exact rationals, and against libm."""

from __future__ import annotations

import ctypes
import ctypes.util
import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from tests.emulator.cases import Suite
from tests.emulator.exact import BF16, F16, F32, F64, Format, root, rounded

SUITE = Suite("float")
add = SUITE.add
FORMATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}
MODES = ("rn", "rz", "rm", "rp")
TINIEST = {"f16": 2.0**-14, "bf16": 2.0**-126, "f32": 2.0**-126}
Reference = Callable[..., Any]


def scalar(kind: str) -> str:
    return kind.removesuffix("x2")


def flush(x: float, kind: str = "f32") -> float:
    return math.copysign(0.0, x) if abs(x) < TINIEST[scalar(kind)] else x


def flushing(function: Reference, kind: str, ftz: bool) -> Reference:
    return (lambda *v: flush(function(*(flush(x, kind) for x in v)), kind)) if ftz else function


def saturated(x: float) -> float:
    return 0.0 if math.isnan(x) else min(max(x, 0.0), 1.0) + 0.0


def relu(x: float) -> float:
    return x if math.isnan(x) else max(x, 0.0) + 0.0


ADD: Reference = lambda a, b: a + b  # noqa: E731
SUB: Reference = lambda a, b: a - b  # noqa: E731
MUL: Reference = lambda a, b: a * b  # noqa: E731
DIV: Reference = lambda a, b: a / b  # noqa: E731
FMA: Reference = lambda a, b, c: a * b + c  # noqa: E731


def doubles(function: Reference, values: tuple[float, ...]) -> float:
    with np.errstate(all="ignore"):
        return float(function(*(np.float64(x) for x in values)))


def exactly(function: Reference, form: Format, mode: str = "rn") -> Reference:
    """The rounding of a rational operation; zeros, infinities and NaN follow IEEE doubles."""

    def reference(*values: float) -> float:
        if not all(math.isfinite(x) for x in values):
            return doubles(function, values)
        try:
            exact = function(*map(Fraction, values))
        except ZeroDivisionError:
            return doubles(function, values)
        if exact:
            return rounded(exact, form, mode)
        zero = doubles(function, values)
        if mode == "rm" and function in (ADD, SUB, FMA):  # downwards a sum of 0 is -0 unless both terms are +0
            *product, last = values
            terms = [doubles(MUL, (product[0], product[1] if len(product) == 2 else 1.0)), last]
            terms[1] *= -1 if function is SUB else 1
            return 0.0 if all(math.copysign(1, t) > 0 for t in terms) else -0.0
        return zero

    return reference


def clamping(function: Reference, clamp: str) -> Reference:
    after = {"": lambda x: x, "sat": saturated, "relu": relu}[clamp]
    return lambda *v: after(function(*v))


def dotted(*words: str) -> str:
    return "".join(f".{w}" for w in words if w)


# ---------------------------------------------------------------- add sub mul fma
OPERATIONS = {"add": (ADD, 2), "sub": (SUB, 2), "mul": (MUL, 2), "fma": (FMA, 3), "mad": (FMA, 3)}
for op, (function, count) in OPERATIONS.items():
    operands = ", ".join(("{a}", "{b}", "{c}")[:count])
    modes = MODES if count == 3 else ("", *MODES)
    for mode, ftz, sat in itertools.product(modes, ("", "ftz"), ("", "sat")):
        reference = flushing(exactly(function, F32, mode or "rn"), "f32", bool(ftz))
        kinds = ("f32",) if sat or op == "mad" else ("f32", "f32x2")
        for t in kinds:
            code = f"{op}{dotted(mode, ftz, sat)}.{t} {{d}}, {operands};"
            add(code, " ".join([t] * count), t, clamping(reference, sat))
    for mode in modes:
        code = f"{op}{dotted(mode)}.f64 {{d}}, {operands};"
        add(code, " ".join(["f64"] * count), "f64", exactly(function, F64, mode or "rn"))
    if op != "mad":
        clamps = ("", "sat", "relu") if op == "fma" else ("", "sat")
        for t, mode, ftz, clamp in itertools.product(
            ("f16", "f16x2", "bf16", "bf16x2"), ("rn",) if op == "fma" else ("", "rn"), ("", "ftz"), clamps
        ):
            if t.startswith("bf16") and (ftz or clamp == "sat"):
                continue
            reference = clamping(flushing(exactly(function, FORMATS[scalar(t)]), t, bool(ftz)), clamp)
            code = f"{op}{dotted(mode, ftz, clamp)}.{t} {{d}}, {operands};"
            add(code, " ".join([t] * count), t, reference)
    if op not in ("mul", "mad"):  # the mixed forms
        for t, mode, sat in itertools.product(("f16", "bf16"), modes, ("", "sat")):
            code = f"{op}{dotted(mode, sat)}.f32.{t} {{d}}, {operands};"
            add(code, " ".join([t] * (count - 1) + ["f32"]), "f32", clamping(exactly(function, F32, mode or "rn"), sat))

# ---------------------------------------------------------------- div rcp sqrt rsqrt
ONE_OVER: Reference = lambda a: 1 / a  # noqa: E731


def square_root(mode: str, form: Format) -> Reference:
    def reference(a: float) -> float:
        if math.isnan(a) or a < 0:
            return math.nan
        return root(Fraction(a), form, mode) if math.isfinite(a) and a else a

    return reference


def inverse_root(a: float) -> float:
    if a == 0:
        return math.copysign(math.inf, a)
    return math.nan if math.isnan(a) or a < 0 else 0.0 if math.isinf(a) else 1 / math.sqrt(a)


def approximate_quotient(a: float, b: float) -> float:
    if abs(b) > 2.0**126:
        return doubles(MUL, (a, math.copysign(0.0, b)))
    return float(exactly(DIV, F32)(a, b))


for mode in MODES:
    for ftz in ("", "ftz"):
        for op, function, inputs in (("div", exactly(DIV, F32, mode), "{a}, {b}"),
                                     ("rcp", exactly(ONE_OVER, F32, mode), "{a}"),
                                     ("sqrt", square_root(mode, F32), "{a}")):  # fmt: skip
            kinds = "f32 f32" if op == "div" else "f32"
            add(f"{op}.{mode}{dotted(ftz)}.f32 {{d}}, {inputs};", kinds, "f32", flushing(function, "f32", bool(ftz)))
    add(f"div.{mode}.f64 {{d}}, {{a}}, {{b}};", "f64 f64", "f64", exactly(DIV, F64, mode))
    add(f"rcp.{mode}.f64 {{d}}, {{a}};", "f64", "f64", exactly(ONE_OVER, F64, mode))
    add(f"sqrt.{mode}.f64 {{d}}, {{a}};", "f64", "f64", square_root(mode, F64))
for ftz in ("", "ftz"):
    more: dict[str, Any] = {"tolerance": 2.0**-22.9, "absolute": 0.0 if ftz else 2.0**-149}
    for op, function, inputs in (
        ("div.approx", approximate_quotient, "{a}, {b}"), ("div.full", exactly(DIV, F32), "{a}, {b}"),
        ("rcp.approx", exactly(ONE_OVER, F32), "{a}"), ("sqrt.approx", square_root("rn", F32), "{a}"),
        ("rsqrt.approx", inverse_root, "{a}"),
    ):  # fmt: skip
        kinds = "f32 f32" if op.startswith("div") else "f32"
        add(f"{op}{dotted(ftz)}.f32 {{d}}, {inputs};", kinds, "f32", flushing(function, "f32", bool(ftz)), **more)
add("rsqrt.approx.f64 {d}, {a};", "f64", "f64", inverse_root, tolerance=2.0**-50)


def upper_half(function: Reference) -> Reference:
    """Only the upper 32 bits of operand and result count, and both are flushed."""

    def cut(x: float, half: int) -> float:
        bits = int(np.array(x).view(np.uint64)) + half & ~0xFFFFFFFF
        y = float(np.array(bits, np.uint64).view(np.float64))
        return math.copysign(0.0, x) if abs(y) < 2.0**-1022 else y

    def reference(a: float) -> float:
        out = float(function(cut(a, 0)))
        return cut(out, 0x80000000) if math.isfinite(out) else out

    return reference


add("rcp.approx.ftz.f64 {d}, {a};", "f64", "f64", upper_half(exactly(ONE_OVER, F64)))
add("rsqrt.approx.ftz.f64 {d}, {a};", "f64", "f64", upper_half(inverse_root))


# ---------------------------------------------------------------- min max abs neg copysign testp
def pick(values: tuple[float, ...], largest: bool, nan: bool) -> float:
    numbers = [v for v in values if not math.isnan(v)]
    if not numbers or (nan and len(numbers) < len(values)):
        return math.nan
    return (max if largest else min)(numbers, key=lambda x: (x, math.copysign(1, x)))


def signed_pick(values: tuple[float, ...], largest: bool, nan: bool) -> float:
    out = pick(tuple(map(abs, values)), largest, nan)
    return out if math.isnan(out) else math.copysign(out, math.prod(math.copysign(1, v) for v in values))


for op, largest in (("min", False), ("max", True)):
    add(f"{op}.f64 {{d}}, {{a}}, {{b}};", "f64 f64", "f64", lambda *v, g=largest: pick(v, g, False))
    for ftz, nan in itertools.product(("", "ftz"), ("", "NaN")):
        for t in ("f32", "f16", "f16x2") if ftz else ("f32", "f16", "f16x2", "bf16", "bf16x2"):
            for function, words in ((pick, ""), (signed_pick, "xorsign.abs")):
                chosen = lambda *v, f=function, g=largest, n=bool(nan): f(v, g, n)  # noqa: E731
                code = f"{op}{dotted(ftz, nan, words)}.{t} {{d}}, {{a}}, {{b}};"
                add(code, f"{t} {t}", t, flushing(chosen, t, bool(ftz)))
        for magnitude in ("", "abs"):
            of = abs if magnitude else float
            chosen = lambda *v, of=of, g=largest, n=bool(nan): pick(tuple(map(of, v)), g, n)  # noqa: E731
            code = f"{op}{dotted(ftz, nan, magnitude)}.f32 {{d}}, {{a}}, {{b}}, {{c}};"
            add(code, "f32 f32 f32", "f32", flushing(chosen, "f32", bool(ftz)))
for t, ftz in [*itertools.product(("f32", "f16", "f16x2"), ("", "ftz")), ("f64", ""), ("bf16", ""), ("bf16x2", "")]:
    for op, function in (("abs", abs), ("neg", lambda a: -a)):
        reference = flushing(function, t, bool(ftz))
        add(f"{op}{dotted(ftz)}.{t} {{d}}, {{a}};", t, t, reference, canonical=False)
for t in ("f32", "f64"):
    tiniest = 2.0**-126 if t == "f32" else 2.0**-1022
    add(f"copysign.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, lambda a, b: math.copysign(b, a), canonical=False)
    for test, holds in (
        ("finite", math.isfinite), ("infinite", math.isinf), ("notanumber", math.isnan), ("number", lambda a: a == a),
        ("normal", lambda a, m=tiniest: a == 0 or (math.isfinite(a) and abs(a) >= m)),
        ("subnormal", lambda a, m=tiniest: 0 < abs(a) < m),
    ):  # fmt: skip
        add(f"testp.{test}.{t} {{d}}, {{a}};", t, "pred", holds)

# ---------------------------------------------------------------- ex2 lg2 sin cos tanh, against the host's libm
LIBM = ctypes.CDLL(ctypes.util.find_library("m"))


def libm(name: str) -> Reference:
    function = getattr(LIBM, name)
    function.argtypes, function.restype = [ctypes.c_double], ctypes.c_double
    return function


NAMES = {"ex2": "exp2", "lg2": "log2", "sin": "sin", "cos": "cos", "tanh": "tanh"}
for op, name in NAMES.items():
    for ftz in ("",) if op == "tanh" else ("", "ftz"):
        reference = flushing(libm(name), "f32", bool(ftz))
        more = {"tolerance": 2.0**-22.5, "absolute": 0.0 if ftz else 2.0**-149}
        add(f"{op}.approx{dotted(ftz)}.f32 {{d}}, {{a}};", "f32", "f32", reference, **more)
for t in ("f16", "f16x2", "bf16", "bf16x2"):
    ulp = 2.0**-10 if t.startswith("f16") else 2.0**-7
    words = ".ftz" if t.startswith("bf16") else ""
    reference = flushing(libm("exp2"), t, bool(words))
    add(f"ex2.approx{words}.{t} {{d}}, {{a}};", t, t, reference, tolerance=ulp, absolute=0.0 if words else 2.0**-25)
    add(f"tanh.approx.{t} {{d}}, {{a}};", t, t, libm("tanh"), tolerance=ulp)
