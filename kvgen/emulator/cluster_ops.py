"""Clusters: their barrier, and addresses in the shared memory of another block."""

from __future__ import annotations

from kvgen.emulator.context import Context, Handler, Instruction
from kvgen.emulator.ptxtypes import TYPES

U32 = TYPES["u32"]


def cluster_barrier(cx: Context, ins: Instruction) -> str:
    """barrier.cluster.arrive and .wait; arriving without .relaxed releases, waiting acquires."""
    m = ins.modifiers
    m.choice(("cluster",))
    action = m.choice(("arrive", "wait"))
    order = m.optional(("release", "relaxed") if action == "arrive" else ("acquire",))
    aligned = int(m.flag("aligned"))
    ins.count(0)
    if action == "wait":
        return f"emu_cluster_wait({aligned}, {ins.site()});"
    return f"emu_cluster_arrive({int(order != 'relaxed')}, {aligned}, {ins.site()});"


def map_rank(cx: Context, ins: Instruction) -> str:
    """mapa: the same variable in the block of the given rank, as a shared::cluster or a generic address."""
    kind = ins.modifiers.type("u32 u64")
    generic = not ins.modifiers.flag("shared::cluster")
    ins.count(3)
    if generic and kind.bits != 64:
        raise ins.fail("a generic address has 64 bits")
    source = ins.operands[1]
    address, rank = cx.value(ins, source, kind), cx.value(ins, ins.operands[2], U32)
    if generic and cx.find(source) is None:  # a variable's name is its shared address
        address = f"generic_from_shared(self, {address})"
    value = f"emu_map_rank({address}, {rank}, {int(generic)}, {ins.site()})"
    return cx.assign(ins, ins.operands[0], kind, value)


def rank_of(cx: Context, ins: Instruction) -> str:
    """getctarank: the rank of the block that an address belongs to."""
    kind = ins.modifiers.type("u32 u64")
    generic = not ins.modifiers.flag("shared::cluster")
    ins.count(2)
    if generic and kind.bits != 64:
        raise ins.fail("a generic address has 64 bits")
    source = ins.operands[1]
    address = cx.value(ins, source, kind)
    if generic and cx.find(source) is None:
        address = f"generic_from_shared(self, {address})"
    return cx.assign(ins, ins.operands[0], U32, f"emu_rank_of({address}, {int(generic)}, {ins.site()})")


HANDLERS: dict[str, Handler] = {
    "mapa": map_rank,
    "getctarank": rank_of,
}
