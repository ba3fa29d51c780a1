"""atom and red."""

from __future__ import annotations

from kvgen.emulator.context import Context, Handler, Instruction
from kvgen.emulator.memory_ops import SCOPES, cache_policy, pointer_to

_ATOMIC_TYPES = {
    "add": "u32 s32 u64 f32 f64 f16 bf16 f16x2 bf16x2",
    "min": "u32 s32 u64 s64 f16 bf16 f16x2 bf16x2",
    "max": "u32 s32 u64 s64 f16 bf16 f16x2 bf16x2",
    "and": "b32 b64",
    "or": "b32 b64",
    "xor": "b32 b64",
    "exch": "b32 b64 b128",
    "cas": "b16 b32 b64 b128",
    "inc": "u32",
    "dec": "u32",
}

_REDUCTIONS = tuple(op for op in _ATOMIC_TYPES if op not in ("exch", "cas"))


def atomic(cx: Context, ins: Instruction) -> str:
    """atom (returns the old value) and red."""
    returns = ins.opcode == "atom"
    operation = ins.modifiers.choice(tuple(_ATOMIC_TYPES) if returns else _REDUCTIONS)
    kind = ins.modifiers.type(_ATOMIC_TYPES[operation])
    width = ins.modifiers.optional(("v2", "v4", "v8"))
    if width:
        raise ins.fail(f"vector atomics (.{width}) are not supported")
    space = ins.modifiers.optional(("global", "shared", "shared::cta", "shared::cluster"))
    order = ins.modifiers.optional(("relaxed", "acquire", "release", "acq_rel"))
    scope = ins.modifiers.optional(SCOPES)
    if kind.kind in "hp" and operation == "add" and not ins.modifiers.flag("noftz"):
        raise ins.fail("16-bit float addition needs .noftz")
    count = (1 if returns else 0) + (3 if operation == "cas" else 2)
    cache_policy(ins, count)
    ins.count(count)
    flags = ["A_ATOMIC", "A_STRONG"]
    flags += ["A_CTA"] if scope == "cta" else []
    flags += ["A_ACQUIRE"] if order in ("acquire", "acq_rel") else []
    flags += ["A_RELEASE"] if order in ("release", "acq_rel") else []
    at = 1 if returns else 0
    pointer = pointer_to(cx, ins, ins.operands[at], space, kind.bits // 8, " | ".join(flags))
    values = ", ".join(cx.value(ins, o, kind) for o in ins.operands[at + 1 :])
    if operation == "cas":
        call = f"atomic_swap_if<{kind.c}>(p, {values})"
    elif kind.kind in "hp":
        family = "Bfloat" if kind.bfloat else "Half"
        call = f"atomic_half{'2' if kind.kind == 'p' else ''}<{family}, H_{operation.upper()}>(p, {values})"
    elif kind.kind == "f":  # in global memory f32 addition flushes subnormals, in shared memory it keeps them
        call = f"atomic_float_add<{kind.c}>(p, {values}, {'!is_shared(self, (u64)p)' if kind.bits == 32 else 'false'})"
    else:
        call = f"atomic_integer<T_{operation.upper()}, {kind.c}>(p, {values})"
    code = f"u8* p = {pointer}; "
    if not returns:
        return code + f"(void){call};"
    return code + f"{kind.c} t = {call}; " + cx.assign(ins, ins.operands[0], kind, "t") + " emu_yield();"


HANDLERS: dict[str, Handler] = {
    "atom": atomic,
    "red": atomic,
}
