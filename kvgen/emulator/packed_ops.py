"""cvt of packed pairs, of tf32, and of formats of 8, 6 and 4 bits; cvt.pack of integers.

Of two operands the first becomes the upper half. Of the stochastic forms (.rs) only those to bf16x2 are known: in the
others it is not specified which random bits count below the smallest normal number.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvgen.emulator.context import Context, Instruction
from kvgen.emulator.float_ops import ROUND_CODE, half_family, to_half
from kvgen.emulator.ptxtypes import TYPES, PtxType, bit_type

_FP8 = ("e4m3x2", "e5m2x2")
_FP6_FP4 = ("e2m3x2", "e3m2x2", "e2m1x2")
SOURCES = f"f16x2 bf16x2 {' '.join((*_FP8, *_FP6_FP4))} ue8m0x2"
TARGETS = f"{SOURCES} tf32"
QUADS = tuple(f"{name}x4" for name in ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1"))  # only stochastic
F32, S32, U32 = TYPES["f32"], TYPES["s32"], TYPES["u32"]


def convert(cx: Context, ins: Instruction, target: PtxType, source: PtxType) -> str:
    if target.kind == "m":
        if source.name == "f32":
            return _to_tf32(cx, ins, target)
    elif target.name == "ue8m0x2":
        if source.name in ("f32", "bf16x2"):
            return _to_scale(cx, ins, target, source)
    elif source.name == "ue8m0x2":
        if target.name == "bf16x2":
            return _from_scale(cx, ins, target, source)
    elif target.kind == "n":
        if source.name == "f32" or source.kind == "p":
            return _to_small(cx, ins, target, source)
    elif source.kind == "n":
        if target.name == "f16x2":
            return _from_small(cx, ins, target, source)
    elif target.kind == "p" and source.name == "f32":
        return _to_halves(cx, ins, target)
    raise ins.fail(f"no conversion from .{source.name} to .{target.name}")


def _packed(cx: Context, ins: Instruction, target: PtxType, high: str, low: str) -> str:
    width = 4 if target.bits == 8 else target.bits // 2
    value = f"(u32){high} << {width} | (u32){low}"
    return cx.assign(ins, ins.operands[0], bit_type(target.bits), value, extend=True)


def _floats(cx: Context, ins: Instruction, source: PtxType) -> list[str]:
    """The two values to convert, upper one first."""
    if source.name == "f32":
        ins.count(3)
        return [cx.value(ins, o, source) for o in ins.operands[1:]]
    ins.count(2)
    a = cx.value(ins, ins.operands[1], source)
    return [f"{half_family(source)}_value((u16)({a} >> {shift}))" for shift in (16, 0)]


def _clamped(values: Sequence[str], relu: bool) -> list[str]:
    return [f"emu_max_nan_f32({v}, 0.0f)" for v in values] if relu else list(values)


def _format(kind: PtxType) -> str:
    return f"FORMAT_{kind.name.removesuffix('x2').upper()}"


def _to_tf32(cx: Context, ins: Instruction, target: PtxType) -> str:
    ins.count(2)
    rounding = ins.modifiers.choice(("rna", "rn", "rz"))
    relu = rounding != "rna" and ins.modifiers.flag("relu")
    finite = int(ins.modifiers.flag("satfinite"))
    (a,) = _clamped([cx.value(ins, ins.operands[1], F32)], relu)
    value = f"emu_encode({a}, FORMAT_TF32, {ROUND_CODE[rounding]}, {finite}) << 13"
    return cx.assign(ins, ins.operands[0], target, value)


def _to_halves(cx: Context, ins: Instruction, target: PtxType) -> str:
    rounding = ins.modifiers.choice(("rn", "rz", "rs") if target.bfloat else ("rn", "rz"))
    if rounding == "rs":
        ins.count(4)
        *values, random = (cx.value(ins, o, k) for o, k in zip(ins.operands[1:], (F32, F32, U32), strict=True))
        high, low = (f"bfloat_from_random({v}, {random} >> {s})" for v, s in zip(values, (16, 0), strict=True))
        return _packed(cx, ins, target, high, low)
    relu, finite = ins.modifiers.flag("relu"), ins.modifiers.flag("satfinite")
    values = _clamped(_floats(cx, ins, F32), relu)
    if rounding == "rn" and not finite:
        high, low = (to_half(target, v) for v in values)
    else:
        high, low = (f"emu_encode({v}, {_format(target)}, {ROUND_CODE[rounding]}, {int(finite)})" for v in values)
    return _packed(cx, ins, target, high, low)


def _to_small(cx: Context, ins: Instruction, target: PtxType, source: PtxType) -> str:
    ins.modifiers.choice(("rn",))
    ins.modifiers.choice(("satfinite",))
    values = _clamped(_floats(cx, ins, source), ins.modifiers.flag("relu"))
    high, low = (f"emu_encode({v}, {_format(target)}, ROUND_N, 1)" for v in values)
    return _packed(cx, ins, target, high, low)


def _from_small(cx: Context, ins: Instruction, target: PtxType, source: PtxType) -> str:
    ins.count(2)
    ins.modifiers.choice(("rn",))
    a = cx.value(ins, ins.operands[1], source)
    width = 4 if source.bits == 8 else 8
    values = [f"emu_decode((u32){a} >> {shift}, {_format(source)})" for shift in (width, 0)]
    high, low = (f"emu_to_half({v})" for v in _clamped(values, ins.modifiers.flag("relu")))
    return _packed(cx, ins, target, high, low)


def _to_scale(cx: Context, ins: Instruction, target: PtxType, source: PtxType) -> str:
    upwards = int(ins.modifiers.choice(("rz", "rp")) == "rp")
    finite = int(ins.modifiers.flag("satfinite"))
    high, low = (f"emu_encode_scale({v}, {upwards}, {finite})" for v in _floats(cx, ins, source))
    return _packed(cx, ins, target, high, low)


def _from_scale(cx: Context, ins: Instruction, target: PtxType, source: PtxType) -> str:
    ins.count(2)
    ins.modifiers.choice(("rn",))
    a = cx.value(ins, ins.operands[1], source)
    high, low = (f"bfloat_from_scale((u8)({a} >> {shift}))" for shift in (8, 0))
    return _packed(cx, ins, target, high, low)


def pack_integers(cx: Context, ins: Instruction) -> str:
    """cvt.pack: two s32 saturated to 16, 8, 4 or 2 bits, above them the lower bits of c."""
    c = ins.modifiers.optional(("b32",))
    ins.modifiers.type("s32")
    ins.modifiers.choice(("sat",))
    narrow = ins.modifiers.choice(("u8", "s8", "u4", "s4", "u2", "s2") if c else ("u16", "s16"))
    bits = int(narrow[1:])
    ins.count(4 if c else 3)
    high, low = (cx.value(ins, o, S32) for o in ins.operands[1:3])
    least, most = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if narrow[0] == "s" else (0, (1 << bits) - 1)
    mask = (1 << bits) - 1
    clamped = [f"((u32)larger_s32({least}, smaller_s32({most}, {v})) & {mask}u)" for v in (high, low)]
    value = f"{clamped[0]} << {bits} | {clamped[1]}"
    if c:
        value += f" | {cx.value(ins, ins.operands[3], U32)} << {2 * bits}"
    return cx.assign(ins, ins.operands[0], U32, value)
