"""Control flow, barriers and warp operations."""

from __future__ import annotations

from kvgen.emulator.cluster_ops import cluster_barrier
from kvgen.emulator.context import Context, Handler, Instruction
from kvgen.emulator.ptxtypes import TYPES

U32, B32, PRED = TYPES["u32"], TYPES["b32"], TYPES["pred"]
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


def performance_event(cx: Context, ins: Instruction) -> str:
    """pmevent: nobody counts them."""
    ins.count(1)
    ins.modifiers.flag("mask")
    cx.integer(ins, ins.operands[0])
    return ""


def nanosleep(cx: Context, ins: Instruction) -> str:
    ins.modifiers.type("u32")
    ins.count(1)
    cx.value(ins, ins.operands[0], U32)
    return "emu_yield();"


def dependent_launch(cx: Context, ins: Instruction) -> str:
    """griddepcontrol: launches follow one another here; check mode looks whether .wait comes before it is needed, and
    .launch_dependents behind the block's last read."""
    action = ins.modifiers.choice(("wait", "launch_dependents"))
    ins.count(0)
    return "emu_grid_wait();" if action == "wait" else f"emu_grid_trigger({ins.site()});"


# ---------------------------------------------------------------- barriers
def barrier(cx: Context, ins: Instruction) -> str:
    """bar and barrier: sync, arrive, red, bar.warp.sync, and the cluster's barrier."""
    if ins.opcode == "barrier" and "cluster" in ins.modifiers.words:
        return cluster_barrier(cx, ins)
    if ins.opcode == "bar" and ins.modifiers.flag("warp"):
        ins.modifiers.choice(("sync",))
        ins.count(1)
        return f"emu_warp_sync({cx.value(ins, ins.operands[0], U32)}, {ins.site()});"
    ins.modifiers.flag("cta")
    action = ins.modifiers.choice(("sync", "arrive", "red"))
    aligned = int(ins.opcode == "bar" or ins.modifiers.flag("aligned"))
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
    code = f"bool q; u32 t = emu_shuffle(self, {_SHUFFLES.index(mode)}, {value}, {b}, {c}, {mask}, &q, {ins.site()}); "
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


HANDLERS: dict[str, Handler] = {
    "bra": branch,
    "brx": indexed_branch,
    "trap": trap,
    "brkpt": trap,
    "pmevent": performance_event,
    "nanosleep": nanosleep,
    "griddepcontrol": dependent_launch,
    "bar": barrier,
    "barrier": barrier,
    "shfl": shuffle,
    "vote": vote,
    "match": match,
    "redux": reduce,
    "activemask": active_mask,
    "elect": elect,
}
