"""Comparison and selection."""

from __future__ import annotations

from kvgen.emulator.context import Context, Handler, Instruction
from kvgen.emulator.float_ops import half_family
from kvgen.emulator.ptxtypes import TYPES, PtxType, bit_type

PRED = TYPES["pred"]
_EQUAL = {"eq": "==", "ne": "!="}
_ORDER = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_UNORDERED = {"equ": "==", "ltu": "<", "leu": "<=", "gtu": ">", "geu": ">=", "neu": "!="}
_INTEGER_TESTS = {"b": _EQUAL, "s": {**_EQUAL, **_ORDER}, "u": {**_EQUAL, **_ORDER, **_UNSIGNED}}
_FLOAT_TESTS = (*_EQUAL, *_ORDER, *_UNORDERED, "num", "nan")
_FOLD = {"and": "&", "or": "|", "xor": "^"}
_PLAIN = "b16 b32 b64 u16 u32 u64 s16 s32 s64 f32 f64"
_COMPARABLE = f"{_PLAIN} f16 bf16 f16x2 bf16x2"


def _compare_floats(test: str, suffix: str, a: str, b: str) -> str:
    nan = f"(is_nan_{suffix}({a}) || is_nan_{suffix}({b}))"
    if test == "ne":
        return f"({a} < {b} || {a} > {b})"
    if test == "num":
        return f"(!{nan})"
    if test == "nan":
        return nan
    if test in _UNORDERED:
        return f"({nan} || {a} {_UNORDERED[test]} {b})"
    return f"({a} {({**_EQUAL, **_ORDER})[test]} {b})"


def _compare(kind: PtxType, test: str, a: str, b: str, ftz: bool) -> str:
    if kind.is_integer:
        return f"({a} {_INTEGER_TESTS[kind.kind][test]} {b})"
    if kind.kind == "h":
        family = half_family(kind)
        if ftz:
            a, b = f"{family}_flush({a})", f"{family}_flush({b})"
        a, b = f"{family}_value({a})", f"{family}_value({b})"
    elif ftz:
        a, b = f"ftz({a})", f"ftz({b})"
    return _compare_floats(test, "f64" if kind.name == "f64" else "f32", a, b)


def _conditions(cx: Context, ins: Instruction, kind: PtxType, *, flushes: bool = True) -> tuple[list[str], str]:
    """C of the comparison, one for each lane, and what a .and .or .xor appends to it."""
    test = ins.modifiers.choice(tuple(_INTEGER_TESTS[kind.kind]) if kind.is_integer else _FLOAT_TESTS)
    fold = ins.modifiers.optional(tuple(_FOLD))
    ftz = flushes and kind.name in ("f32", "f16", "f16x2") and ins.modifiers.flag("ftz")
    ins.count(4 if fold else 3)
    a, b = (cx.value(ins, o, kind) for o in ins.operands[1:3])
    lanes = [(kind, a, b)]
    if kind.kind == "p":
        lanes = [(kind.lane, f"(u16)({a} >> {s})", f"(u16)({b} >> {s})") for s in (0, 16)]
    appended = f" {_FOLD[fold]} {cx.predicate(ins, ins.operands[3])}" if fold else ""
    return [_compare(k, test, x, y, ftz) for k, x, y in lanes], appended


def setp(cx: Context, ins: Instruction) -> str:
    """p and the optional q: the comparison and its complement, or of a pair its two lanes."""
    kind = ins.modifiers.type(_COMPARABLE)
    conditions, fold = _conditions(cx, ins, kind)
    first, second = cx.pair(ins, ins.operands[0])
    if second and kind.kind == "h":
        raise ins.fail(f"setp.{kind.name} writes one predicate")
    other = conditions[1] if len(conditions) == 2 else f"(!{conditions[0]})"
    code = (
        f"bool x = {conditions[0]}{fold}; bool y = {other}{fold}; " if second else f"bool x = {conditions[0]}{fold}; "
    )
    code += cx.assign(ins, first, PRED, "x")
    return code + (cx.assign(ins, second, PRED, "y") if second else "")


def set_(cx: Context, ins: Instruction) -> str:
    """All ones (integer result) or 1.0 where the comparison holds, for each lane."""
    kind = ins.modifiers.type(_COMPARABLE)
    if kind.kind == "p":
        result = ins.modifiers.type(f"u32 s32 {kind.name}")
    else:
        short = "u16 s16" if kind.kind == "h" else "f32"
        result = ins.modifiers.type(f"u32 s32 {short} bf16" + ("" if kind.bfloat else " f16"))
    conditions, fold = _conditions(cx, ins, kind, flushes=not result.bfloat)
    one = {"f32": "1.0f", "f16": "0x3c00", "bf16": "0x3f80", "f16x2": "0x3c00", "bf16x2": "0x3f80"}.get(result.name)
    if kind.kind == "p":
        low, high = (f"(({c}{fold}) ? {one or '0xffff'}u : 0u)" for c in conditions)
        return cx.assign(ins, ins.operands[0], result, f"{low} | {high} << 16")
    return cx.assign(ins, ins.operands[0], result, f"({conditions[0]}{fold}) ? {one or '-1'} : 0")


def _choose(cx: Context, ins: Instruction, kind: PtxType, condition: str) -> str:
    """One of two operands, bit for bit."""
    raw = bit_type(kind.bits)
    a, b = (cx.value(ins, o, kind) for o in ins.operands[1:3])
    if kind.kind == "f":
        a, b = kind.to_bits(a), kind.to_bits(b)
    return cx.assign(ins, ins.operands[0], raw, f"{condition} ? ({raw.c}){a} : ({raw.c}){b}")


def selp(cx: Context, ins: Instruction) -> str:
    ins.count(4)
    kind = ins.modifiers.type(_PLAIN)
    return _choose(cx, ins, kind, cx.predicate(ins, ins.operands[3]))


def slct(cx: Context, ins: Instruction) -> str:
    """slct: a where c >= 0, else b (also for NaN)."""
    ins.count(4)
    by = ins.modifiers.type("s32 f32")
    kind = ins.modifiers.type(_PLAIN)
    c = cx.value(ins, ins.operands[3], by)
    if by.name == "f32" and ins.modifiers.flag("ftz"):
        c = f"ftz({c})"
    return _choose(cx, ins, kind, f"({c} >= 0)")


HANDLERS: dict[str, Handler] = {
    "setp": setp,
    "set": set_,
    "selp": selp,
    "slct": slct,
}
