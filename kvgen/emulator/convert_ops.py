"""cvt: conversions between number formats. Those of packed pairs and of formats of 8 bits and less are in packed_ops."""

from __future__ import annotations

from kvgen.emulator import packed_ops
from kvgen.emulator.context import Context, Handler, Instruction
from kvgen.emulator.float_ops import ROUND_CODE, ROUNDINGS, half_family, to_half
from kvgen.emulator.ptxtypes import PtxType

_SCALARS = "u8 s8 u16 s16 u32 s32 u64 s64 f32 f64 f16 bf16"
_INTEGRAL = {"rni": "ROUND_N", "rzi": "ROUND_Z", "rmi": "ROUND_M", "rpi": "ROUND_P"}


def cvt(cx: Context, ins: Instruction) -> str:
    if ins.modifiers.flag("pack"):
        return packed_ops.pack_integers(cx, ins)
    if quad := ins.modifiers.optional(packed_ops.QUADS):
        raise ins.fail(f".{quad} is not supported")
    source = ins.modifiers.type(f"{_SCALARS} {packed_ops.SOURCES}")
    target = ins.modifiers.type(f"{_SCALARS} {packed_ops.TARGETS}")
    if source.kind in "pn" or target.kind in "pnm":
        return packed_ops.convert(cx, ins, target, source)
    ins.count(2)
    a = cx.value(ins, ins.operands[1], source)
    if source.is_integer and target.is_integer:
        value = _between_integers(ins, target, source, a)
    elif source.is_integer:
        value = _from_integer(ins, target, source, a)
    elif target.is_integer:
        value = _to_integer(ins, target, source, a)
    else:
        value = _between_floats(ins, target, source, a)
    return cx.assign(ins, ins.operands[0], target, value, extend=True)


def _range(kind: PtxType) -> tuple[int, int]:
    return (-(1 << (kind.bits - 1)), (1 << (kind.bits - 1)) - 1) if kind.kind == "s" else (0, (1 << kind.bits) - 1)


def _between_integers(ins: Instruction, target: PtxType, source: PtxType, a: str) -> str:
    if not ins.modifiers.flag("sat"):
        return f"({target.c}){a}"
    (low, high), (least, most) = _range(target), _range(source)
    if low <= least and most <= high:
        raise ins.fail(f".sat: every .{source.name} is a .{target.name}")
    signs = [str(k.kind == "s").lower() for k in (source, target)]
    wide = f"(u64)({'s64' if source.kind == 's' else 'u64'}){a}"
    return f"({target.c})emu_saturate({wide}, {', '.join(signs)}, {target.bits})"


def _takes_ftz(ins: Instruction, target: PtxType, source: PtxType) -> bool:
    return "f32" in (target.name, source.name) and ins.modifiers.flag("ftz")


def _takes_sat(ins: Instruction, *kinds: PtxType) -> bool:
    return not any(k.bfloat for k in kinds) and ins.modifiers.flag("sat")


def _as_float(source: PtxType, a: str, ftz: bool) -> str:
    if source.kind == "h":  # .ftz is about f32: a subnormal half is a normal f32
        return f"{half_family(source)}_value({a})"
    return f"ftz({a})" if ftz and source.name == "f32" else a


def _to_integer(ins: Instruction, target: PtxType, source: PtxType, a: str) -> str:
    integral = _INTEGRAL[ins.modifiers.choice(tuple(_INTEGRAL))]
    value = _as_float(source, a, _takes_ftz(ins, target, source))
    _takes_sat(ins, source)  # out of range always saturates
    wide = "true" if source.name == "f64" or target.bits == 64 else "false"
    return f"emu_float_to_{target.c}((double){value}, {integral}, {wide})"


def _from_integer(ins: Instruction, target: PtxType, source: PtxType, a: str) -> str:
    rounding = ROUND_CODE[ins.modifiers.choice(ROUNDINGS)]
    _takes_ftz(ins, target, source)  # no integer gives a subnormal f32
    sat = _takes_sat(ins, target)
    signed = int(source.kind == "s")
    wide = f"(u64)({'s64' if signed else 'u64'}){a}"
    if target.kind == "h":
        exact = f"emu_odd_from_int({wide}, {signed})"
        return f"emu_encode({f'clamp01_f64({exact})' if sat else exact}, FORMAT_{target.name.upper()}, {rounding}, 0)"
    value = f"({target.c}){a}" if rounding == "ROUND_N" else f"emu_int_to_{target.name}({wide}, {signed}, {rounding})"
    return f"clamp01_{target.name}({value})" if sat else value


def _between_floats(ins: Instruction, target: PtxType, source: PtxType, a: str) -> str:
    ftz = _takes_ftz(ins, target, source)
    value = _as_float(source, a, ftz)
    integral = ins.modifiers.optional(tuple(_INTEGRAL)) if target == source else None
    if integral:
        value = f"emu_integral_{_float_name(source)}({value}, {_INTEGRAL[integral]})"
    rounding = _rounding(ins, target, source)
    sat = _takes_sat(ins, target, source)
    relu = finite = False
    if target.kind == "h" and source.name == "f32" and rounding in ("rn", "rz") and not (ftz or sat):
        relu, finite = ins.modifiers.flag("relu"), ins.modifiers.flag("satfinite")
    if target.kind == "h":
        value = (
            f"clamp01_{_float_name(source)}({value})" if sat else f"emu_max_nan_f32({value}, 0.0f)" if relu else value
        )
        if rounding == "rn" and source.name == "f32" and not finite:
            return to_half(target, value)
        return f"emu_encode({value}, FORMAT_{target.name.upper()}, {ROUND_CODE[rounding or 'rn']}, {int(finite)})"
    if target.name == "f32" and source.name == "f64" and rounding != "rn":
        value = f"f32_of(emu_encode({value}, FORMAT_F32, {ROUND_CODE[rounding or 'rn']}, 0))"
    value = f"({target.c})({value})"
    if ftz and target.name == "f32":
        value = f"ftz({value})"
    return f"{'clamp01' if sat else 'canonical'}_{target.name}({value})"


def _float_name(source: PtxType) -> str:
    """The type in which a float of the source is computed with."""
    return "f64" if source.name == "f64" else "f32"


def _rounding(ins: Instruction, target: PtxType, source: PtxType) -> str | None:
    """Mandatory where bits are lost, accepted of bf16 also where none are, else not taken."""
    if target.bits < source.bits or {target.name, source.name} == {"f16", "bf16"}:
        return ins.modifiers.choice(ROUNDINGS)
    return ins.modifiers.optional(ROUNDINGS) if source.bfloat and target.kind == "f" else None


HANDLERS: dict[str, Handler] = {"cvt": cvt}
