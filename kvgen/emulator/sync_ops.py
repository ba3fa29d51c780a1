"""Control flow, barriers, warp operations and tensor-core fragments."""

from __future__ import annotations

from kvgen.emulator.cluster_ops import cluster_barrier
from kvgen.emulator.context import Context, Handler, Instruction
from kvgen.emulator.ptxtypes import TYPES

U32, B32, PRED, F32 = TYPES["u32"], TYPES["b32"], TYPES["pred"], TYPES["f32"]
_SHUFFLES = ("bfly", "up", "down", "idx")
_REDUCTIONS = {"add": "T_ADD", "min": "T_MIN", "max": "T_MAX", "and": "T_AND", "or": "T_OR", "xor": "T_XOR"}


# ---------------------------------------------------------------- control flow
def branch(cx: Context, ins: Instruction) -> str:
    ins.modifiers.flag("uni")
    ins.count(1)
    return f"goto {cx.label(ins, ins.operands[0])};"


def indexed_branch(cx: Context, ins: Instruction) -> str:
    """brx.idx: a jump table declared by .branchtargets."""
    ins.modifiers.choice(("idx",))
    ins.modifiers.flag("uni")
    ins.count(2)
    targets = cx.branch_targets.get(ins.operands[1])
    if targets is None:
        raise ins.fail(f"no .branchtargets named {ins.operands[1]!r}")
    cases = " ".join(f"case {i}: goto {cx.label(ins, t)};" for i, t in enumerate(targets))
    missing = f'default: emu_arithmetic_fault({ins.site()}, "brx.idx beyond its table");'
    return f"switch ({cx.value(ins, ins.operands[0], U32)}) {{ {cases} {missing} }}"


def trap(cx: Context, ins: Instruction) -> str:
    ins.count(0)
    return f"emu_trap({ins.site()});"


def nanosleep(cx: Context, ins: Instruction) -> str:
    ins.modifiers.type("u32")
    ins.count(1)
    cx.value(ins, ins.operands[0], U32)
    return "emu_yield();"


def dependent_launch(cx: Context, ins: Instruction) -> str:
    """griddepcontrol: launches follow one another here; check mode looks whether .wait comes before it is needed."""
    action = ins.modifiers.choice(("wait", "launch_dependents"))
    ins.count(0)
    return "emu_grid_wait();" if action == "wait" else ""


def set_registers(cx: Context, ins: Instruction) -> str:
    ins.modifiers.choice(("inc", "dec"))
    ins.modifiers.choice(("sync",))
    ins.modifiers.choice(("aligned",))
    ins.modifiers.type("u32")
    ins.count(1)
    cx.integer(ins, ins.operands[0])
    return ""


# ---------------------------------------------------------------- barriers
def barrier(cx: Context, ins: Instruction) -> str:
    """bar and barrier: sync, arrive, red, bar.warp.sync, and the cluster's barrier."""
    if "cluster" in ins.modifiers.words:
        return cluster_barrier(cx, ins)
    if ins.modifiers.flag("warp"):
        ins.modifiers.choice(("sync",))
        ins.count(1)
        return f"emu_warp_sync({cx.value(ins, ins.operands[0], U32)}, {ins.site()});"
    ins.modifiers.flag("cta")
    action = ins.modifiers.choice(("sync", "arrive", "red"))
    aligned = int(ins.modifiers.flag("aligned") or ins.opcode == "bar")
    if action == "red":
        return _barrier_reduce(cx, ins, aligned)
    ins.count(*((2, 2) if action == "arrive" else (1, 2)))
    number = cx.value(ins, ins.operands[0], U32)
    threads = cx.value(ins, ins.operands[1], U32) if len(ins.operands) > 1 else "0"
    function = "emu_barrier" if action == "sync" else "emu_barrier_arrive"
    return f"{function}({number}, {threads}, {aligned}, {ins.site()});"


def _barrier_reduce(cx: Context, ins: Instruction, aligned: int) -> str:
    kind = ins.modifiers.type("u32 pred")
    operation = ins.modifiers.choice(("popc",) if kind.name == "u32" else ("and", "or"))
    ins.count(3, 4)
    number = cx.value(ins, ins.operands[1], U32)
    threads = cx.value(ins, ins.operands[2], U32) if len(ins.operands) == 4 else "0"
    code = {"or": 0, "and": 1, "popc": 2}[operation]
    value = (
        f"emu_barrier_reduce({number}, {threads}, {code}, {cx.predicate(ins, ins.operands[-1])}, "
        f"{aligned}, {ins.site()})"
    )
    return cx.assign(ins, ins.operands[0], kind, f"{value} != 0" if kind.name == "pred" else value)


# ---------------------------------------------------------------- warp operations
def shuffle(cx: Context, ins: Instruction) -> str:
    kind = ins.modifiers.type("b32")
    ins.modifiers.choice(("sync",))
    mode = ins.modifiers.choice(_SHUFFLES)
    ins.count(5)
    value, b, c, mask = (cx.value(ins, o, U32) for o in ins.operands[1:])
    first, second = cx.pair(ins, ins.operands[0])
    code = f"bool q; u32 t = emu_shuffle({_SHUFFLES.index(mode)}, {value}, {b}, {c}, {mask}, &q, {ins.site()}); "
    code += cx.assign(ins, first, kind, "t")
    return code + (" " + cx.assign(ins, second, PRED, "q") if second else "")


def vote(cx: Context, ins: Instruction) -> str:
    kind = ins.modifiers.type("pred b32")
    ins.modifiers.choice(("sync",))
    mode = ins.modifiers.choice(("ballot",) if kind.name == "b32" else ("any", "all", "uni"))
    ins.count(3)
    predicate, mask = cx.predicate(ins, ins.operands[1]), cx.value(ins, ins.operands[2], U32)
    code = f"u32 m = {mask}; u32 t = emu_ballot(m, {predicate}, {ins.site()}); "
    present = "(m & emu_born())"
    value = {"ballot": "t", "any": "t != 0", "all": f"t == {present}", "uni": f"(t == 0 || t == {present})"}[mode]
    return code + cx.assign(ins, ins.operands[0], kind, value)


def match(cx: Context, ins: Instruction) -> str:
    kind = ins.modifiers.type("b32 b64")
    mode = ins.modifiers.choice(("any", "all"))
    ins.modifiers.choice(("sync",))
    ins.count(3)
    first, second = cx.pair(ins, ins.operands[0])
    value, mask = cx.value(ins, ins.operands[1], kind), cx.value(ins, ins.operands[2], U32)
    code = f"bool q; u32 t = emu_match({int(mode == 'all')}, {value}, {mask}, &q, {ins.site()}); "
    code += cx.assign(ins, first, B32, "t")
    if second and mode != "all":
        raise ins.fail("only match.all writes a predicate")
    return code + (" " + cx.assign(ins, second, PRED, "q") if second else "")


def reduce(cx: Context, ins: Instruction) -> str:
    kind = ins.modifiers.type("u32 s32 b32")
    ins.modifiers.choice(("sync",))
    operations = ("and", "or", "xor") if kind.name == "b32" else ("add", "min", "max")
    operation = ins.modifiers.choice(operations)
    ins.count(3)
    value, mask = (cx.value(ins, o, U32) for o in ins.operands[1:])
    call = f"emu_reduce({_REDUCTIONS[operation]}, {int(kind.kind == 's')}, {value}, {mask}, {ins.site()})"
    return cx.assign(ins, ins.operands[0], B32, call)


def active_mask(cx: Context, ins: Instruction) -> str:
    """activemask: which lanes run together is up to the hardware; here every lane runs alone."""
    kind = ins.modifiers.type("b32")
    ins.count(1)
    return cx.assign(ins, ins.operands[0], kind, "1u << self->lane")


def elect(cx: Context, ins: Instruction) -> str:
    ins.modifiers.choice(("sync",))
    ins.count(2)
    first, second = cx.pair(ins, ins.operands[0])
    if second is None:
        raise ins.fail("elect.sync writes d|p")
    code = f"u32 t = emu_elect({cx.value(ins, ins.operands[1], U32)}, {ins.site()}); "
    return code + cx.assign(ins, first, B32, "t") + " " + cx.assign(ins, second, PRED, "(t == self->lane)")


# ---------------------------------------------------------------- fragments
def load_matrix(cx: Context, ins: Instruction) -> str:
    ins.modifiers.choice(("sync",))
    ins.modifiers.choice(("aligned",))
    ins.modifiers.choice(("m8n8",))
    ins.modifiers.type("b16")
    count = {"x1": 1, "x2": 2, "x4": 4}[ins.modifiers.choice(("x1", "x2", "x4"))]
    transposed = int(ins.modifiers.flag("trans"))
    space = ins.modifiers.optional(("shared", "shared::cta"))
    if space is None:
        raise ins.fail("ldmatrix needs .shared")
    ins.count(2)
    names = cx.vector(ins.operands[0])
    if len(names) != count:
        raise ins.fail(f"{len(names)} registers for .x{count}")
    address = cx.address(ins, ins.operands[1], narrow=True)
    code = f"u32 t[4]; emu_ldmatrix(t, {count}, {transposed}, {address}, {ins.site()}); "
    return code + " ".join(cx.assign(ins, n, B32, f"t[{i}]") for i, n in enumerate(names))


def multiply_matrix(cx: Context, ins: Instruction) -> str:
    """mma.sync m16n8k16 and m16n8k8, f16 or bf16 operands, f32 accumulators."""
    m = ins.modifiers
    m.choice(("sync",))
    m.choice(("aligned",))
    shape = m.choice(("m16n8k16", "m16n8k8"))
    m.choice(("row",))
    m.choice(("col",))
    m.type("f32")
    b_kind = m.type("f16 bf16")
    a_kind = m.type("f16 bf16")
    m.type("f32")
    if a_kind.name != b_kind.name:
        raise ins.fail("both operands must have one type")
    ins.count(4)
    k = 16 if shape == "m16n8k16" else 8
    d, a, b, c = (cx.vector(o) for o in ins.operands)
    if (len(d), len(a), len(b), len(c)) != (4, k // 4, k // 8, 4):
        raise ins.fail(f"wrong number of registers for {shape}")
    values = [", ".join(cx.value(ins, x, kind) for x in names) for names, kind in ((a, U32), (b, U32), (c, F32))]
    code = f"u32 a[] = {{{values[0]}}}; u32 b[] = {{{values[1]}}}; float c[] = {{{values[2]}}}; "
    code += f"emu_mma(c, a, b, {k}, {int(a_kind.bfloat)}, {ins.site()}); "
    return code + " ".join(cx.assign(ins, x, F32, f"c[{i}]") for i, x in enumerate(d))


HANDLERS: dict[str, Handler] = {
    "bra": branch,
    "brx": indexed_branch,
    "trap": trap,
    "nanosleep": nanosleep,
    "griddepcontrol": dependent_launch,
    "setmaxnreg": set_registers,
    "bar": barrier,
    "barrier": barrier,
    "shfl": shuffle,
    "vote": vote,
    "match": match,
    "redux": reduce,
    "activemask": active_mask,
    "elect": elect,
    "ldmatrix": load_matrix,
    "mma": multiply_matrix,
}
