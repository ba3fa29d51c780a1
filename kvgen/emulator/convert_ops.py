"""Comparison, selection, moves, and conversions between types and address spaces."""

from __future__ import annotations

from kvgen.emulator.context import Context, Handler, Instruction
from kvgen.emulator.float_ops import ROUND_CODE, ROUNDINGS
from kvgen.emulator.ptxtypes import TYPES, PtxType, bit_type

_SCALARS = "u8 s8 u16 s16 u32 s32 u64 s64 f32 f64 f16 bf16"
_ORDERED = {"eq": "==", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNORDERED = {"equ": "==", "ltu": "<", "leu": "<=", "gtu": ">", "geu": ">=", "neu": "!="}
_INTEGER_COMPARE = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}
_COMPARES = (*_INTEGER_COMPARE, *_UNORDERED, "num", "nan")
_INTEGRAL = {"rni": "ROUND_N", "rzi": "ROUND_Z", "rmi": "ROUND_M", "rpi": "ROUND_P"}
_FP8 = ("e4m3x2", "e5m2x2")
PRED, B32, B16, F32 = TYPES["pred"], TYPES["b32"], TYPES["b16"], TYPES["f32"]


def half_family(kind: PtxType) -> str:
    return "Bfloat" if kind.bfloat else "Half"


# ---------------------------------------------------------------- comparison and selection
def _compare_floats(test: str, a: str, b: str) -> str:
    nan = f"(is_nan({a}) || is_nan({b}))"
    if test in _ORDERED:
        return f"({a} {_ORDERED[test]} {b})"
    if test == "ne":
        return f"({a} < {b} || {a} > {b})"
    if test == "num":
        return f"(!{nan})"
    if test == "nan":
        return nan
    return f"({nan} || {a} {_UNORDERED[test]} {b})"


def _compare(ins: Instruction, test: str, kind: PtxType, a: str, b: str, ftz: bool) -> str:
    if kind.is_integer:
        if test not in _INTEGER_COMPARE:
            raise ins.fail(f".{test} does not compare integers")
        return f"({a} {_INTEGER_COMPARE[test]} {b})"
    if test in ("lo", "ls", "hi", "hs"):
        raise ins.fail(f".{test} does not compare floats")
    if kind.kind == "h":
        family = half_family(kind)
        if ftz:
            a, b = f"{family}::flush({a})", f"{family}::flush({b})"
        a, b = f"{family}::value({a})", f"{family}::value({b})"
    elif ftz:
        a, b = f"ftz({a})", f"ftz({b})"
    return _compare_floats(test, a, b)


def _comparison(cx: Context, ins: Instruction, kinds: str) -> tuple[PtxType, str, str | None, str]:
    """Shared by setp and set: (type, condition on a and b, fold operator, ...)."""
    kind = ins.modifiers.type(kinds)
    test = ins.modifiers.choice(_COMPARES)
    fold = ins.modifiers.optional(("and", "or", "xor"))
    ftz = ins.modifiers.flag("ftz")
    if ftz and kind.is_integer:
        raise ins.fail(".ftz on integers")
    ins.count(4 if fold else 3)
    a, b = (cx.value(ins, o, kind) for o in ins.operands[1:3])
    if kind.kind == "p":
        low, high = (
            _compare(ins, test, TYPES[kind.name[:-2]], f"(u16)({a} >> {s})", f"(u16)({b} >> {s})", ftz) for s in (0, 16)
        )
        return kind, low, fold, high
    return kind, _compare(ins, test, kind, a, b, ftz), fold, ""


_COMPARABLE = "b16 b32 b64 u16 u32 u64 s16 s32 s64 f16 bf16 f32 f64 f16x2 bf16x2"
_FOLD = {"and": "&", "or": "|", "xor": "^"}


def setp(cx: Context, ins: Instruction) -> str:
    kind, condition, fold, high = _comparison(cx, ins, _COMPARABLE)
    first, second = cx.pair(ins, ins.operands[0])
    other = high if kind.kind == "p" else "!x"
    code = f"bool x = {condition}; bool y = {other}; "
    if fold:
        c = cx.predicate(ins, ins.operands[3])
        code += f"bool z = {c}; x = x {_FOLD[fold]} z; y = y {_FOLD[fold]} z; "
    code += cx.assign(ins, first, PRED, "x")
    return code + (cx.assign(ins, second, PRED, "y") if second else "")


def set_(cx: Context, ins: Instruction) -> str:
    """set: all ones (integer result) or 1.0 where the comparison holds."""
    kind, condition, fold, high = _comparison(cx, ins, _COMPARABLE)
    result = ins.modifiers.type("u16 s16 u32 s32 f16 bf16 f32 f16x2 bf16x2")
    if (kind.kind == "p") != (result.kind == "p"):
        if kind.kind == "p":
            raise ins.fail("packed comparisons give packed results here")
        raise ins.fail("a packed result needs packed operands")
    extra = f" {_FOLD[fold]} {cx.predicate(ins, ins.operands[3])}" if fold else ""
    if result.kind == "p":
        one = "0x3f80u" if result.bfloat else "0x3c00u"
        value = f"(({condition}{extra}) ? {one} : 0u) | (({high}{extra}) ? {one} << 16 : 0u)"
        return cx.assign(ins, ins.operands[0], result, value)
    one = {"f32": "1.0f", "f16": "0x3c00", "bf16": "0x3f80"}.get(result.name, "-1")
    return cx.assign(ins, ins.operands[0], result, f"({condition}{extra}) ? {one} : 0")


def selp(cx: Context, ins: Instruction) -> str:
    ins.count(4)
    kind = ins.modifiers.type("b16 b32 b64 u16 u32 u64 s16 s32 s64 f16 bf16 f32 f64")
    raw = bit_type(kind.bits)
    a, b = (cx.value(ins, o, kind) for o in ins.operands[1:3])
    if kind.kind == "f":
        a, b = f"bits<{raw.c}>({a})", f"bits<{raw.c}>({b})"
    return cx.assign(ins, ins.operands[0], raw, f"{cx.predicate(ins, ins.operands[3])} ? ({raw.c}){a} : ({raw.c}){b}")


def slct(cx: Context, ins: Instruction) -> str:
    """slct: a where c >= 0, else b (also for NaN)."""
    ins.count(4)
    by = ins.modifiers.type("s32 f32")
    kind = ins.modifiers.type("b16 b32 b64 u16 u32 u64 s16 s32 s64 f32 f64")
    ftz = ins.modifiers.flag("ftz")
    a, b = (cx.value(ins, o, kind) for o in ins.operands[1:3])
    c = cx.value(ins, ins.operands[3], by)
    c = f"ftz({c})" if ftz else c
    return cx.assign(ins, ins.operands[0], kind, f"({c} >= 0) ? {a} : {b}")


# ---------------------------------------------------------------- moves
def mov(cx: Context, ins: Instruction) -> str:
    ins.count(2)
    kind = ins.modifiers.type("pred b8 b16 b32 b64 b128 u16 u32 u64 s16 s32 s64 f16 bf16 f32 f64")
    target, source = ins.operands
    if kind.kind == "pred":
        return cx.assign(ins, target, kind, cx.predicate(ins, source))
    if not target.startswith("{"):
        raw = bit_type(kind.bits)
        if kind.kind == "f" and cx.find(source) is None:
            return cx.assign(ins, target, kind, cx.value(ins, source, kind))
        return cx.assign(ins, target, raw, cx.value(ins, source, raw))
    parts = cx.vector(target)
    width = kind.bits // len(parts)
    if width * len(parts) != kind.bits:
        raise ins.fail(f"{len(parts)} parts do not divide {kind.bits} bits")
    value = cx.value(ins, source, bit_type(kind.bits))
    return f"{kind.storage} t = {value}; " + " ".join(
        cx.assign(ins, p, bit_type(width), f"(t >> {i * width})") for i, p in enumerate(parts)
    )


def cvta(cx: Context, ins: Instruction) -> str:
    ins.count(2)
    kind = ins.modifiers.type("u64")
    to = ins.modifiers.flag("to")
    space = ins.modifiers.choice(("global", "shared", "shared::cta", "shared::cluster", "local", "const", "param"))
    source = ins.operands[1]
    if space.startswith("shared"):
        if to:
            return cx.assign(ins, ins.operands[0], kind, f"shared_from_generic({cx.value(ins, source, kind)})")
        found = cx.find(source)
        value = cx.value(ins, source, found.type if found and found.type.kind != "pred" else kind)
        return cx.assign(ins, ins.operands[0], kind, f"generic_from_shared({value})")
    return cx.assign(ins, ins.operands[0], kind, cx.value(ins, source, kind))


def isspacep(cx: Context, ins: Instruction) -> str:
    ins.count(2)
    space = ins.modifiers.choice(("global", "shared", "shared::cta", "shared::cluster", "local", "const", "param"))
    a = cx.value(ins, ins.operands[1], TYPES["u64"])
    if space.startswith("shared"):
        value = f"is_shared({a})"
    elif space == "local":
        value = " || ".join(f"within({a}, {c}, {size})" for c, size, _ in cx.locals.values()) or "false"
    elif space == "param":
        value = f"within({a}, P, PARAM_BYTES)"
    elif space == "const":
        raise ins.fail("isspacep.const is not supported")
    else:
        locals_ = "".join(f" && !within({a}, {c}, {size})" for c, size, _ in cx.locals.values())
        value = f"(!is_shared({a}) && !within({a}, P, PARAM_BYTES){locals_})"
    return cx.assign(ins, ins.operands[0], PRED, value)


# ---------------------------------------------------------------- conversions
def cvt(cx: Context, ins: Instruction) -> str:
    words = ins.modifiers.words
    if (words and words[-1] in _FP8) or (len(words) > 1 and words[-2] in _FP8):
        return _convert_fp8(cx, ins)
    if len(words) > 1 and words[-1] == "f32" and words[-2] in ("f16x2", "bf16x2"):
        return _convert_pair(cx, ins)
    if len(words) > 1 and words[-1] == "f32" and words[-2] == "tf32":
        return _convert_tf32(cx, ins)
    source = ins.modifiers.type(_SCALARS)
    target = ins.modifiers.type(_SCALARS)
    ins.count(2)
    ftz = ins.modifiers.flag("ftz")
    sat = ins.modifiers.flag("sat")
    a = cx.value(ins, ins.operands[1], source)
    if source.is_integer and target.is_integer:
        if ftz:
            raise ins.fail(".ftz between integers")
        value = f"saturate<{target.c}>({a})" if sat else f"({target.c}){a}"
    elif source.is_integer:
        value = _from_integer(ins, source, target, a, sat)
    elif target.is_integer:
        integral = ins.modifiers.choice(tuple(_INTEGRAL))
        wide = "true" if source.name == "f64" or target.bits == 64 else "false"
        value = f"float_to_int<{target.c}>((double){_as_float(source, a, ftz)}, {_INTEGRAL[integral]}, {wide})"
    else:
        value = _between_floats(ins, source, target, a, ftz, sat)
    return cx.assign(ins, ins.operands[0], target, value, extend=True)


def _as_float(source: PtxType, a: str, ftz: bool) -> str:
    if source.kind == "h":  # .ftz is about f32: a subnormal half is a normal f32
        return f"{half_family(source)}::value({a})"
    return f"ftz({a})" if ftz and source.name == "f32" else a


def _from_integer(ins: Instruction, source: PtxType, target: PtxType, a: str, sat: bool) -> str:
    rounding = ROUND_CODE[ins.modifiers.choice(ROUNDINGS)]
    signed = int(source.kind == "s")
    wide = f"(u64)({'s64' if signed else 'u64'}){a}"
    if target.kind == "h":
        value = f"narrow16<{half_family(target)}>(emu_odd_from_int({wide}, {signed}), {rounding}, 0, false)"
        return f"{half_family(target)}::from(clamp01({half_family(target)}::value({value})))" if sat else value
    value = f"({target.c}){a}" if rounding == "ROUND_N" else f"emu_int_to_{target.name}({wide}, {signed}, {rounding})"
    return f"clamp01({value})" if sat else value


def _between_floats(ins: Instruction, source: PtxType, target: PtxType, a: str, ftz: bool, sat: bool) -> str:
    value = _as_float(source, a, ftz)
    integral = ins.modifiers.optional(tuple(_INTEGRAL))
    if integral:
        value = f"float_to_integral({value}, {_INTEGRAL[integral]})"
    narrowing = target.bits < source.bits or (target.kind == "h" and source.kind == "h" and source.name != target.name)
    rounding = ins.modifiers.choice((*ROUNDINGS, "rna")) if narrowing and not integral else None
    if rounding is None:
        ins.modifiers.flag("rn")  # cvt.rn.bf16.bf16 and the like: nothing to round
    code = ROUND_CODE[rounding] if rounding else "ROUND_N"
    if target.kind == "h":
        relu, finite = ins.modifiers.flag("relu"), ins.modifiers.flag("satfinite")
        flags = " | ".join([*(["H_RELU"] if relu else []), *(["H_SAT"] if sat else [])]) or "0"
        if source.kind == "f" and code == "ROUND_N" and flags == "0" and not finite and source.name == "f32":
            return f"{half_family(target)}::from({value})"
        return f"narrow16<{half_family(target)}>({value}, {code}, {flags}, {'true' if finite else 'false'})"
    if target.name == "f32" and source.name == "f64":
        value = f"(float){value}" if code == "ROUND_N" else f"bits<float>(emu_narrow({value}, 8, 23, {code}))"
    value = f"({target.c})({value})"
    if ftz and target.name == "f32":
        value = f"ftz({value})"
    return f"clamp01({value})" if sat else f"canonical({value})"


def _convert_pair(cx: Context, ins: Instruction) -> str:
    """cvt.rn.bf16x2.f32 d, a, b: a becomes the upper half."""
    ins.count(3)
    ins.modifiers.type("f32")
    target = ins.modifiers.type("f16x2 bf16x2")
    code = ROUND_CODE[ins.modifiers.choice(("rn", "rz"))]
    relu, finite = ins.modifiers.flag("relu"), ins.modifiers.flag("satfinite")
    high, low = (cx.value(ins, o, F32) for o in ins.operands[1:])
    family = half_family(target)
    if code == "ROUND_N" and not relu and not finite:
        parts = [f"{family}::from({v})" for v in (high, low)]
    else:
        rest = f"{code}, {'H_RELU' if relu else '0'}, {'true' if finite else 'false'}"
        parts = [f"narrow16<{family}>({v}, {rest})" for v in (high, low)]
    return cx.assign(ins, ins.operands[0], B32, f"((u32){parts[0]} << 16 | {parts[1]})")


def _convert_tf32(cx: Context, ins: Instruction) -> str:
    ins.count(2)
    ins.modifiers.type("f32")
    ins.modifiers.flag("tf32")
    mode = ins.modifiers.choice(("rna", "rn", "rz"))
    a = cx.value(ins, ins.operands[1], F32)
    return cx.assign(ins, ins.operands[0], B32, f"emu_narrow({a}, 8, 10, {ROUND_CODE[mode]}) << 13")


def _convert_fp8(cx: Context, ins: Instruction) -> str:
    """Pairs of e4m3 and e5m2 from two f32 or a f16x2, and back to f16x2."""
    words = ins.modifiers.words
    ins.modifiers.choice(("rn",))
    relu = ins.modifiers.flag("relu")
    if words[-1] in _FP8:
        ins.count(2)
        source = ins.modifiers.choice(_FP8)
        ins.modifiers.type("f16x2")
        a, e4m3 = cx.value(ins, ins.operands[1], B16), int(source == "e4m3x2")
        halves = [f"to_half(emu_from_fp8((u8)({a} >> {s}), {e4m3}))" for s in (8, 0)]
        if relu:
            halves = [f"half_op<Half, H_ADD, H_RELU>({h}, 0, 0)" for h in halves]
        return cx.assign(ins, ins.operands[0], B32, f"((u32){halves[0]} << 16 | {halves[1]})")
    ins.modifiers.choice(("satfinite",))
    source_kind = ins.modifiers.type("f32 f16x2")
    e4m3 = int(ins.modifiers.choice(_FP8) == "e4m3x2")
    if source_kind.name == "f32":
        ins.count(3)
        floats = [cx.value(ins, o, F32) for o in ins.operands[1:]]
    else:
        ins.count(2)
        a = cx.value(ins, ins.operands[1], B32)
        floats = [f"half_value((u16)({a} >> {s}))" for s in (16, 0)]
    if relu:
        floats = [f"float_max_nan({f}, 0.0f)" for f in floats]
    high, low = (f"emu_to_fp8({f}, {e4m3})" for f in floats)
    return cx.assign(ins, ins.operands[0], B16, f"({high} << 8 | {low})")


HANDLERS: dict[str, Handler] = {
    "setp": setp,
    "set": set_,
    "selp": selp,
    "slct": slct,
    "mov": mov,
    "cvta": cvta,
    "isspacep": isspacep,
    "cvt": cvt,
}
