"""atom, and red as far as it is not asynchronous (async_ops)."""

from __future__ import annotations

from kvgen.emulator.context import Context, Handler, Instruction
from kvgen.emulator.memory_ops import SCOPE_FLAGS, SCOPES, cache_policy, pointer_to, vector
from kvgen.emulator.ptxtypes import PtxType

_HALVES = "f16 bf16 f16x2 bf16x2"
_TYPES = {
    "add": f"u32 s32 u64 f32 f64 {_HALVES}",
    "min": f"u32 s32 u64 s64 {_HALVES}",
    "max": f"u32 s32 u64 s64 {_HALVES}",
    "and": "b32 b64",
    "or": "b32 b64",
    "xor": "b32 b64",
    "exch": "b32 b64 b128",
    "cas": "b16 b32 b64 b128",
    "inc": "u32",
    "dec": "u32",
}
_REDUCTIONS = tuple(op for op in _TYPES if op not in ("exch", "cas"))


def _flags(ins: Instruction) -> str:
    orders = ("relaxed", "acquire", "release", "acq_rel") if ins.opcode == "atom" else ("relaxed", "release")
    order = ins.modifiers.optional(orders)
    flags = ["A_ATOMIC", "A_STRONG", *SCOPE_FLAGS[ins.modifiers.optional(SCOPES) or "gpu"]]
    flags += ["A_ACQUIRE"] if order in ("acquire", "acq_rel") else []
    flags += ["A_RELEASE"] if order in ("release", "acq_rel") else []
    return " | ".join(flags)


def _combine(operation: str, kind: PtxType, place: str, operands: str) -> str:
    """C that changes one element and gives its old value."""
    if operation == "cas":
        return f"emu_atomic_swap_if_{kind.c}({place}, {operands})"
    if kind.kind in "hp":
        pair = "2" if kind.kind == "p" else ""
        return f"emu_atomic_half{pair}({int(kind.bfloat)}, H_{operation.upper()}, {place}, {operands})"
    if kind.kind == "f":  # in global memory f32 addition flushes subnormals, in shared memory it keeps them
        flush = "!is_shared(self, (u64)p)" if kind.bits == 32 else "false"
        return f"emu_atomic_add_{kind.name}({place}, {operands}, {flush})"
    return f"emu_atomic_{kind.c}({place}, T_{operation.upper()}, {operands})"


def atomic(cx: Context, ins: Instruction) -> str:
    """atom (returns the old value) and red; vectors of floats element by element."""
    returns = ins.opcode == "atom"
    operation = ins.modifiers.choice(tuple(_TYPES) if returns else _REDUCTIONS)
    kind = ins.modifiers.type(_TYPES[operation])
    half = kind.kind in "hp"
    if half:
        ins.modifiers.choice(("noftz",))
    at = 1 if returns else 0
    count = at + (3 if operation == "cas" else 2)
    cache_policy(cx, ins, count)
    ins.count(count)
    space = ins.modifiers.optional(("global", "shared", "shared::cta", "shared::cluster"))
    widths = ("v2", "v4", "v8") if kind.kind == "h" else ("v2", "v4") if half or kind.name == "f32" else ()
    names = vector(cx, ins, ins.operands[at + 1], kind, widths if space in (None, "global") else (), 16)
    if len(names) == 1 and half and operation != "add":
        raise ins.fail(f"{operation} of .{kind.name} needs a vector")
    nbytes = kind.bits // 8
    code = f"u8* p = {pointer_to(cx, ins, ins.operands[at], space, nbytes * len(names), _flags(ins))}; "
    values = [", ".join(cx.value(ins, o, kind) for o in (n, *ins.operands[at + 2 :])) for n in names]
    calls = [_combine(operation, kind, f"p + {i * nbytes}" if i else "p", v) for i, v in enumerate(values)]
    if not returns:
        return code + " ".join(f"(void){call};" for call in calls)
    results = cx.vector(ins.operands[0])
    if ins.operands[0] == "_":
        results = ["_"] * len(names)
    if len(results) != len(names):
        raise ins.fail(f"{len(results)} results of {len(names)} values")
    code += " ".join(f"{kind.c} t{i} = {call};" for i, call in enumerate(calls))
    return code + " ".join(cx.assign(ins, r, kind, f"t{i}") for i, r in enumerate(results)) + " emu_yield();"


HANDLERS: dict[str, Handler] = {
    "atom": atomic,
}
