"""Arithmetic on f32, f64, f16, bf16 and packed pairs; the opcodes shared with integers branch here by type."""

from __future__ import annotations

from kvgen.emulator import integer_ops
from kvgen.emulator.context import Context, Handler, Instruction
from kvgen.emulator.ptxtypes import TYPES, PtxType

ROUNDINGS = ("rn", "rz", "rm", "rp")
ROUND_CODE = {"rn": "ROUND_N", "rz": "ROUND_Z", "rm": "ROUND_M", "rp": "ROUND_P", "rna": "ROUND_NA"}
_HALVES = "f16 bf16 f16x2 bf16x2"
_SIGN = {"add": "+", "sub": "-", "mul": "*", "div": "/", "fma": "f", "sqrt": "s"}


def _kind_of(ins: Instruction) -> str:
    words = ins.modifiers.words
    return TYPES[words[-1]].kind if words and words[-1] in TYPES else "?"


def _flush(expression: str, kind: PtxType, ftz: bool) -> str:
    return f"ftz({expression})" if ftz and kind.name == "f32" else expression


def _flush_flag(ins: Instruction, kind: PtxType) -> bool:
    ftz = ins.modifiers.flag("ftz")
    if ftz and kind.name == "f64":
        raise ins.fail(".ftz does not take .f64")
    return ftz


def arithmetic(cx: Context, ins: Instruction) -> str:
    """add sub mul div fma on f32 and f64, with a rounding, .ftz, .sat; div also .approx and .full."""
    kind = ins.modifiers.type("f32 f64")
    count = 3 if ins.opcode == "fma" else 2
    ins.count(count + 1)
    ftz = _flush_flag(ins, kind)
    loose = ins.modifiers.optional(("approx", "full")) if ins.opcode == "div" else None
    rounding = (ins.modifiers.optional(ROUNDINGS) if loose is None else None) or "rn"
    sat = ins.opcode != "div" and kind.name == "f32" and ins.modifiers.flag("sat")
    values = [_flush(cx.value(ins, o, kind), kind, ftz) for o in ins.operands[1:]]
    if rounding != "rn":
        padded = ", ".join([*values, *(["0"] * (3 - count))])
        value = f"emu_round_{kind.name}('{_SIGN[ins.opcode]}', {ROUND_CODE[rounding]}, {padded})"
    elif ins.opcode == "fma":
        value = f"__builtin_fma{'f' if kind.name == 'f32' else ''}({', '.join(values)})"
    else:
        value = f"({values[0]} {_SIGN[ins.opcode]} {values[1]})"
    value = _flush(value, kind, ftz)
    return cx.assign(ins, ins.operands[0], kind, f"clamp01({value})" if sat else f"canonical({value})")


def _half(cx: Context, ins: Instruction, operation: str) -> str:
    kind = ins.modifiers.type(_HALVES)
    flags = []
    if ins.opcode in ("add", "sub", "mul", "fma"):
        ins.modifiers.flag("rn")
        flags += ["H_SAT"] if ins.modifiers.flag("sat") else []
    if ins.opcode == "fma":
        flags += ["H_RELU"] if ins.modifiers.flag("relu") else []
    flags += ["H_FTZ"] if ins.modifiers.flag("ftz") else []
    values = [cx.value(ins, o, kind) for o in ins.operands[1:]]
    ins.count({"fma": 4, "ex2": 2, "tanh": 2}.get(ins.opcode, 3))
    values += ["0"] * (3 - len(values))
    name = "half_op2" if kind.kind == "p" else "half_op"
    family = "Bfloat" if kind.bfloat else "Half"
    flag_text = " | ".join(flags) if len(flags) > 1 else flags[0] if flags else "0"
    value = f"{name}<{family}, {operation}, ({flag_text})>({', '.join(values)})"
    return cx.assign(ins, ins.operands[0], kind, value)


def add(cx: Context, ins: Instruction) -> str:
    if _kind_of(ins) in "hp":
        return _half(cx, ins, "H_ADD")
    return arithmetic(cx, ins) if _kind_of(ins) == "f" else integer_ops.add_sub(cx, ins, "+")


def sub(cx: Context, ins: Instruction) -> str:
    if _kind_of(ins) in "hp":
        return _half(cx, ins, "H_SUB")
    return arithmetic(cx, ins) if _kind_of(ins) == "f" else integer_ops.add_sub(cx, ins, "-")


def mul(cx: Context, ins: Instruction) -> str:
    if _kind_of(ins) in "hp":
        return _half(cx, ins, "H_MUL")
    return arithmetic(cx, ins) if _kind_of(ins) == "f" else integer_ops.multiply(cx, ins, False)


def mad(cx: Context, ins: Instruction) -> str:
    if _kind_of(ins) == "f":
        ins.opcode = "fma"
        return arithmetic(cx, ins)
    return integer_ops.multiply(cx, ins, True)


def fma(cx: Context, ins: Instruction) -> str:
    return _half(cx, ins, "H_FMA") if _kind_of(ins) in "hp" else arithmetic(cx, ins)


def div(cx: Context, ins: Instruction) -> str:
    return arithmetic(cx, ins) if _kind_of(ins) == "f" else integer_ops.divide(cx, ins, "divide")


def min_max(cx: Context, ins: Instruction) -> str:
    name = ins.opcode
    if _kind_of(ins) not in "fhp":
        return integer_ops.min_max(cx, ins, "smaller" if name == "min" else "larger")
    nan = ins.modifiers.flag("NaN")
    if _kind_of(ins) in "hp":
        return _half(cx, ins, f"H_{name.upper()}{'_NAN' if nan else ''}")
    kind = ins.modifiers.type("f32 f64")
    ins.count(3, 4 if kind.name == "f32" else None)
    ftz = _flush_flag(ins, kind)
    values = [_flush(cx.value(ins, o, kind), kind, ftz) for o in ins.operands[1:]]
    function = f"float_{name}{'_nan' if nan else ''}"
    value = f"{function}({values[0]}, {values[1]})"
    for extra in values[2:]:
        value = f"{function}({value}, {extra})"
    return cx.assign(ins, ins.operands[0], kind, value)


def sign_change(cx: Context, ins: Instruction) -> str:
    """abs and neg: bit operations on every float type."""
    group = _kind_of(ins)
    if group not in "fhp":
        return integer_ops.absolute(cx, ins) if ins.opcode == "abs" else integer_ops.negate(cx, ins)
    ins.count(2)
    kind = ins.modifiers.type(f"f32 f64 {_HALVES}")
    ftz = _flush_flag(ins, kind)
    a = cx.value(ins, ins.operands[1], kind)
    if group == "f":
        return cx.assign(ins, ins.operands[0], kind, f"float_{ins.opcode}({_flush(a, kind, ftz)})")
    if ftz:
        family = "Bfloat" if kind.bfloat else "Half"
        a = (
            f"{family}::flush({a})"
            if group == "h"
            else f"({family}::flush((u16){a}) | (u32){family}::flush((u16)({a} >> 16)) << 16)"
        )
    mask = "0x8000" if group == "h" else "0x80008000u"
    sign = f"& ~{mask}" if ins.opcode == "abs" else f"^ {mask}"
    return cx.assign(ins, ins.operands[0], kind, f"({a} {sign})")


def copysign(cx: Context, ins: Instruction) -> str:
    ins.count(3)
    kind = ins.modifiers.type("f32 f64")
    sign, value = (cx.value(ins, o, kind) for o in ins.operands[1:])
    return cx.assign(ins, ins.operands[0], kind, f"copy_sign({sign}, {value})")


def root_and_reciprocal(cx: Context, ins: Instruction) -> str:
    """sqrt and rcp with a rounding or .approx, rsqrt with .approx. An approximation is computed exactly here."""
    ins.count(2)
    kind = ins.modifiers.type("f32 f64")
    ftz = ins.modifiers.flag("ftz")  # rcp.approx.ftz.f64 exists: it flushes only subnormals of f64, which f32's do not
    if ftz and kind.name == "f64":
        raise ins.fail("the .approx.ftz.f64 forms are not supported")
    choices = ("approx",) if ins.opcode == "rsqrt" else ("approx", *ROUNDINGS)
    mode = ins.modifiers.choice(choices)
    a = _flush(cx.value(ins, ins.operands[1], kind), kind, ftz)
    if mode in ("approx", "rn"):
        suffix = "f" if kind.name == "f32" else ""
        root = f"__builtin_sqrt{suffix}({a})"
        one = f"({kind.c})1"
        value = {"sqrt": root, "rcp": f"{one} / {a}", "rsqrt": f"({kind.c})(1.0 / __builtin_sqrt((double){a}))"}[
            ins.opcode
        ]
    elif ins.opcode == "rcp":
        value = f"emu_round_{kind.name}('/', {ROUND_CODE[mode]}, 1, {a}, 0)"
    else:
        value = f"emu_round_{kind.name}('s', {ROUND_CODE[mode]}, {a}, 0, 0)"
    return cx.assign(ins, ins.operands[0], kind, f"canonical({_flush(f'({value})', kind, ftz)})")


def transcendental(cx: Context, ins: Instruction) -> str:
    """ex2 lg2 sin cos tanh: .approx, computed by the host's libm."""
    ins.modifiers.choice(("approx",))
    if _kind_of(ins) in "hp" and ins.opcode in ("ex2", "tanh"):
        return _half(cx, ins, f"H_{ins.opcode.upper()}")
    ins.count(2)
    kind = ins.modifiers.type("f32")
    ftz = _flush_flag(ins, kind)
    a = _flush(cx.value(ins, ins.operands[1], kind), kind, ftz)
    function = {"ex2": "exp2f", "lg2": "log2f", "sin": "sinf", "cos": "cosf", "tanh": "tanhf"}[ins.opcode]
    value = _flush(f"__builtin_{function}({a})", kind, ftz)
    return cx.assign(ins, ins.operands[0], kind, f"canonical({value})")


def test_number(cx: Context, ins: Instruction) -> str:
    """testp."""
    ins.count(2)
    kind = ins.modifiers.type("f32 f64")
    test = ins.modifiers.choice(("finite", "infinite", "number", "notanumber", "normal", "subnormal"))
    a = cx.value(ins, ins.operands[1], kind)
    value = {
        "finite": f"__builtin_isfinite({a})",
        "infinite": f"(__builtin_isinf({a}) != 0)",
        "number": f"!is_nan({a})",
        "notanumber": f"is_nan({a})",
        "normal": f"(__builtin_isnormal({a}) != 0)",
        "subnormal": f"(__builtin_isfinite({a}) && !__builtin_isnormal({a}) && {a} != 0)",
    }[test]
    return cx.assign(ins, ins.operands[0], TYPES["pred"], value)


HANDLERS: dict[str, Handler] = {
    "add": add,
    "sub": sub,
    "mul": mul,
    "mad": mad,
    "fma": fma,
    "div": div,
    "min": min_max,
    "max": min_max,
    "abs": sign_change,
    "neg": sign_change,
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
