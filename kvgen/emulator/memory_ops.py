"""Loads, stores and hints to caches. async_ops enters those opcodes that have asynchronous forms too."""

from __future__ import annotations

from collections.abc import Sequence

from kvgen.emulator.context import Context, Handler, Instruction
from kvgen.emulator.ptxtypes import TYPES, PtxType, bit_type

U32 = TYPES["u32"]
_SPACES = ("global", "shared", "shared::cta", "shared::cluster", "local", "const")
_PARAMS = ("param", "param::entry", "param::func")
_TYPES = "b8 u8 s8 b16 u16 s16 b32 u32 s32 f32 b64 u64 s64 f64 b128"
SCOPES = ("cta", "cluster", "gpu", "sys")
SCOPE_FLAGS = {"cta": ["A_CTA"], "cluster": ["A_CLUSTER"], "gpu": [], "sys": []}
# Caches are not modelled, so none of these changes anything that the emulator could show.
_LOAD_OPERATORS = ("ca", "cg", "cs", "lu", "cv")
_STORE_OPERATORS = ("wb", "cg", "cs", "wt")
_EVICTION = (
    "L1::no_allocate", "L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last",
    "L2::evict_normal", "L2::evict_first", "L2::evict_last",
)  # fmt: skip
_PREFETCH_SIZES = ("L2::64B", "L2::128B", "L2::256B")


def _flags(ins: Instruction, base: str, space: str | None) -> tuple[str, bool]:
    """Access flags, and whether other threads should run first, as a loop may wait on what this access sees.

    A volatile access counts as a plain one for the race checker: it is no synchronisation in CUDA C++.
    """
    orders = ("weak", "volatile", "relaxed", "release" if base == "A_WRITE" else "acquire")
    mmio = ins.modifiers.flag("mmio")
    order = ins.modifiers.choice(("relaxed",)) if mmio else ins.modifiers.optional(orders)
    flags = [base] + (["A_GENERIC"] if space is None and base == "A_READ" else [])
    plain = (None, "weak", "volatile") if space == "local" else (None, "weak")  # compilers write st.volatile.local
    if order not in plain and space in ("local", "const", *_PARAMS):
        raise ins.fail(f".{order} does not take .{space}")
    if mmio and space not in (None, "global"):
        raise ins.fail(f".mmio does not take .{space}")
    if order in ("relaxed", "acquire", "release"):
        scope = ins.modifiers.choice(("sys",) if mmio else SCOPES)
        flags += ["A_STRONG", *SCOPE_FLAGS[scope]]
        flags += {"acquire": ["A_ACQUIRE"], "release": ["A_RELEASE"]}.get(order, [])
        return " | ".join(flags), True
    if unordered := ins.modifiers.optional(SCOPES):
        raise ins.fail(f".{unordered} needs .relaxed or .{orders[3]}")
    if order == "volatile":
        return " | ".join([*flags, "A_VOLATILE"]), True
    ins.modifiers.ignore(_STORE_OPERATORS if base == "A_WRITE" else _LOAD_OPERATORS)
    return " | ".join(flags), False


def _hints(ins: Instruction, space: str | None, kind: PtxType, sizes: Sequence[str] = ()) -> None:
    """What caches should keep, of global memory only; L2 is told so by accesses of 32 bytes."""
    if space not in (None, "global"):
        return
    m = ins.modifiers
    m.ignore(sizes)
    if not any(w in m.words for w in (*_LOAD_OPERATORS, *_STORE_OPERATORS, "volatile", "mmio")):
        wide = (kind.bits, "v8" in m.words, "v4" in m.words) in ((32, True, False), (64, False, True))
        m.ignore(_EVICTION if wide else _EVICTION[:5])


def pointer_to(cx: Context, ins: Instruction, operand: str, space: str | None, nbytes: int, flags: str) -> str:
    """A C pointer to checked memory."""
    if space in ("shared", "shared::cta"):
        return f"at_shared(self, {cx.address(ins, operand, narrow=True)}, {nbytes}, {flags}, {ins.site()})"
    if space == "shared::cluster":
        return f"at_cluster(self, {cx.address(ins, operand, narrow=True)}, {nbytes}, {flags}, {ins.site()})"
    address = cx.address(ins, operand, narrow=False, near=space in ("local", "const"))
    if space == "local":
        return f"at_local(self, {address}, {nbytes}, {ins.site()})"
    if space == "const":
        address = f"generic_from_const(self, {address})"
    return f"at_{'generic(self, ' if space is None else 'global('}{address}, {nbytes}, {flags}, {ins.site()})"


def cache_policy(cx: Context, ins: Instruction, operands: int) -> None:
    """.L2::cache_hint appends a policy operand, which is dropped."""
    words = ins.modifiers.words
    if any(w.partition("::")[0] in ("shared", "local", "const", "param") for w in words) and ins.opcode != "cp":
        return
    if ins.modifiers.flag("L2::cache_hint"):
        ins.count(operands + 1)
        cx.value(ins, ins.operands[operands], TYPES["b64"])
        ins.operands = ins.operands[:operands]


def vector(cx: Context, ins: Instruction, operand: str, kind: PtxType, widths: tuple[str, ...], most: int) -> list[str]:
    """The registers of a vector operand, or the one of a scalar; `most` bytes in all."""
    width = ins.modifiers.optional(widths)
    names = cx.vector(operand)
    if len(names) != int(width[1:] if width else 1):
        raise ins.fail(f"{len(names)} registers with {'.' + width if width else 'no vector modifier'}")
    if len(names) > 1 and (kind.bits == 128 or len(names) * kind.bits // 8 > most):
        raise ins.fail(f"{len(names)} of .{kind.name} are more than {most} bytes")
    return names


def _accessed(cx: Context, ins: Instruction, at: int, kind: PtxType, space: str | None) -> list[str]:
    """The value operand of a load or store; only global memory takes 32 bytes at once."""
    widths = ("v2", "v4") if ins.opcode == "ldu" else ("v2", "v4", "v8")
    most = 32 if space in (None, "global") and ins.opcode != "ldu" else 16
    return vector(cx, ins, ins.operands[at], kind, widths, most)


def load(cx: Context, ins: Instruction) -> str:
    """ld and ldu (of read-only data, as ld.global.nc)."""
    kind = ins.modifiers.type(_TYPES)
    cache_policy(cx, ins, 2)
    ins.count(2)
    if ins.opcode == "ldu":
        space = ins.modifiers.optional(("global",))
        flags, strong = "A_READ | A_CONSTANT" if space else "A_READ | A_CONSTANT | A_GENERIC", False
    else:
        space = ins.modifiers.optional((*_SPACES, *_PARAMS))
        _hints(ins, space, kind, _PREFETCH_SIZES)
        flags, strong = _flags(ins, "A_READ", space)
        if ins.modifiers.flag("nc"):
            if space != "global" or flags != "A_READ":
                raise ins.fail(".nc needs a weak .global")
            flags += " | A_CONSTANT"
    names = _accessed(cx, ins, 0, kind, space)
    nbytes = kind.bits // 8
    address = ins.operands[1].removesuffix(".unified")
    if space in _PARAMS:
        pointer = cx.param_pointer(ins, address, nbytes * len(names), write=False)
    else:
        pointer = pointer_to(cx, ins, address, space, nbytes * len(names), flags)
    raw = bit_type(kind.bits)
    code = ("emu_yield(); " if strong else "") + f"const u8* p = {pointer}; "
    code += "".join(f"{raw.c} t{i} = *(const {raw.c}_at*)(p + {i * nbytes}); " for i in range(len(names)))
    target = kind if kind.kind == "s" else raw
    return code + " ".join(cx.assign(ins, n, target, f"({target.c})t{i}", extend=True) for i, n in enumerate(names))


def store(cx: Context, ins: Instruction) -> str:
    kind = ins.modifiers.type(_TYPES)
    cache_policy(cx, ins, 2)
    ins.count(2)
    space = ins.modifiers.optional((*_SPACES[:5], "param", "param::func"))
    _hints(ins, space, kind)
    flags, strong = _flags(ins, "A_WRITE", space)
    names = _accessed(cx, ins, 1, kind, space)
    nbytes = kind.bits // 8
    raw = bit_type(kind.bits)
    values = [cx.value(ins, n, kind if kind.kind == "f" and cx.find(n) is None else raw) for n in names]
    if space in _PARAMS:
        pointer = cx.param_pointer(ins, ins.operands[0], nbytes * len(names), write=True)
    else:
        pointer = pointer_to(cx, ins, ins.operands[0], space, nbytes * len(names), flags)
    code = f"u8* p = {pointer}; " + ("*self->spins = 0; " if strong else "")
    return code + " ".join(
        f"*({raw.c}_at*)(p + {i * nbytes}) = {_as_bits(kind, v, cx.find(names[i]) is None)};"
        for i, v in enumerate(values)
    )


def _as_bits(kind: PtxType, value: str, literal: bool) -> str:
    return kind.to_bits(value) if kind.kind == "f" and literal else value


# ---------------------------------------------------------------- caches
def prefetch(cx: Context, ins: Instruction) -> str:
    """prefetch, prefetchu: no effect on values, and none for an address outside memory either."""
    ins.count(1)
    if ins.opcode == "prefetchu":
        ins.modifiers.choice(("L1",))
    else:
        space = ins.modifiers.optional(("global", "local"))
        ins.modifiers.choice(("L1", "L2") + (("L2::evict_last", "L2::evict_normal") if space == "global" else ()))
    cx.address(ins, ins.operands[0], narrow=False, near=True)
    return ""


def _of_line(cx: Context, ins: Instruction) -> str:
    """The address of what applies to 128 bytes."""
    ins.count(2)
    ins.modifiers.optional(("global",))
    if (size := cx.integer(ins, ins.operands[1])) != 128:
        raise ins.fail(f"size {size}: it must be 128")
    return cx.address(ins, ins.operands[0], narrow=False)


def apply_priority(cx: Context, ins: Instruction) -> str:
    ins.modifiers.choice(("L2::evict_normal",))
    _of_line(cx, ins)
    return ""


def discard(cx: Context, ins: Instruction) -> str:
    """A write of 128 bytes that nobody may read before the next one: NaN in every float format."""
    ins.modifiers.choice(("L2",))
    return f"__builtin_memset(at_global({_of_line(cx, ins)}, 128, A_WRITE, {ins.site()}), 0xff, 128);"


def create_policy(cx: Context, ins: Instruction) -> str:
    """createpolicy: an opaque value, 0 here."""
    kind = ins.modifiers.type("b64")
    form = ins.modifiers.choice(("fractional", "range", "cvt"))
    if form == "cvt":
        ins.modifiers.choice(("L2",))
        ins.count(2)
        cx.value(ins, ins.operands[1], kind)
        return cx.assign(ins, ins.operands[0], kind, "0")
    primary = ("L2::evict_last", "L2::evict_normal", "L2::evict_first", "L2::evict_unchanged")
    ins.modifiers.choice(primary)
    ins.modifiers.optional(primary[2:])
    if form == "fractional":
        ins.count(1, 2)
        for fraction in ins.operands[1:]:
            cx.value(ins, fraction, TYPES["f32"])
    else:
        ins.count(4)
        ins.modifiers.optional(("global",))
        cx.address(ins, ins.operands[1], narrow=False)
        for size in ins.operands[2:]:
            cx.value(ins, size, U32)
    return cx.assign(ins, ins.operands[0], kind, "0")


HANDLERS: dict[str, Handler] = {
    "ld": load,
    "ldu": load,
    "prefetchu": prefetch,
    "applypriority": apply_priority,
    "discard": discard,
    "createpolicy": create_policy,
}
