"""Two warpgroups that take turns, worked out on paper; and what is no such loop."""

from __future__ import annotations

import pytest

from kvgen.cycles.core import ReplayError, replay
from kvgen.cycles.roles import in_turns, taking_turns
from tests.cycles.programs import ROUND, program

LOOP = """[-:-:-:1] SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R22+UR6+0x100], RZ
[-:-:-:1] SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R23+UR6+0x120], R24
[-:-:-:10] NOP
[-:-:-:1] SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R22+URZ+0x120], RZ
[-:-:-:1] SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R22+UR6+0x100], RZ
[-:-:-:1] SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R22+UR6+0x100], R23"""


def test_tiles_are_a_chain() -> None:
    # The weights of a tile come 10 of the mbarrier and 10 of work behind those of the tile before: 20 a tile, and each
    # warpgroup has every second one. Landing is no limit: 11 after its own weights it goes on, and waits for the other's.
    roles, mbarriers = taking_turns(program(LOOP))
    found = replay(roles, ROUND, mbarriers=mbarriers)
    assert [t.cycles for t in found.trips] == pytest.approx([40, 40], abs=2)
    assert all(
        t.waits["mbarrier weights of 1" if n == 0 else "mbarrier weights of 0"] > 10 for n, t in enumerate(found.trips)
    )


def test_a_loop_of_other_mbarriers() -> None:
    with pytest.raises(ReplayError, match=r"mbarriers at 0x100; a loop of two warpgroups has two kinds"):
        taking_turns(program(LOOP)[:1])


TURNS = """[-:-:-:1] SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R22+UR6+0x100], R23
[-:-:-:1] BAR.SYNC.DEFER_BLOCKING R26, 0x100
[-:-:-:50] NOP
[-:-:-:1] BAR.ARV R27, 0x100
[-:-:-:20] NOP
[-:-:-:1] SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R22+URZ+0x120], RZ"""


def test_turns_follow_one_another() -> None:
    # A turn is 51 long and begins 10 of the barrier behind the end of the other one's: 61 each, two of them a trip.
    roles, mbarriers = in_turns(program(TURNS))
    found = replay(roles, ROUND, mbarriers=mbarriers)
    assert [t.cycles for t in found.trips] == pytest.approx([122, 122], abs=4)
    assert all(t.waits["barrier"] > 20 for t in found.trips)


def test_a_loop_without_turns() -> None:
    with pytest.raises(ReplayError, match="named barriers SYNC; a loop in turns waits for one and ends it"):
        in_turns(program(TURNS)[:3])
