"""Arithmetic on f32, f64, f16, bf16 and packed pairs; the opcodes shared with integers branch here by type."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvgen.emulator import integer_ops
from kvgen.emulator.context import Context, Handler, Instruction
from kvgen.emulator.ptxtypes import TYPES, PtxType

ROUNDINGS = ("rn", "rz", "rm", "rp")
ROUND_CODE = {"rn": "ROUND_N", "rz": "ROUND_Z", "rm": "ROUND_M", "rp": "ROUND_P", "rna": "ROUND_NA"}
HALVES = "f16 bf16 f16x2 bf16x2"
_SIGN = {"add": "+", "sub": "-", "mul": "*", "div": "/", "fma": "f", "sqrt": "s"}

Typed = Callable[[Context, Instruction, PtxType], str]


def half_family(kind: PtxType) -> str:
    """The beginning of the names of helpers for a 16-bit format."""
    return "bfloat" if kind.bfloat else "half"


def to_half(kind: PtxType, value: str) -> str:
    """C that rounds an f32 to a 16-bit format, to nearest."""
    return f"emu_to_{half_family(kind)}({value})"


def _flush(expression: str, kind: PtxType, ftz: bool) -> str:
    return f"ftz({expression})" if ftz and kind.name == "f32" else expression


def _takes_ftz(ins: Instruction, kind: PtxType) -> bool:
    """.ftz, which f64 and bf16 do not have."""
    ftz = ins.modifiers.flag("ftz")
    if ftz and kind.name in ("f64", "bf16", "bf16x2"):
        raise ins.fail(f".ftz does not take .{kind.name}")
    return ftz


def by_type(types: str, **families: Typed) -> Handler:
    """A handler that reads the type and leaves the rest to one of `families`, keyed by kinds of types: fw=..., hp=..."""

    def handler(cx: Context, ins: Instruction) -> str:
        kind = ins.modifiers.type(types)
        return next(function for kinds, function in families.items() if kind.kind in kinds)(cx, ins, kind)

    return handler


# ---------------------------------------------------------------- f32, f64 and f32x2
def _computed(opcode: str, rounding: str, kind: PtxType, values: Sequence[str]) -> str:
    """One correctly rounded operation."""
    if rounding != "rn":
        padded = ", ".join([*values, *(["0"] * (3 - len(values)))])
        return f"emu_round_{kind.name}('{_SIGN[opcode]}', {ROUND_CODE[rounding]}, {padded})"
    if opcode == "fma":
        return f"emu_fma_{kind.name}({', '.join(values)})"
    return f"({values[0]} {_SIGN[opcode]} {values[1]})"


def _operation(ins: Instruction, kind: PtxType, *, mixed: bool = False) -> Callable[[Sequence[str]], str]:
    """Takes the modifiers of an add, sub, mul or fma; gives its result as a function of C operands of a scalar type."""
    opcode = "fma" if ins.opcode == "mad" else ins.opcode
    ins.count(4 if opcode == "fma" else 3)
    scalar = kind.lane if kind.kind == "w" else kind
    rounding = ins.modifiers.choice(ROUNDINGS) if opcode == "fma" else ins.modifiers.optional(ROUNDINGS) or "rn"
    ftz = not mixed and _takes_ftz(ins, scalar)
    sat = kind.name == "f32" and ins.modifiers.flag("sat")

    def operation(operands: Sequence[str]) -> str:
        value = _flush(_computed(opcode, rounding, scalar, [_flush(o, scalar, ftz) for o in operands]), scalar, ftz)
        return f"{'clamp01' if sat else 'canonical'}_{scalar.name}({value})"

    return operation


def arithmetic(cx: Context, ins: Instruction, kind: PtxType) -> str:
    """add sub mul fma mad on f32, f64 and f32x2, with a rounding, .ftz and .sat."""
    operation = _operation(ins, kind)
    values = [cx.value(ins, o, kind) for o in ins.operands[1:]]
    value = kind.each_lane(values, operation) if kind.kind == "w" else operation(values)
    return cx.assign(ins, ins.operands[0], kind, value)


def half_arithmetic(cx: Context, ins: Instruction, kind: PtxType) -> str:
    """add sub mul fma on 16-bit floats and pairs of them; the mixed forms (add.f32.bf16) widen all operands but the last."""
    if kind.kind == "p" or ins.opcode == "mul" or not ins.modifiers.optional(("f32",)):
        return _half(cx, ins, kind)
    f32 = TYPES["f32"]
    operation = _operation(ins, f32, mixed=True)
    widened = [f"{half_family(kind)}_value({cx.value(ins, o, kind)})" for o in ins.operands[1:-1]]
    return cx.assign(ins, ins.operands[0], f32, operation([*widened, cx.value(ins, ins.operands[-1], f32)]))


def divide(cx: Context, ins: Instruction, kind: PtxType) -> str:
    """div with a rounding, .approx or .full.

    .full (at most 2 ulp off on a GPU) is divided exactly here. So is .approx (2 ulp), but past 2**126 it multiplies by
    a reciprocal of 0 as the ISA says.
    """
    ins.count(3)
    mode = ins.modifiers.choice(("approx", "full", *ROUNDINGS) if kind.name == "f32" else ROUNDINGS)
    ftz = _takes_ftz(ins, kind)
    a, b = (_flush(cx.value(ins, o, kind), kind, ftz) for o in ins.operands[1:])
    if mode == "approx":
        value = f"divide_approximately({a}, {b})"
    else:
        value = _computed("div", "rn" if mode == "full" else mode, kind, [a, b])
    return cx.assign(ins, ins.operands[0], kind, f"canonical_{kind.name}({_flush(value, kind, ftz)})")


def root_and_reciprocal(cx: Context, ins: Instruction) -> str:
    """sqrt and rcp with a rounding or .approx, rsqrt with .approx.

    The approximations are rounded correctly here; on a GPU rcp is at most 1 ulp off, sqrt 2**-23 and rsqrt 2**-22.9
    relative. The .approx.ftz.f64 forms work on the upper 32 bits alone, to nearest here.
    """
    ins.count(2)
    kind = ins.modifiers.type("f32 f64")
    mode = ins.modifiers.choice(("approx",) if ins.opcode == "rsqrt" else ("approx", *ROUNDINGS))
    ftz = ins.modifiers.flag("ftz")
    a = cx.value(ins, ins.operands[1], kind)
    if kind.name == "f64" and ftz:
        if mode != "approx" or ins.opcode == "sqrt":
            raise ins.fail(f"{ins.opcode}.{mode}.f64 does not take .ftz")
        return cx.assign(ins, ins.operands[0], kind, f"emu_upper_half_{ins.opcode}({a})")
    if kind.name == "f64" and mode == "approx" and ins.opcode != "rsqrt":
        raise ins.fail(f"{ins.opcode}.f64 has no .approx without .ftz")
    a = _flush(a, kind, ftz)
    one = f"({kind.c})1"
    if ins.opcode == "rsqrt":
        value = f"({kind.c})(1.0 / emu_sqrt_f64((double){a}))"
    elif mode in ("approx", "rn"):
        value = f"emu_sqrt_{kind.name}({a})" if ins.opcode == "sqrt" else f"({one} / {a})"
    else:
        value = _computed("sqrt", mode, kind, [a]) if ins.opcode == "sqrt" else _computed("div", mode, kind, [one, a])
    return cx.assign(ins, ins.operands[0], kind, f"canonical_{kind.name}({_flush(value, kind, ftz)})")


def test_number(cx: Context, ins: Instruction) -> str:
    """testp; zeros count as normal."""
    ins.count(2)
    kind = ins.modifiers.type("f32 f64")
    test = ins.modifiers.choice(("finite", "infinite", "number", "notanumber", "normal", "subnormal"))
    a = cx.value(ins, ins.operands[1], kind)
    value = {
        "finite": f"is_finite_{kind.name}({a})",
        "infinite": f"(!is_finite_{kind.name}({a}) && !is_nan_{kind.name}({a}))",
        "number": f"!is_nan_{kind.name}({a})",
        "notanumber": f"is_nan_{kind.name}({a})",
        "normal": f"(is_finite_{kind.name}({a}) && !is_subnormal_{kind.name}({a}))",
        "subnormal": f"is_subnormal_{kind.name}({a})",
    }[test]
    return cx.assign(ins, ins.operands[0], TYPES["pred"], value)


def copysign(cx: Context, ins: Instruction) -> str:
    ins.count(3)
    kind = ins.modifiers.type("f32 f64")
    sign, value = (cx.value(ins, o, kind) for o in ins.operands[1:])
    return cx.assign(ins, ins.operands[0], kind, f"copysign_{kind.name}({sign}, {value})")


# ---------------------------------------------------------------- halves
def _half(cx: Context, ins: Instruction, kind: PtxType) -> str:
    ins.count({"fma": 4, "ex2": 2, "tanh": 2}.get(ins.opcode, 3))
    operation, flags = f"H_{ins.opcode.upper()}", []
    if ins.opcode == "fma":
        ins.modifiers.choice(("rn",))
    elif ins.opcode in ("add", "sub", "mul"):
        ins.modifiers.flag("rn")
    elif ins.opcode in ("min", "max"):
        operation += "_NAN" if ins.modifiers.flag("NaN") else ""
        if ins.modifiers.flag("xorsign"):
            ins.modifiers.choice(("abs",))
            flags.append("H_XORSIGN")
    if ins.opcode == "ex2" and kind.bfloat:
        ins.modifiers.choice(("ftz",))
        flags.append("H_FTZ")
    elif ins.opcode not in ("ex2", "tanh") and _takes_ftz(ins, kind):
        flags.append("H_FTZ")
    if ins.opcode == "fma" and ins.modifiers.flag("relu"):
        flags.append("H_RELU")
    elif ins.opcode in ("add", "sub", "mul", "fma") and not kind.bfloat and ins.modifiers.flag("sat"):
        flags.append("H_SAT")
    values = [cx.value(ins, o, kind) for o in ins.operands[1:]]
    values += ["0"] * (3 - len(values))
    name = "emu_half2" if kind.kind == "p" else "emu_half"
    value = f"{name}({int(kind.bfloat)}, {operation}, {' | '.join(flags) or '0'}, {', '.join(values)})"
    return cx.assign(ins, ins.operands[0], kind, value)


# ---------------------------------------------------------------- every float type
def min_max(cx: Context, ins: Instruction, kind: PtxType) -> str:
    """min and max of two operands, of f32 also of three; .xorsign.abs compares magnitudes."""
    ins.count(3, 4 if kind.name == "f32" else None)
    if kind.name == "f64":
        nan = ftz = xorsign = magnitude = False
    else:
        nan, xorsign = ins.modifiers.flag("NaN"), len(ins.operands) == 3 and ins.modifiers.flag("xorsign")
        magnitude, ftz = (xorsign or len(ins.operands) == 4) and ins.modifiers.flag("abs"), _takes_ftz(ins, kind)
        if xorsign and not magnitude:
            raise ins.fail(".xorsign needs .abs")
    values = [_flush(cx.value(ins, o, kind), kind, ftz) for o in ins.operands[1:]]
    compared = [f"abs_{kind.name}({v})" for v in values] if magnitude else values
    function = f"emu_{ins.opcode}{'_nan' if nan else ''}_{kind.name}"
    value = compared[0]
    for other in compared[1:]:
        value = f"{function}({value}, {other})"
    if xorsign:
        value = f"xor_sign({value}, {values[0]}, {values[1]})"
    return cx.assign(ins, ins.operands[0], kind, value)


def sign_change(cx: Context, ins: Instruction, kind: PtxType) -> str:
    """abs and neg: bit operations on every float type."""
    ins.count(2)
    ftz = _takes_ftz(ins, kind)
    a = cx.value(ins, ins.operands[1], kind)
    if kind.kind == "f":
        return cx.assign(ins, ins.operands[0], kind, f"{ins.opcode}_{kind.name}({_flush(a, kind, ftz)})")
    mask = "0x8000u" if kind.kind == "h" else "0x80008000u"
    sign = f"& ~{mask}" if ins.opcode == "abs" else f"^ {mask}"
    if ftz:
        a = f"half_flush({a})" if kind.kind == "h" else kind.each_lane([a], lambda v: f"half_flush({v[0]})")
    return cx.assign(ins, ins.operands[0], kind, f"({a} {sign})")


def transcendental(cx: Context, ins: Instruction) -> str:
    """ex2 lg2 sin cos tanh, all .approx, by the host's libm, which is less than 1 ulp off.

    On a GPU: ex2 2 ulp, lg2 2**-22, sin and cos 2**-20.5 absolute within 2 pi, tanh 2**-11 relative; of 16-bit types
    ex2 2**-9.9 (f16) and 2**-7 (bf16) relative, tanh 2**-10.987 and 2**-8 absolute.
    """
    ins.count(2)
    kind = ins.modifiers.type(f"f32 {HALVES}" if ins.opcode in ("ex2", "tanh") else "f32")
    ins.modifiers.choice(("approx",))
    if kind.kind in "hp":
        return _half(cx, ins, kind)
    ftz = ins.opcode != "tanh" and _takes_ftz(ins, kind)
    a = _flush(cx.value(ins, ins.operands[1], kind), kind, ftz)
    return cx.assign(ins, ins.operands[0], kind, f"canonical_f32({_flush(f'emu_{ins.opcode}({a})', kind, ftz)})")


_FLOATS = f"f32 f64 {HALVES}"
_SUMS = f"{integer_ops.INTEGERS} {_FLOATS} f32x2"
HANDLERS: dict[str, Handler] = {
    "add": by_type(f"{_SUMS} u16x2 s16x2", usq=integer_ops.add_sub, fw=arithmetic, hp=half_arithmetic),
    "sub": by_type(_SUMS, us=integer_ops.add_sub, fw=arithmetic, hp=half_arithmetic),
    "mul": by_type(_SUMS, us=integer_ops.multiply, fw=arithmetic, hp=half_arithmetic),
    "mad": by_type(f"{integer_ops.INTEGERS} f32 f64", us=integer_ops.multiply, f=arithmetic),
    "fma": by_type(f"{_FLOATS} f32x2", fw=arithmetic, hp=half_arithmetic),
    "div": by_type(f"{integer_ops.INTEGERS} f32 f64", us=integer_ops.divide, f=divide),
    "min": by_type(f"{integer_ops.INTEGERS} u16x2 s16x2 {_FLOATS}", usq=integer_ops.min_max, f=min_max, hp=_half),
    "max": by_type(f"{integer_ops.INTEGERS} u16x2 s16x2 {_FLOATS}", usq=integer_ops.min_max, f=min_max, hp=_half),
    "abs": by_type(f"s16 s32 s64 {_FLOATS}", s=integer_ops.absolute, fhp=sign_change),
    "neg": by_type(f"s16 s32 s64 {_FLOATS}", s=integer_ops.negate, fhp=sign_change),
    "copysign": copysign,
    "sqrt": root_and_reciprocal,
    "rcp": root_and_reciprocal,
    "rsqrt": root_and_reciprocal,
    "ex2": transcendental,
    "lg2": transcendental,
    "sin": transcendental,
    "cos": transcendental,
    "tanh": transcendental,
    "testp": test_number,
}
