"""Asynchronous memory: mbarriers, cp.async, bulk and tensor copies, and their groups."""

from __future__ import annotations

from collections.abc import Sequence

from kvgen.emulator import atomic_ops, memory_ops
from kvgen.emulator.context import Context, Handler, Instruction, split_operands
from kvgen.emulator.memory_ops import cache_policy
from kvgen.emulator.ptxtypes import TYPES, PtxType

U16, U32, S32, U64, PRED = TYPES["u16"], TYPES["u32"], TYPES["s32"], TYPES["u64"], TYPES["pred"]
_SHARED = ("shared", "shared::cta", "shared::cluster")
_BY_MBARRIER = "mbarrier::complete_tx::bytes"
_SCOPES = ("cta", "cluster")  # of an mbarrier
_OPERATIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
# Element types of a bulk reduction, by where its destination lies.
_REDUCTIONS = {
    "global": {
        "add": "u32 s32 u64 f32 f64 f16 bf16",
        "min": "u32 s32 u64 s64 f16 bf16",
        "max": "u32 s32 u64 s64 f16 bf16",
        **dict.fromkeys(("inc", "dec"), "u32"),
        **dict.fromkeys(("and", "or", "xor"), "b32 b64"),
    },
    "shared": {
        "add": "u32 s32 u64",
        **dict.fromkeys(("min", "max"), "u32 s32"),
        **dict.fromkeys(("inc", "dec"), "u32"),
        **dict.fromkeys(("and", "or", "xor"), "b32"),
    },
}


def _shared_address(cx: Context, ins: Instruction, operand: str, space: str | None) -> str:
    """A shared::cluster address; without a state space the operand is generic."""
    if space is not None:
        return cx.address(ins, operand, narrow=True)
    return f"emu_shared_address({cx.address(ins, operand, narrow=False)}, {ins.site()})"


# ---------------------------------------------------------------- mbarriers
def _order(ins: Instruction, orders: Sequence[str], scopes: Sequence[str] = _SCOPES) -> str | None:
    """The order of an mbarrier operation. A scope goes with it; which one changes nothing, as only a cluster shares it."""
    order = ins.modifiers.optional(orders)
    if order:
        ins.modifiers.choice(scopes)
    return order


def mbarrier(cx: Context, ins: Instruction) -> str:
    m = ins.modifiers
    m.type("b64")
    action = m.choice(
        ("init", "inval", "arrive", "arrive_drop", "expect_tx", "complete_tx", "test_wait", "try_wait", "pending_count")
    )
    if action == "pending_count":
        ins.count(2)
        return cx.assign(ins, ins.operands[0], U32, f"emu_mbarrier_pending({cx.value(ins, ins.operands[1], U64)})")
    if action in ("arrive", "arrive_drop"):
        return _arrive(cx, ins, drop=action == "arrive_drop")
    if action in ("test_wait", "try_wait"):
        return _wait(cx, ins, suspends=action == "try_wait")
    if action in ("expect_tx", "complete_tx"):
        _order(ins, ("relaxed",))
        space = m.optional(_SHARED)
    else:
        space = m.optional(_SHARED[:2])
    ins.count(1 if action == "inval" else 2)
    address = _shared_address(cx, ins, ins.operands[0], space)
    if action == "inval":
        return f"emu_mbarrier_invalidate({address}, {ins.site()});"
    function = {"init": "init", "expect_tx": "expect", "complete_tx": "complete"}[action]
    return f"emu_mbarrier_{function}({address}, {cx.value(ins, ins.operands[1], U32)}, {ins.site()});"


def _arrive(cx: Context, ins: Instruction, *, drop: bool) -> str:
    m = ins.modifiers
    flags = ["MB_DROP"] if drop else []
    expects = m.flag("expect_tx")
    keeps = m.flag("noComplete")
    if expects and keeps:
        raise ins.fail(".expect_tx and .noComplete exclude each other")
    if _order(ins, ("release",) if keeps else ("release", "relaxed"), ("cta",) if keeps else _SCOPES) == "relaxed":
        flags.append("MB_RELAXED")
    space = m.optional(_SHARED[:2] if keeps else _SHARED)
    flags += ["MB_KEEPS_PHASE"] if keeps else []
    ins.count(3 if expects or keeps else 2, 3)
    state = ins.operands[0]
    if space == "shared::cluster" and state != "_":
        raise ins.fail("an arrival on shared::cluster returns no state: it needs the sink _")
    address = _shared_address(cx, ins, ins.operands[1], space)
    number = cx.value(ins, ins.operands[2], U32) if len(ins.operands) == 3 else "1"
    count, nbytes = ("1", number) if expects else (number, "0")
    call = f"emu_mbarrier_arrive({address}, {count}, {nbytes}, {' | '.join(flags) or 0}, {ins.site()})"
    return cx.assign(ins, state, U64, call)


def _wait(cx: Context, ins: Instruction, *, suspends: bool) -> str:
    """try_wait's time limit is not modelled: it waits, but for a seeded schedule, where it may give up early."""
    m = ins.modifiers
    parity = m.flag("parity")
    flags = [name for name, on in (("MB_PARITY", parity), ("MB_SUSPENDS", suspends)) if on]
    if _order(ins, ("acquire", "relaxed")) == "relaxed":
        flags.append("MB_RELAXED")
    space = m.optional(_SHARED[:2])
    ins.count(3, 4 if suspends else 3)
    address = _shared_address(cx, ins, ins.operands[1], space)
    phase = cx.value(ins, ins.operands[2], U32 if parity else U64)
    if len(ins.operands) == 4:
        cx.value(ins, ins.operands[3], U32)
    call = f"emu_mbarrier_wait({address}, {phase}, {' | '.join(flags) or 0}, {ins.site()})"
    return cx.assign(ins, ins.operands[0], PRED, call)


# ---------------------------------------------------------------- cp
def copy(cx: Context, ins: Instruction) -> str:
    """cp.async, cp.async.bulk, cp.reduce.async.bulk, and the waits for each."""
    m = ins.modifiers
    reduces = m.flag("reduce")
    if not m.flag("async"):
        raise ins.fail("only cp.async is known")
    if not m.flag("bulk"):
        if reduces:
            raise ins.fail("only cp.reduce.async.bulk is known")
        return _copy_async(cx, ins)
    if m.flag("commit_group"):
        ins.count(0)
        return "emu_bulk_commit();"
    if m.flag("wait_group"):
        only_read = m.flag("read")
        ins.count(1)
        return f"emu_bulk_wait({cx.integer(ins, ins.operands[0])}u, {int(only_read)});"
    prefetches = m.flag("prefetch")
    if m.flag("tensor"):
        return _tensor(cx, ins, prefetches=prefetches, reduces=reduces)
    if prefetches:
        m.choice(("L2",))
        m.choice(("global",))
        cache_policy(cx, ins, 2)
        ins.count(2)
        source = cx.address(ins, ins.operands[0], narrow=False)
        return f"emu_bulk_prefetch({source}, {cx.value(ins, ins.operands[1], U32)}, {ins.site()});"
    return _bulk(cx, ins, reduces=reduces)


def _copy_async(cx: Context, ins: Instruction) -> str:
    m = ins.modifiers
    if m.flag("mbarrier"):
        m.choice(("arrive",))
        m.type("b64")
        counts = m.flag("noinc")
        space = m.optional(_SHARED[:2])
        ins.count(1)
        return f"emu_cp_async_arrive({_shared_address(cx, ins, ins.operands[0], space)}, {int(counts)}, {ins.site()});"
    action = m.choice(("ca", "cg", "commit_group", "wait_group", "wait_all"))
    if action == "commit_group":
        ins.count(0)
        return "emu_cp_async_commit();"
    if action == "wait_group":
        ins.count(1)
        return f"emu_cp_async_wait({cx.integer(ins, ins.operands[0])}u);"
    if action == "wait_all":
        ins.count(0)
        return "emu_cp_async_commit(); emu_cp_async_wait(0);"
    m.choice(("shared", "shared::cta"))
    m.choice(("global",))
    if m.flag("L2::cache_hint"):
        cx.value(ins, ins.operands.pop(), TYPES["b64"])
    m.ignore(("L2::64B", "L2::128B", "L2::256B"))
    ins.count(3, 4)
    size = cx.integer(ins, ins.operands[2])
    if size not in ((16,) if action == "cg" else (4, 8, 16)):
        raise ins.fail(f"cp.async.{action} cannot copy {size} bytes")
    source_size = f"{size}u"
    if len(ins.operands) == 4:
        found = cx.find(ins.operands[3].lstrip("! "))
        if found is not None and found.type.kind == "pred":  # the ignore-src form
            source_size = f"({cx.predicate(ins, ins.operands[3])} ? 0u : {size}u)"
        else:
            source_size = cx.value(ins, ins.operands[3], U32)
    to = cx.address(ins, ins.operands[0], narrow=True)
    return f"emu_cp_async({to}, {cx.address(ins, ins.operands[1], narrow=False)}, {size}, {source_size}, {ins.site()});"


# ---------------------------------------------------------------- bulk copies
def _reduction(ins: Instruction, destination: str) -> str:
    """The runtime's code of .op.type, taken from the modifiers."""
    operation = ins.modifiers.choice(_OPERATIONS)
    kind = ins.modifiers.type(_REDUCTIONS[destination][operation])
    if kind.kind == "h" and operation == "add" and not ins.modifiers.flag("noftz"):
        raise ins.fail("16-bit float addition needs .noftz")
    element = kind.name.replace("b", "u") if kind.kind == "b" else kind.name
    return f"(u32)T_{operation.upper()} | E_{element.upper()} << 8"


def _bulk(cx: Context, ins: Instruction, *, reduces: bool) -> str:
    m = ins.modifiers
    to, source = m.choice((*_SHARED[1:], "global")), m.choice(("global", "shared::cta"))
    if to == "global":
        if source == "global":
            raise ins.fail("a bulk copy from global to global memory does not exist")
        return _bulk_store(cx, ins, reduces=reduces)
    m.choice((_BY_MBARRIER,))
    multicast = source == "global" and to == "shared::cluster" and m.flag("multicast::cluster")
    count = 4 + multicast
    if source == "global":
        cache_policy(cx, ins, count)
    ins.count(count)
    reduction = _reduction(ins, "shared") if reduces else "NO_REDUCTION"
    target, mbar = cx.address(ins, ins.operands[0], narrow=True), cx.address(ins, ins.operands[3], narrow=True)
    nbytes = cx.value(ins, ins.operands[2], U32)
    if source == "global":
        if reduces:
            raise ins.fail("a bulk reduction reads shared memory")
        blocks = cx.value(ins, ins.operands[4], U16) if multicast else "0"
        start = cx.address(ins, ins.operands[1], narrow=False)
        return f"emu_bulk_load({target}, {start}, {nbytes}, {mbar}, {blocks}, {ins.site()});"
    if to == "shared::cta":
        raise ins.fail("a bulk copy between shared memories goes to .shared::cluster")
    start = cx.address(ins, ins.operands[1], narrow=True)
    return f"emu_bulk_between({target}, {start}, {nbytes}, {mbar}, {reduction}, {ins.site()});"


def _bulk_store(cx: Context, ins: Instruction, *, reduces: bool) -> str:
    m = ins.modifiers
    m.choice(("bulk_group",))
    masked, hinted = not reduces and m.flag("cp_mask"), m.flag("L2::cache_hint")
    ins.count(3 + hinted + masked)
    mask = cx.value(ins, ins.operands[-1], U16) if masked else "0xffff"
    reduction = _reduction(ins, "global") if reduces else "NO_REDUCTION"
    target, start = cx.address(ins, ins.operands[0], narrow=False), cx.address(ins, ins.operands[1], narrow=True)
    nbytes = cx.value(ins, ins.operands[2], U32)
    return f"emu_bulk_store({target}, {start}, {nbytes}, {mask}, {reduction}, {ins.site()});"


# ---------------------------------------------------------------- tensor copies
def _tensor(cx: Context, ins: Instruction, *, prefetches: bool, reduces: bool) -> str:
    m = ins.modifiers
    rank = int(m.choice(("1d", "2d", "3d", "4d", "5d"))[0])
    if prefetches:
        m.choice(("L2",))
    spaces = ("global",) if prefetches else (*_SHARED[1:], "global")
    to = m.choice(spaces)
    source = to if prefetches else m.choice(("global", "shared::cta"))
    stores = to == "global" and not prefetches
    rows = m.flag("tile::scatter4" if stores else "tile::gather4") if not reduces else False
    if not rows:
        m.flag("tile")
    if unknown := [w for w in m.words if w.startswith("im2col")]:
        raise ins.fail(f"tensor copies in .{unknown[0]} mode are not supported")
    if rows and rank != 2:
        raise ins.fail("gather4 and scatter4 are 2d")
    mode = "TENSOR_ROWS" if rows else "TENSOR_TILE"
    coordinates = 5 if rows else rank
    if prefetches:
        cache_policy(cx, ins, 1)
        ins.count(1)
        at, place = _tile(cx, ins, ins.operands[0], coordinates)
        return f"{at} emu_tensor_prefetch({place}, {rank}, at, {mode}, {ins.site()});"
    if stores:
        if source != "shared::cta":
            raise ins.fail("a tensor store reads .shared::cta")
        m.choice(("bulk_group",))
        operation = f"T_{m.choice(_OPERATIONS).upper()}" if reduces else "NO_REDUCTION"
        cache_policy(cx, ins, 2)
        ins.count(2)
        at, place = _tile(cx, ins, ins.operands[0], coordinates)
        start = cx.address(ins, ins.operands[1], narrow=True)
        return f"{at} emu_tensor_store({place}, {rank}, at, {mode}, {start}, {operation}, {ins.site()});"
    if reduces or source != "global":
        raise ins.fail("a tensor copy to shared memory reads .global")
    m.choice((_BY_MBARRIER,))
    multicast = to == "shared::cluster" and m.flag("multicast::cluster")
    count = 3 + multicast
    cache_policy(cx, ins, count)
    ins.count(count)
    at, place = _tile(cx, ins, ins.operands[1], coordinates)
    target, mbar = (cx.address(ins, ins.operands[i], narrow=True) for i in (0, 2))
    blocks = cx.value(ins, ins.operands[3], U16) if multicast else "0"
    return f"{at} emu_tensor_load({target}, {place}, {rank}, at, {mode}, {mbar}, {blocks}, {ins.site()});"


def _tile(cx: Context, ins: Instruction, operand: str, coordinates: int) -> tuple[str, str]:
    """C that declares `at`, and the tensor map's address, from "[map, {coordinates}]"."""
    parts = split_operands(operand[1:-1]) if operand.startswith("[") else []
    if len(parts) != 2:
        raise ins.fail(f"{operand!r} is not [map, {{coordinates}}]")
    values = [cx.value(ins, v, S32) for v in cx.vector(parts[1])]
    if len(values) != coordinates:
        raise ins.fail(f"{len(values)} coordinates, expected {coordinates}")
    return f"const s32 at[] = {{{', '.join(values)}}};", cx.address(ins, f"[{parts[0]}]", narrow=False)


def prefetch(cx: Context, ins: Instruction) -> str:
    if not ins.modifiers.flag("tensormap"):
        return memory_ops.prefetch(cx, ins)
    space = ins.modifiers.optional(("const", "param"))
    ins.count(1)
    address = cx.address(ins, ins.operands[0], narrow=False, near=space is not None)
    if space:
        address = f"generic_from_{space}(self, {address})"
    return f"emu_tensor_map_prefetch({address}, {ins.site()});"


# ---------------------------------------------------------------- st.async, red.async
def _value(cx: Context, ins: Instruction, names: Sequence[str], kind: PtxType, reduction: str) -> str:
    values = ", ".join(cx.value(ins, n, kind) for n in names)
    to, mbar = cx.address(ins, ins.operands[0], narrow=True), cx.address(ins, ins.operands[2], narrow=True)
    code = f"const {kind.c} v[] = {{{values}}}; "
    return code + f"emu_bulk_value({to}, v, sizeof v, {mbar}, {reduction}, {ins.site()});"


def store(cx: Context, ins: Instruction) -> str:
    m = ins.modifiers
    if not m.flag("async"):
        return memory_ops.store(cx, ins)
    kind = m.type("b32 u32 s32 f32 b64 u64 s64 f64")
    m.flag("weak")
    m.choice(("shared::cluster",))
    m.choice((_BY_MBARRIER,))
    width = m.optional(("v2", "v4"))
    ins.count(3)
    names = cx.vector(ins.operands[1])
    if len(names) != int(width[1] if width else 1):
        raise ins.fail(f"{len(names)} registers with {'.' + width if width else 'no vector modifier'}")
    if len(names) * kind.bits > 128:
        raise ins.fail(f"{len(names)} of .{kind.name} are more than 16 bytes")
    return _value(cx, ins, names, kind, "NO_REDUCTION")


def reduce(cx: Context, ins: Instruction) -> str:
    m = ins.modifiers
    if not m.flag("async"):
        return atomic_ops.atomic(cx, ins)
    m.choice(("relaxed",))
    m.choice(("cluster",))
    m.choice(("shared::cluster",))
    m.choice((_BY_MBARRIER,))
    kind = TYPES[m.words[-1]] if m.words and m.words[-1] in TYPES else U32
    reduction = _reduction(ins, "shared")
    ins.count(3)
    return _value(cx, ins, [ins.operands[1]], kind, reduction)


HANDLERS: dict[str, Handler] = {
    "mbarrier": mbarrier,
    "cp": copy,
    "prefetch": prefetch,
    "st": store,
    "red": reduce,
}
