"""Loads, stores, asynchronous copies, fences and cache hints."""

from __future__ import annotations

from kvgen.emulator.context import Context, Handler, Instruction
from kvgen.emulator.ptxtypes import TYPES, PtxType, bit_type

U32 = TYPES["u32"]
_SPACES = ("global", "shared", "shared::cta", "shared::cluster", "local", "const")
_PARAMS = ("param", "param::entry", "param::func")
_TYPES = "b8 u8 s8 b16 u16 s16 f16 bf16 b32 u32 s32 f32 b64 u64 s64 f64 b128"
SCOPES = ("cta", "cluster", "gpu", "sys")
# Caches are not modelled, so these change nothing that the emulator could show.
_CACHE_HINTS = (
    "ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc",
    "L1::no_allocate", "L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last",
    "L2::evict_normal", "L2::evict_first", "L2::evict_last", "L2::64B", "L2::128B", "L2::256B",
)  # fmt: skip


def _flags(ins: Instruction, base: str, *, store: bool = False) -> tuple[str, bool]:
    """Access flags, and whether other threads should run first, as a loop may wait on what this access sees.

    A volatile access counts as a plain one for the race checker: it is no synchronisation in CUDA C++.
    """
    order = ins.modifiers.optional(("weak", "volatile", "relaxed", "release" if store else "acquire"))
    scope = ins.modifiers.optional(SCOPES)
    mmio = ins.modifiers.flag("mmio")
    strong = order in ("relaxed", "acquire", "release") or mmio
    if scope is not None and order in (None, "weak", "volatile"):
        raise ins.fail(f".{scope} needs .relaxed, .acquire or .release")
    flags = [base]
    if strong:
        flags.append("A_STRONG")
        flags += ["A_CTA"] if scope == "cta" else []
        flags += ["A_ACQUIRE"] if order == "acquire" else ["A_RELEASE"] if order == "release" else []
    flags += ["A_VOLATILE"] if order == "volatile" else []
    return " | ".join(flags), strong or order == "volatile"


def pointer_to(cx: Context, ins: Instruction, operand: str, space: str | None, nbytes: int, flags: str) -> str:
    """A C++ pointer to checked memory."""
    if space in ("shared", "shared::cta"):
        return f"at_shared(self, {cx.address(ins, operand, narrow=True)}, {nbytes}, {flags}, {ins.site()})"
    if space == "shared::cluster":
        return f"at_cluster(self, {cx.address(ins, operand, narrow=True)}, {nbytes}, {flags}, {ins.site()})"
    address = cx.address(ins, operand, narrow=False)
    if space == "local":
        return f"at_local(self, {address}, {nbytes}, {ins.site()})"
    return f"at_{'generic(self, ' if space is None else 'global('}{address}, {nbytes}, {flags}, {ins.site()})"


def cache_policy(ins: Instruction, operands: int) -> None:
    """.L2::cache_hint appends a policy operand, which is dropped."""
    if ins.modifiers.flag("L2::cache_hint"):
        ins.count(operands + 1)
        ins.operands = ins.operands[:operands]


def _vector(cx: Context, ins: Instruction, operand: str) -> list[str]:
    width = ins.modifiers.optional(("v2", "v4", "v8"))
    names = cx.vector(operand)
    if len(names) != int(width[1:] if width else 1):
        raise ins.fail(f"{len(names)} registers with {'.' + width if width else 'no vector modifier'}")
    return names


def load(cx: Context, ins: Instruction) -> str:
    kind = ins.modifiers.type(_TYPES)
    cache_policy(ins, 2)
    ins.modifiers.ignore(_CACHE_HINTS)
    space = ins.modifiers.optional((*_SPACES, *_PARAMS))
    flags, strong = _flags(ins, "A_READ")
    if space is None:
        flags += " | A_GENERIC"
    names = _vector(cx, ins, ins.operands[0])
    ins.count(2)
    nbytes = kind.bits // 8
    if space in _PARAMS:
        pointer = cx.param_pointer(ins, ins.operands[1], nbytes * len(names), write=False)
    else:
        pointer = pointer_to(cx, ins, ins.operands[1], space, nbytes * len(names), flags)
    raw = bit_type(kind.bits)
    code = ("emu_yield(); " if strong else "") + f"const u8* p = {pointer}; "
    code += "".join(f"{raw.c} t{i} = load<{raw.c}>(p + {i * nbytes}); " for i in range(len(names)))
    target = kind if kind.kind == "s" else raw
    return code + " ".join(cx.assign(ins, n, target, f"({target.c})t{i}", extend=True) for i, n in enumerate(names))


def store(cx: Context, ins: Instruction) -> str:
    kind = ins.modifiers.type(_TYPES)
    cache_policy(ins, 2)
    ins.modifiers.ignore(_CACHE_HINTS)
    space = ins.modifiers.optional((*_SPACES[:5], "param", "param::func"))
    flags, strong = _flags(ins, "A_WRITE", store=True)
    names = _vector(cx, ins, ins.operands[1])
    ins.count(2)
    nbytes = kind.bits // 8
    raw = bit_type(kind.bits)
    values = [cx.value(ins, n, kind if kind.kind == "f" and cx.find(n) is None else raw) for n in names]
    if space in _PARAMS:
        pointer = cx.param_pointer(ins, ins.operands[0], nbytes * len(names), write=True)
    else:
        pointer = pointer_to(cx, ins, ins.operands[0], space, nbytes * len(names), flags)
    code = f"u8* p = {pointer}; " + ("emu_spins = 0; " if strong else "")
    return code + " ".join(
        f"store<{raw.c}>(p + {i * nbytes}, {_as_bits(kind, raw, v, cx.find(names[i]) is None)});"
        for i, v in enumerate(values)
    )


def _as_bits(kind: PtxType, raw: PtxType, value: str, literal: bool) -> str:
    return f"bits<{raw.c}>({value})" if kind.kind == "f" and literal else value


def fence(cx: Context, ins: Instruction) -> str:
    """fence.acq_rel, fence.sc, and membar of the old form."""
    ins.count(0)
    if ins.opcode == "membar":
        scope = ins.modifiers.choice(("cta", "gl", "sys"))
    else:
        ins.modifiers.optional(("sc", "acq_rel"))
        scope = ins.modifiers.choice(SCOPES)
    return f"emu_fence({int(scope == 'cta')}, 1, {ins.site()});"


def copy_async(cx: Context, ins: Instruction) -> str:
    """cp.async and its groups. The bulk (TMA) forms are not supported."""
    if not ins.modifiers.flag("async"):
        raise ins.fail("only cp.async is known")
    if "bulk" in ins.modifiers.words:
        raise ins.fail("cp.async.bulk is not supported")
    action = ins.modifiers.choice(("ca", "cg", "commit_group", "wait_group", "wait_all"))
    if action == "commit_group":
        ins.count(0)
        return "emu_cp_async_commit();"
    if action == "wait_group":
        ins.count(1)
        return f"emu_cp_async_wait({cx.integer(ins, ins.operands[0])}u);"
    if action == "wait_all":
        ins.count(0)
        return "emu_cp_async_commit(); emu_cp_async_wait(0);"
    ins.modifiers.choice(("shared", "shared::cta"))
    ins.modifiers.choice(("global",))
    if ins.modifiers.flag("L2::cache_hint"):
        ins.operands = ins.operands[:-1]
    ins.modifiers.ignore(("L2::64B", "L2::128B", "L2::256B"))
    ins.count(3, 4)
    size = cx.integer(ins, ins.operands[2])
    if size not in ((16,) if action == "cg" else (4, 8, 16)):
        raise ins.fail(f"cp.async.{action} cannot copy {size} bytes")
    source_size = f"{size}u"
    if len(ins.operands) == 4:
        found = cx.find(ins.operands[3])
        if found is not None and found.type.kind == "pred":  # the ignore-src form
            source_size = f"({found.c} ? 0u : {size}u)"
        else:
            source_size = cx.value(ins, ins.operands[3], U32)
    to = cx.address(ins, ins.operands[0], narrow=True)
    return f"emu_cp_async({to}, {cx.address(ins, ins.operands[1], narrow=False)}, {size}, {source_size}, {ins.site()});"


def prefetch(cx: Context, ins: Instruction) -> str:
    """prefetch, prefetchu, discard, applypriority: no effect on values, so the address is only read as text."""
    ins.modifiers.ignore(("global", "local", "L1", "L2", "L2::evict_last", "L2::evict_normal", "L2::128B"))
    ins.count(1, 2)
    cx.address(ins, ins.operands[0], narrow=False)
    return ""


def create_policy(cx: Context, ins: Instruction) -> str:
    """createpolicy: an opaque value, 0 here."""
    kind = ins.modifiers.type("b64")
    ins.modifiers.choice(("fractional", "range", "cvt"))
    ins.modifiers.ignore(("L2", "global"))
    ins.modifiers.ignore(_CACHE_HINTS)
    ins.modifiers.ignore(("L2::evict_unchanged",))
    ins.count(1, 4)
    return cx.assign(ins, ins.operands[0], kind, "0")


HANDLERS: dict[str, Handler] = {
    "ld": load,
    "ldu": load,
    "st": store,
    "fence": fence,
    "membar": fence,
    "cp": copy_async,
    "prefetch": prefetch,
    "prefetchu": prefetch,
    "createpolicy": create_policy,
}
