"""Every arithmetic opcode against Python integers and exact rationals, on corner cases and random operands."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvgen.emulator import Library
from tests.emulator.conftest import Build
from tests.emulator.exact import BF16, F16, F32, F64, Format, rounded
from tests.emulator.programs import HEADER, entry, run

N = 128
DTYPES: dict[str, Any] = {
    "u8": np.uint8, "s8": np.int8, "u16": np.uint16, "s16": np.int16, "u32": np.uint32, "s32": np.int32,
    "u64": np.uint64, "s64": np.int64, "f32": np.float32, "f64": np.float64, "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
}  # fmt: skip
FORMATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}


@dataclass(frozen=True)
class Case:
    """`code` uses {d} and {a} {b} {c}; `reference` maps Python numbers to one."""

    code: str
    inputs: str
    output: str
    reference: Callable[..., Any]
    tolerance: float = 0.0
    ranges: str = "any"


CASES: dict[str, Case] = {}


def case(name: str, code: str, inputs: str, output: str, reference: Callable[..., Any], **more: Any) -> None:
    assert name not in CASES
    CASES[name] = Case(code, inputs, output, reference, **more)


def bits_of(kind: str) -> int:
    return int(kind.lstrip("usbf"))


def wrap(value: int, kind: str) -> int:
    n = bits_of(kind)
    value &= (1 << n) - 1
    return value - (1 << n) if kind[0] == "s" and value >> (n - 1) else value


def integer(name: str, code: str, inputs: str, output: str, reference: Callable[..., int]) -> None:
    case(name, code, inputs, output, lambda *v: wrap(reference(*v), output))


def clamp(value: int, kind: str) -> int:
    n = bits_of(kind)
    low, high = (-(1 << (n - 1)), (1 << (n - 1)) - 1) if kind[0] == "s" else (0, (1 << n) - 1)
    return max(low, min(high, value))


def truncated_division(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


# ---------------------------------------------------------------- integers
for t in ("u16", "s16", "u32", "s32", "u64", "s64"):
    integer(f"add_{t}", f"add.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, lambda a, b: a + b)
    integer(f"sub_{t}", f"sub.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, lambda a, b: a - b)
    integer(f"mul_lo_{t}", f"mul.lo.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, lambda a, b: a * b)
    integer(f"mul_hi_{t}", f"mul.hi.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, lambda a, b, n=bits_of(t): (a * b) >> n)
    integer(f"mad_lo_{t}", f"mad.lo.{t} {{d}}, {{a}}, {{b}}, {{c}};", f"{t} {t} {t}", t, lambda a, b, c: a * b + c)
    integer(f"min_{t}", f"min.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, min)
    integer(f"max_{t}", f"max.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, max)
    integer(f"div_{t}", f"or.b{t[1:]} {{b}}, {{b}}, 1; div.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t,
            lambda a, b, t=t: truncated_division(a, wrap(b | 1, t)))
    integer(f"rem_{t}", f"or.b{t[1:]} {{b}}, {{b}}, 1; rem.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t,
            lambda a, b, t=t: a - wrap(b | 1, t) * truncated_division(a, wrap(b | 1, t)))
    integer(f"sad_{t}", f"sad.{t} {{d}}, {{a}}, {{b}}, {{c}};", f"{t} {t} {t}", t, lambda a, b, c: c + abs(a - b))
    integer(f"shr_{t}", f"and.b32 {{b}}, {{b}}, 127; shr.{t} {{d}}, {{a}}, {{b}};", f"{t} u32", t,
            lambda a, b: a >> (b & 127))
    for op, sign in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">=")):
        compare = eval(f"lambda a, b: int(a {sign} b)")
        integer(f"setp_{op}_{t}", f"setp.{op}.{t} %p1, {{a}}, {{b}}; selp.u32 {{d}}, 1, 0, %p1;", f"{t} {t}", "u32", compare)
for t in ("s16", "s32", "s64"):
    integer(f"abs_{t}", f"abs.{t} {{d}}, {{a}};", t, t, abs)
    integer(f"neg_{t}", f"neg.{t} {{d}}, {{a}};", t, t, lambda a: -a)
for t, w in (("u16", "u32"), ("s16", "s32"), ("u32", "u64"), ("s32", "s64")):
    integer(f"mul_wide_{t}", f"mul.wide.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", w, lambda a, b: a * b)
    integer(f"mad_wide_{t}", f"mad.wide.{t} {{d}}, {{a}}, {{b}}, {{c}};", f"{t} {t} {w}", w, lambda a, b, c: a * b + c)
for n in (16, 32, 64):
    u = f"u{n}"
    integer(f"and_{n}", f"and.b{n} {{d}}, {{a}}, {{b}};", f"{u} {u}", u, lambda a, b: a & b)
    integer(f"or_{n}", f"or.b{n} {{d}}, {{a}}, {{b}};", f"{u} {u}", u, lambda a, b: a | b)
    integer(f"xor_{n}", f"xor.b{n} {{d}}, {{a}}, {{b}};", f"{u} {u}", u, lambda a, b: a ^ b)
    integer(f"not_{n}", f"not.b{n} {{d}}, {{a}};", u, u, lambda a: ~a)
    integer(f"cnot_{n}", f"cnot.b{n} {{d}}, {{a}};", u, u, lambda a: int(a == 0))
    integer(f"shl_{n}", f"and.b32 {{b}}, {{b}}, 127; shl.b{n} {{d}}, {{a}}, {{b}};", f"{u} u32", u,
            lambda a, b: a << (b & 127))
for n in (32, 64):
    u = f"u{n}"
    integer(f"popc_{n}", f"popc.b{n} {{d}}, {{a}};", u, "u32", lambda a: a.bit_count())
    integer(f"clz_{n}", f"clz.b{n} {{d}}, {{a}};", u, "u32", lambda a, n=n: n - a.bit_length())
    integer(f"brev_{n}", f"brev.b{n} {{d}}, {{a}};", u, u, lambda a, n=n: int(f"{a:0{n}b}"[::-1], 2))
    integer(f"bfind_u{n}", f"bfind.u{n} {{d}}, {{a}};", u, "u32", lambda a: a.bit_length() - 1)
    integer(f"bfind_s{n}", f"bfind.s{n} {{d}}, {{a}};", f"s{n}", "u32", lambda a: (~a if a < 0 else a).bit_length() - 1)
    integer(f"bfind_shift_u{n}", f"bfind.shiftamt.u{n} {{d}}, {{a}};", u, "u32",
            lambda a, n=n: n - a.bit_length() if a else -1)
    integer(f"bfi_{n}", f"bfi.b{n} {{d}}, {{a}}, {{b}}, 5, 11;", f"{u} {u}", u,
            lambda a, b: (b & ~(2047 << 5)) | (a & 2047) << 5)
    integer(f"bfi_past_{n}", f"bfi.b{n} {{d}}, {{a}}, {{b}}, {n - 4}, 30;", f"{u} {u}", u,
            lambda a, b, n=n: (b & ~(15 << (n - 4))) | (a & 15) << (n - 4))
    integer(f"bfe_u{n}", f"bfe.u{n} {{d}}, {{a}}, 3, 9;", u, u, lambda a: a >> 3 & 511)
    integer(f"bfe_s{n}", f"bfe.s{n} {{d}}, {{a}}, 3, 9;", f"s{n}", f"s{n}",
            lambda a: (a >> 3 & 511) - (512 if a >> 11 & 1 else 0))
    integer(f"bfe_past_s{n}", f"bfe.s{n} {{d}}, {{a}}, {n - 3}, 40;", f"s{n}", f"s{n}", lambda a, n=n: a >> (n - 3))
    integer(f"bfe_empty_{n}", f"bfe.s{n} {{d}}, {{a}}, 7, 0;", f"s{n}", f"s{n}", lambda a: 0)
integer("add_sat", "add.sat.s32 {d}, {a}, {b};", "s32 s32", "s32", lambda a, b: clamp(a + b, "s32"))
integer("sub_sat", "sub.sat.s32 {d}, {a}, {b};", "s32 s32", "s32", lambda a, b: clamp(a - b, "s32"))
integer("carry_add", "add.cc.u32 {d}, {a}, {b}; addc.u32 {d}, 0, 0;", "u32 u32", "u32", lambda a, b: (a + b) >> 32)
integer("carry_sub", "sub.cc.u32 {d}, {a}, {b}; subc.u32 {d}, {c}, 0;", "u32 u32 u32", "u32",
        lambda a, b, c: c - int(a < b))
integer("carry_add_64", "add.cc.u64 {d}, {a}, {b}; addc.cc.u64 {d}, {a}, {b}; addc.u64 {d}, {d}, 0;", "u64 u64", "u64",
        lambda a, b: (s := a + b + ((a + b) >> 64)) + (s >> 64))
integer("carry_mad", "mad.lo.cc.u32 {d}, {a}, {b}, {c}; madc.hi.u32 {d}, {a}, {b}, 0;", "u32 u32 u32", "u32",
        lambda a, b, c: (a * b + c) >> 32)
integer("mul24", "mul24.lo.s32 {d}, {a}, {b};", "s32 s32", "s32",
        lambda a, b: wrap(a << 8, "s32") // 256 * (wrap(b << 8, "s32") // 256))
integer("shf_l_wrap", "shf.l.wrap.b32 {d}, {a}, {b}, {c};", "u32 u32 u32", "u32",
        lambda a, b, c: ((b << 32 | a) << (c & 31)) >> 32)
integer("shf_r_clamp", "and.b32 {c}, {c}, 63; shf.r.clamp.b32 {d}, {a}, {b}, {c};", "u32 u32 u32", "u32",
        lambda a, b, c: (b << 32 | a) >> min(c & 63, 32))
integer("lop3", "lop3.b32 {d}, {a}, {b}, {c}, 0xCA;", "u32 u32 u32", "u32", lambda a, b, c: (a & b) | (~a & c))
integer("lop3_xor_or", "lop3.b32 {d}, {a}, {b}, {c}, 0xBE;", "u32 u32 u32", "u32", lambda a, b, c: (a ^ b) | c)
integer("dp4a", "dp4a.s32.u32 {d}, {a}, {b}, {c};", "u32 u32 s32", "s32",
        lambda a, b, c: c + sum(wrap(a >> 8 * i, "s8") * (b >> 8 * i & 255) for i in range(4)))
integer("dp2a", "dp2a.hi.u32.s32 {d}, {a}, {b}, {c};", "u32 u32 s32", "s32",
        lambda a, b, c: c + sum((a >> 16 * i & 65535) * wrap(b >> 8 * (i + 2), "s8") for i in range(2)))
integer("slct", "slct.s32.s32 {d}, {a}, {b}, {c};", "s32 s32 s32", "s32", lambda a, b, c: a if c >= 0 else b)
integer("set", "set.lt.and.u32.s32 {d}, {a}, {b}, %p0;", "s32 s32", "u32", lambda a, b: 0)
integer("setp_pair", "setp.lt.or.s32 %p1|%p2, {a}, {b}, !%p0; selp.b32 {d}, 2, 0, %p1; @%p2 add.s32 {d}, {d}, 1;",
        "s32 s32", "u32", lambda a, b: 3)
integer("guard", "mov.b32 {d}, 7; setp.hi.u32 %p1, {a}, {b}; @!%p1 mov.b32 {d}, 9;", "u32 u32", "u32",
        lambda a, b: 7 if a > b else 9)
integer("pack", "mov.b64 {d}, {{{a}, {b}}};", "u32 u32", "u64", lambda a, b: b << 32 | a)
integer("unpack", "mov.b64 {{_, {d}}}, {a};", "u64", "u32", lambda a: a >> 32)
integer("pack_16", "mov.b32 {d}, {{{a}, {b}}};", "u16 u16", "u32", lambda a, b: b << 16 | a)


def prmt(a: int, b: int, selector: int) -> int:
    source = (b << 32 | a).to_bytes(8, "little")
    out = []
    for i in range(4):
        s = selector >> 4 * i & 15
        byte = source[s & 7]
        out.append((255 if byte >> 7 else 0) if s & 8 else byte)
    return int.from_bytes(bytes(out), "little")


integer("prmt", "prmt.b32 {d}, {a}, {b}, {c};", "u32 u32 u32", "u32", lambda a, b, c: prmt(a, b, c & 0xFFFF))
integer("prmt_rc16", "prmt.b32.rc16 {d}, {a}, {b}, {c};", "u32 u32 u32", "u32",
        lambda a, b, c: prmt(a, b, 0x3232 if c & 1 else 0x1010))
integer("prmt_b4e", "prmt.b32.b4e {d}, {a}, {b}, {c};", "u32 u32 u32", "u32",
        lambda a, b, c: int.from_bytes(bytes((b << 32 | a).to_bytes(8, "little")[(c % 4 - i) % 8] for i in range(4)),
                                       "little"))

INTEGER_KINDS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
for source in INTEGER_KINDS:
    for target in INTEGER_KINDS:
        integer(f"cvt_{target}_{source}", f"cvt.{target}.{source} {{d}}, {{a}};", source, target, lambda a: a)
for source, target in (("s32", "s8"), ("s32", "u8"), ("u32", "s16"), ("s64", "u32"), ("u64", "s32"), ("s32", "u16")):
    integer(f"cvt_sat_{target}_{source}", f"cvt.sat.{target}.{source} {{d}}, {{a}};", source, target,
            lambda a, target=target: clamp(a, target))

# ---------------------------------------------------------------- floats


def tiny(x: float) -> float:
    return math.copysign(0.0, x) if abs(x) < 2.0**-126 else x


def exactly(function: Callable[..., Fraction], form: Format, mode: str = "rn", ftz: bool = False) -> Callable[..., float]:
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


def signless(x: float) -> bool:
    return x == 0


for t in ("f32", "f64"):
    form = FORMATS[t]
    for op, function in (("add", ADD), ("sub", SUB), ("mul", MUL)):
        for mode in ("", "rn", "rz", "rm", "rp"):
            dotted = f".{mode}" if mode else ""
            case(f"{op}_{t}_{mode}", f"{op}{dotted}.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t,
                 exactly(function, form, mode or "rn"))
    for mode in ("rn", "rz", "rp"):
        case(f"fma_{t}_{mode}", f"fma.{mode}.{t} {{d}}, {{a}}, {{b}}, {{c}};", f"{t} {t} {t}", t, exactly(FMA, form, mode))
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
case("mul_sat", "mul.sat.f32 {d}, {a}, {b};", "f32 f32", "f32",
     lambda a, b: 0.0 if math.isnan(r := exactly(MUL, F32)(a, b)) else min(max(r, 0.0), 1.0))


def pick(a: float, b: float, largest: bool) -> float:
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    order = sorted((a, b), key=lambda x: (x, math.copysign(1, x)))
    return order[1] if largest else order[0]


def nan_or(function: Callable[[float, float], float]) -> Callable[[float, float], float]:
    return lambda a, b: math.nan if math.isnan(a) or math.isnan(b) else function(a, b)


for t in ("f32", "f64", "f16", "bf16"):
    for op, largest in (("min", False), ("max", True)):
        choose = (lambda largest: lambda a, b: pick(a, b, largest))(largest)
        case(f"{op}_{t}", f"{op}.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, choose)
        if t != "f64":
            case(f"{op}_nan_{t}", f"{op}.NaN.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, nan_or(choose))
for t in ("f16", "bf16"):
    form = FORMATS[t]
    for op, function in (("add", ADD), ("sub", SUB), ("mul", MUL)):
        case(f"{op}_{t}", f"{op}.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, exactly(function, form))
    case(f"fma_{t}", f"fma.rn.{t} {{d}}, {{a}}, {{b}}, {{c}};", f"{t} {t} {t}", t, exactly(FMA, form))
    case(f"fma_relu_{t}", f"fma.rn.relu.{t} {{d}}, {{a}}, {{b}}, {{c}};", f"{t} {t} {t}", t,
         lambda a, b, c, form=form: r if math.isnan(r := exactly(FMA, form)(a, b, c)) else max(r, 0.0))
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
        case(f"setp_{op}_{t}", f"setp.{op}.{t} %p1, {{a}}, {{b}}; selp.u32 {{d}}, 1, 0, %p1;", f"{t} {t}", "u32", compare)


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
            case(f"cvt_{mode}_{target}_{source}", f"cvt.{mode}.{target}.{source} {{d}}, {{a}};", source, target,
                 to_integer(target, mode, wide))
for source in ("s32", "u32", "s64", "u64", "u8", "s16"):
    for target in ("f32", "f64", "f16"):
        for mode in ("rn", "rz", "rp"):
            case(f"cvt_{mode}_{target}_{source}", f"cvt.{mode}.{target}.{source} {{d}}, {{a}};", source, target,
                 lambda a, f=FORMATS[target], mode=mode: rounded(Fraction(a), f, mode))


def between(form: Format, mode: str) -> Callable[[float], float]:
    return lambda a: rounded(Fraction(a), form, mode) if math.isfinite(a) and a else a


for source, target in (("f32", "f16"), ("f32", "bf16"), ("f64", "f32"), ("f64", "f16")):
    for mode in ("rn", "rz", "rm", "rp") if source == "f64" or target == "f16" else ("rn", "rz"):
        case(f"cvt_{mode}_{target}_{source}", f"cvt.{mode}.{target}.{source} {{d}}, {{a}};", source, target,
             between(FORMATS[target], mode))
for source, target in (("f16", "f32"), ("bf16", "f32"), ("f16", "f64"), ("f32", "f64")):
    case(f"cvt_{target}_{source}", f"cvt.{target}.{source} {{d}}, {{a}};", source, target, lambda a: a)
for mode, function in {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}.items():
    case(f"cvt_{mode}_f32", f"cvt.{mode}.f32.f32 {{d}}, {{a}};", "f32", "f32",
         lambda a, f=function: math.copysign(float(f(a)), a) if math.isfinite(a) else a)
case("cvt_sat_f32", "cvt.sat.f32.f32 {d}, {a};", "f32", "f32",
     lambda a: 0.0 if math.isnan(a) else min(max(a, 0.0), 1.0))


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
    case(f"cvt_{name}x2", f"cvt.rn.satfinite.{name}x2.f32 {{d}}, {{a}}, {{b}};", "f32 f32", "u16",
         lambda a, b, kind=kind, top=top: fp8_pair(kind, top, a, b), ranges="small")

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
        case(f"{op}_{kind}x2", f"{op}.{kind}x2 {{d}}, {{a}}, {{b}};", "u32 u32", "u32",
             packed(kind, exactly(function, FORMATS[kind])))
    case(f"fma_{kind}x2", f"fma.rn.{kind}x2 {{d}}, {{a}}, {{b}}, {{c}};", "u32 u32 u32", "u32",
         packed(kind, exactly(FMA, FORMATS[kind])))
    case(f"max_{kind}x2", f"max.{kind}x2 {{d}}, {{a}}, {{b}};", "u32 u32", "u32",
         packed(kind, lambda a, b: pick(a, b, True)))

# ---------------------------------------------------------------- running them
REGISTER = {8: "%rs", 16: "%rs", 32: "%r", 64: "%rd"}
WIDTH = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}


def register(kind: str, index: int) -> str:
    return f"{REGISTER[WIDTH.get(kind) or bits_of(kind)]}{index}"


def ptx_type(kind: str) -> str:
    return "b16" if kind in ("f16", "bf16") else kind


def kernel(name: str, c: Case) -> str:
    kinds = c.inputs.split()
    body = ["setp.ne.u32 %p0, 0, 0;", "mov.u32 %r40, %tid.x;"]
    names = {}
    for i, kind in enumerate(kinds):
        names["abc"[i]] = register(kind, 10 + i)
        size = np.dtype(DTYPES[kind]).itemsize
        body.append(f"ld.param.u64 %rd20, [p{i + 1}]; mad.wide.u32 %rd21, %r40, {size}, %rd20;")
        body.append(f"ld.global.{ptx_type(kind)} {names['abc'[i]]}, [%rd21];")
    names["d"] = register(c.output, 15 if WIDTH.get(c.output, 32) != 16 else 14)
    body.append(c.code.format(**names))
    size = np.dtype(DTYPES[c.output]).itemsize
    body.append(f"mad.wide.u32 %rd22, %r40, {size}, %rd0; st.global.{ptx_type(c.output)} [%rd22], {names['d']};")
    params = ", ".join(f".param .u64 p{i}" for i in range(len(kinds) + 1))
    return entry(f"op_{name}", "\n".join(body), params)


@pytest.fixture(scope="module")
def library(build: Build) -> Library:
    return build([HEADER + "".join(kernel(n, c) for n, c in CASES.items())])


FLOAT_CORNERS = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 65504.0, 65520.0, 1e-8, 6e-8, 448.0, 460.0, 3e38, 1e-40,
                 -1e-45, math.inf, -math.inf, math.nan, 2147483648.0, 4294967296.0, -2147483904.0, 127.5, 1 / 3]  # fmt: skip


def operands(kind: str, ranges: str, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    dtype = DTYPES[kind]
    if kind in WIDTH:
        if ranges == "positive":
            return rng.uniform(0.01, 8, N).astype(dtype)
        if ranges == "small":
            return (rng.standard_normal(N) * 300 + 0.01).astype(dtype)
        corners = rng.choice(FLOAT_CORNERS, N // 2)
        spread = rng.standard_normal(N // 2) * 2.0 ** rng.integers(-20, 20, N // 2)
        with np.errstate(over="ignore"):
            return np.concatenate([corners, spread]).astype(dtype)
    info = np.iinfo(dtype)
    corners = rng.choice(np.array([info.min, info.max, 0, 1, info.max - 1, info.max // 2, 31, 32], dtype), N // 2)
    return np.concatenate([corners, rng.integers(info.min, info.max, N - N // 2, dtype, endpoint=True)]).astype(dtype)


@pytest.mark.parametrize("name", CASES)
def test_opcode(name: str, library: Library) -> None:
    c = CASES[name]
    rng = np.random.default_rng(sum(name.encode()))
    inputs = [operands(k, c.ranges, rng) for k in c.inputs.split()]
    out = np.zeros(N, DTYPES[c.output])
    run(library, f"op_{name}", out, *inputs)
    plain = [[float(x) if k in WIDTH else int(x) for x in v] for k, v in zip(c.inputs.split(), inputs, strict=True)]
    with np.errstate(over="ignore"):
        expected = np.array([c.reference(*row) for row in zip(*plain, strict=True)]).astype(DTYPES[c.output])
    if c.tolerance:
        np.testing.assert_allclose(out, expected, rtol=c.tolerance, atol=1e-6)
        return
    same = out == expected
    if c.output in WIDTH:
        nan = np.isnan(out.astype(np.float64)) & np.isnan(expected.astype(np.float64))
        same = (same & (np.signbit(out) == np.signbit(expected))) | nan
    wrong = np.flatnonzero(~same)
    assert not wrong.size, [(tuple(p[i] for p in plain), out[i], expected[i]) for i in wrong[:4]]
