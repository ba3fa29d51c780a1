"""Kernels whose warps run loops of their own: one that copies by TMA, and two warpgroups that take turns at the tensor cores."""

from __future__ import annotations

import pytest

from kvgen.cycles.core import Mbarrier, ReplayError, replay, tensor_cycles
from kvgen.cycles.flow import blocks
from kvgen.cycles.roles import Part, ends, told
from tests.cycles.programs import ROUND

# As such kernels are compiled: the first ask stands in the loop, the next ones out of line; who waits for copies asks twice
# before that, and one of the warpgroups not at all.
LISTING = """
.L_x_0:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2+URZ+0x20], R3 ;
        /*0020*/              @!P0 BRA `(.L_x_8) ;
.L_x_1:
        /*0030*/              @!P3 SYNCS.ARRIVE.TRANS64 RZ, [R2+URZ+0x10], R3 ;
        /*0040*/                   UTMALDG.4D [UR8], [UR18] ;
        /*0050*/               @P2 BRA `(.L_x_0) ;
        /*0060*/                   EXIT ;
.L_x_2:
        /*0070*/               @P1 BRA `(.L_x_4) ;
        /*0080*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR10+0x10], R3 ;
        /*0090*/               @P0 BRA `(.L_x_4) ;
.L_x_3:
        /*00a0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR10+0x10], R3 ;
        /*00b0*/              @!P0 BRA `(.L_x_9) ;
.L_x_4:
        /*00c0*/                   BAR.SYNC.DEFER_BLOCKING R1, 0x100 ;
        /*00d0*/                   HGMMA.64x256x16.F32 R24, R152, gdesc[UR8], R24, gsb0 ;
        /*00e0*/                   BAR.ARV R1, 0x100 ;
        /*00f0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0100*/                   SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [R9+URZ], RZ ;
        /*0110*/               @P2 BRA `(.L_x_2) ;
        /*0120*/                   EXIT ;
.L_x_8:
        /*0130*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2+URZ+0x20], R3 ;
        /*0140*/              @!P0 NANOSLEEP.SYNCS 0x989680 ;
        /*0150*/              @!P0 BRA `(.L_x_8) ;
        /*0160*/                   BRA `(.L_x_1) ;
.L_x_9:
        /*0170*/                   MOV R15, UR10 ;
.L_x_11:
        /*0180*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R15+URZ+0x10], R3 ;
        /*0190*/              @!P0 BRA `(.L_x_9) ;
        /*01a0*/                   BRA `(.L_x_4) ;
"""
ASKS = "SYNCS.PHASECHK"
FIRST = Part("first", 4, ("HGMMA", 0), meets=("full", "turn 0", "turn 1", "free"))
SECOND = Part("second", 4, ("HGMMA", 0), meets=("turn 1", "turn 0", "free"), without=(ASKS,), before={"turn 0": 1})
COPIES = Part("copies", 1, ("UTMALDG", 0), meets=("free", "full", "full"), nbytes=(4096,))
MBARRIERS = {
    "full": Mbarrier(1, 4096),
    "free": Mbarrier(8, ahead=2),
    **dict.fromkeys(("turn 0", "turn 1"), Mbarrier(8)),
}
# A trip with a copy by the first thread of a warpgroup, and a word that it alone runs.
LEADS = """
.L_x_0:
        /*0010*/                   BAR.SYNC.DEFER_BLOCKING 0x8, 0x80 ;
        /*0020*/               @P3 BRA `(.L_x_1) ;
        /*0030*/                   UTMALDG.4D [UR8], [UR18] ;
.L_x_1:
        /*0040*/              @!P3 SYNCS.ARRIVE.TRANS64 RZ, [UR10+0x10], R3 ;
        /*0050*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR10+0x10], R3 ;
        /*0060*/              @!P0 BRA `(.L_x_2) ;
.L_x_3:
        /*0070*/                   HGMMA.64x256x16.F32 R24, R152, gdesc[UR8], R24, gsb0 ;
        /*0080*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0090*/               @P2 BRA `(.L_x_0) ;
        /*00a0*/                   EXIT ;
.L_x_2:
        /*00b0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR10+0x10], R3 ;
        /*00c0*/              @!P0 BRA `(.L_x_2) ;
        /*00d0*/                   BRA `(.L_x_3) ;
"""
LEADER = Part("all", 4, ("HGMMA", 0), meets=("full", "full", "full"), nbytes=(4096,), leads=True)


def test_what_is_asked_again_is_no_part_of_a_trip() -> None:
    first, second, copies = told(blocks(LISTING), (FIRST, SECOND, COPIES))
    assert [x.address for x in copies.trip] == [0x10, 0x20, 0x30, 0x40, 0x50]
    assert [x.address for x in first.trip] == [0x70, 0x80, 0x90, *range(0xC0, 0x120, 0x10)]
    assert [x.address for x in second.trip] == [0x70, *range(0xC0, 0x120, 0x10)]


def test_two_warpgroups_take_turns() -> None:
    # Products of 128 cycles, one after the other on the same pipes: each warpgroup's trip is 256, and so is the copy's.
    roles = told(blocks(LISTING), (FIRST, SECOND, COPIES))
    found = replay(roles, ROUND, mbarriers=MBARRIERS)
    assert [t.cycles for t in found.trips] == pytest.approx([256, 256, 256], abs=2)
    assert found.trip("copies").waits["mbarrier free"] > 200
    assert [tensor_cycles(role.trip, ROUND) for role in roles] == [128, 128, 0]


def test_copies_that_are_late() -> None:
    # A ring of two: both stages are filled anew once every 1000 cycles, and what lies between their use and their reuse.
    found = replay(told(blocks(LISTING), (FIRST, SECOND, COPIES)), ROUND.at(tma=1000), mbarriers=MBARRIERS)
    assert found.trip("first").cycles == pytest.approx(600, abs=60)
    assert "mbarrier full" in found.trip("first").waits and "mbarrier full" not in found.trip("second").waits


def test_one_thread_copies_for_a_warpgroup() -> None:
    leader, others = told(blocks(LEADS), (LEADER,))
    assert (leader.warps, others.warps) == (1, 3)
    assert [x.address for x in others.trip] == [0x10, 0x20, *range(0x40, 0xA0, 0x10)]
    assert others.trip[2].guard == "!PT", "one thread says what will come"
    # Its product: a barrier of 10, a copy of 100, the mbarrier of 10, 128, the pipe's 20, and its own dozen of words.
    found = replay((leader, others), ROUND, mbarriers={"full": Mbarrier(1, 4096)})
    assert found.trip().cycles == pytest.approx(10 + 100 + 10 + 128 + 20, abs=15)


def test_what_came_before_the_loops() -> None:
    # The loop waits for the next tile, of which there is none before the product is done: as above. With a tile in hand it asks
    # for a phase that has come, and copies are a trip ahead.
    part = Part("all", 4, ("HGMMA", 0), ("full",) * 3, (4096,), leads=True, before={"full": 1}, first={"full": 0})
    found = replay(told(blocks(LEADS), (part,)), ROUND, mbarriers={"full": Mbarrier(1, 4096)})
    assert found.trip().cycles == pytest.approx(10 + 128 + 20, abs=20)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Part("x", 4, ("HGMMA", 1)), "x: 1 innermost loops hold HGMMA"),
        (
            Part("x", 4, ("HGMMA", 0), ("full",)),
            "x: told of 1 words that meet and 0 bulk copies, of which there are 4 and 0: 0080",
        ),
        (Part("x", 4, ("HGMMA", 0), without=("HGMMA",)), "x: no way round its loop without HGMMA"),
    ],
)
def test_what_a_kernel_is_not(part: Part, message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        told(blocks(LISTING), (part,))


# A kernel that goes over work items: what a chunk runs beside its loop's trips, one way of it shorter than the other, a loop that
# masks, with the same products, and the end.
ITEMS = """
.L_x_0:
        /*0010*/                   MOV R1, R2 ;
.L_x_1:
        /*0020*/               @P5 BRA `(.L_x_3) ;
        /*0030*/                   FADD R4, R4, R4 ;
        /*0040*/                   FADD R5, R5, R5 ;
.L_x_3:
        /*0050*/                   BAR.SYNC.DEFER_BLOCKING 0x8, 0x80 ;
        /*0060*/               @P6 BRA `(.L_x_5) ;
.L_x_4:
        /*0070*/                   HGMMA.64x256x16.F32 R24, R152, gdesc[UR8], R24, gsb0 ;
        /*0080*/               @P0 BRA `(.L_x_4) ;
.L_x_5:
        /*0090*/               @P6 BRA `(.L_x_7) ;
.L_x_6:
        /*00a0*/                   HGMMA.64x256x16.F32 R24, R152, gdesc[UR8], R24, gsb0 ;
        /*00b0*/               @P0 BRA `(.L_x_6) ;
.L_x_7:
        /*00c0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*00d0*/                   STG.E desc[UR6][R2.64], R24 ;
        /*00e0*/               @P1 BRA `(.L_x_1) ;
        /*00f0*/                   EXIT ;
"""


def test_what_a_chunk_runs_outside_its_loop() -> None:
    graph = blocks(ITEMS)
    masked, plain = (Part("x", 4, ("HGMMA", n)).found(graph) for n in (0, 1))
    before = [0x20, 0x30, 0x40, 0x50, 0x60]
    assert [x.address for x in plain.outside()] == [*before, 0x90, 0xC0, 0xD0, 0xE0]
    assert [x.address for x in masked.outside()] == [*before, 0x90, 0xC0, 0xD0, 0xE0]


def test_of_a_kernel_of_one_item_its_beginning_and_its_end() -> None:
    (loop,) = (x for x in [Part("x", 4, ("HGMMA", 0)).found(blocks(LEADS))])
    # Nothing stands before its loop's head.
    assert [x.address for x in loop.outside()] == [0xA0]


def test_the_ends_of_parts_that_compute() -> None:
    # Both warpgroups run the same and meet nobody there.
    parts = [Part(name, 4, ("HGMMA", 1)) for name in ("first", "second")]
    (role,) = ends(blocks(ITEMS), [*parts, COPIES][:2])
    assert role.warps == 8 and [x.opcode for x in role.trip if x.address == 0x50] == ["NOP"]
