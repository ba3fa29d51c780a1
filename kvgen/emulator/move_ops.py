"""Moves between registers, and addresses between state spaces."""

from __future__ import annotations

from kvgen.emulator.context import Context, Handler, Instruction
from kvgen.emulator.ptxtypes import TYPES, bit_type

PRED = TYPES["pred"]


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
            return cx.assign(ins, ins.operands[0], kind, f"shared_from_generic(self, {cx.value(ins, source, kind)})")
        found = cx.find(source)
        value = cx.value(ins, source, found.type if found and found.type.kind != "pred" else kind)
        return cx.assign(ins, ins.operands[0], kind, f"generic_from_shared(self, {value})")
    return cx.assign(ins, ins.operands[0], kind, cx.value(ins, source, kind))


def isspacep(cx: Context, ins: Instruction) -> str:
    ins.count(2)
    space = ins.modifiers.choice(("global", "shared", "shared::cta", "shared::cluster", "local", "const", "param"))
    a = cx.value(ins, ins.operands[1], TYPES["u64"])
    if space.startswith("shared"):
        own = space == "shared::cta"
        value = f"within({a}, self->shared, WINDOW_STRIDE)" if own else f"is_shared(self, {a})"
    elif space == "local":
        value = f"is_local(self, {a})"
    elif space == "param":
        value = f"within({a}, P, PARAM_BYTES)"
    elif space == "const":
        raise ins.fail("isspacep.const is not supported")
    else:
        value = f"(!is_shared(self, {a}) && !within({a}, P, PARAM_BYTES) && !is_local(self, {a}))"
    return cx.assign(ins, ins.operands[0], PRED, value)


HANDLERS: dict[str, Handler] = {
    "mov": mov,
    "cvta": cvta,
    "isspacep": isspacep,
}
