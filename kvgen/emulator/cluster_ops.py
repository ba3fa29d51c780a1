"""Clusters: their barrier, and addresses in the shared memory of another block."""

from __future__ import annotations

from kvgen.emulator.context import Context, Handler, Instruction
from kvgen.emulator.ptxtypes import TYPES, PtxType

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


def _address(cx: Context, ins: Instruction, count: int) -> tuple[PtxType, str, int]:
    """The type, the address operand's value and whether it is generic; a variable's name stands for its shared address."""
    kind = ins.modifiers.type("u32 u64")
    generic = not ins.modifiers.flag("shared::cluster")
    ins.count(count)
    if generic and kind.bits != 64:
        raise ins.fail("a generic address has 64 bits")
    address = cx.value(ins, ins.operands[1], kind)
    named = cx.find(ins.operands[1]) is None
    return kind, f"generic_from_shared(self, {address})" if generic and named else address, int(generic)


def map_rank(cx: Context, ins: Instruction) -> str:
    """mapa: the same variable in the block of the given rank, as a shared::cluster or a generic address."""
    kind, address, generic = _address(cx, ins, 3)
    rank = cx.value(ins, ins.operands[2], U32)
    return cx.assign(ins, ins.operands[0], kind, f"emu_map_rank({address}, {rank}, {generic}, {ins.site()})")


def rank_of(cx: Context, ins: Instruction) -> str:
    """getctarank: the rank of the block that an address belongs to."""
    _, address, generic = _address(cx, ins, 2)
    return cx.assign(ins, ins.operands[0], U32, f"emu_rank_of({address}, {generic}, {ins.site()})")


HANDLERS: dict[str, Handler] = {
    "mapa": map_rank,
    "getctarank": rank_of,
}
