"""Moves between registers, and addresses between state spaces."""

from __future__ import annotations

from kvgen.emulator.context import Context, Handler, Instruction
from kvgen.emulator.ptxtypes import TYPES, bit_type

PRED = TYPES["pred"]
_SPACES = ("global", "shared", "shared::cta", "shared::cluster", "local", "const", "param", "param::entry")


def mov(cx: Context, ins: Instruction) -> str:
    """Registers, constants, special registers, addresses of variables; packing and unpacking of vectors."""
    ins.count(2)
    kind = ins.modifiers.type("pred b16 b32 b64 b128 u16 u32 u64 s16 s32 s64 f32 f64")
    target, source = ins.operands
    if kind.kind == "pred":
        return cx.assign(ins, target, kind, cx.predicate(ins, source))
    if kind.kind != "b" and (target.startswith("{") or source.startswith("{")):
        raise ins.fail(f"a vector needs a .b type, not .{kind.name}")
    if not target.startswith("{"):
        late = any(r is not None and r.late for r in (cx.find(source), cx.find(target)))
        raw = kind if kind.kind == "f" and not late else bit_type(kind.bits)
        return cx.assign(ins, target, raw, cx.value(ins, source, raw))
    parts, width = cx.vector(target), cx.part_bits(ins, target, kind)
    return f"{kind.storage} t = {cx.value(ins, source, kind)}; " + " ".join(
        cx.assign(ins, p, bit_type(width), f"(t >> {i * width})") for i, p in enumerate(parts)
    )


def cvta(cx: Context, ins: Instruction) -> str:
    """To and from generic addresses, which those of global memory are already."""
    ins.count(2)
    kind = ins.modifiers.type("u64")
    to = ins.modifiers.flag("to")
    space = ins.modifiers.choice(_SPACES).partition("::")[0]
    value = cx.value(ins, ins.operands[1], kind)
    if space != "global":
        value = (
            f"{space}_from_generic({value if space == 'const' else f'self, {value}'})"
            if to
            else f"generic_from_{space}(self, {value})"
        )
    return cx.assign(ins, ins.operands[0], kind, value)


def isspacep(cx: Context, ins: Instruction) -> str:
    ins.count(2)
    space = ins.modifiers.choice(_SPACES).removesuffix("::entry")
    a = cx.value(ins, ins.operands[1], TYPES["u64"])
    elsewhere = {
        "shared": f"is_shared(self, {a})",
        "local": f"is_local(self, {a})",
        "const": f"emu_is_constant({a})",
        "param": f"emu_is_parameter({a})",
    }
    if space == "shared::cta":
        value = f"within({a}, self->shared, WINDOW_STRIDE)"
    elif space == "global":
        value = f"!({' || '.join(elsewhere.values())})"
    else:
        value = elsewhere[space.removesuffix("::cluster")]
    return cx.assign(ins, ins.operands[0], PRED, value)


HANDLERS: dict[str, Handler] = {
    "mov": mov,
    "cvta": cvta,
    "isspacep": isspacep,
}
