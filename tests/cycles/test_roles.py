"""Two warpgroups that take turns, worked out on paper; and what is no such loop."""

from __future__ import annotations

from collections import Counter

import pytest

from kvgen.cycles.core import Mbarrier, ReplayError, replay
from kvgen.cycles.flow import blocks
from kvgen.cycles.roles import even_and_odd_tiles, ping_pong, producer_of, widening
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
    roles, mbarriers = even_and_odd_tiles(program(LOOP))
    found = replay(roles, ROUND, mbarriers=mbarriers)
    assert [t.cycles for t in found.trips] == pytest.approx([40, 40], abs=2)
    assert all(
        t.waits["mbarrier weights of 1" if n == 0 else "mbarrier weights of 0"] > 10 for n, t in enumerate(found.trips)
    )


def test_a_loop_of_other_mbarriers() -> None:
    with pytest.raises(ReplayError, match=r"mbarriers at 0x100; a loop of two warpgroups has two kinds"):
        even_and_odd_tiles(program(LOOP)[:1])


TURNS = """[-:-:-:1] SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R22+UR6+0x100], R23
[-:-:-:1] BAR.SYNC.DEFER_BLOCKING R26, 0x100
[-:-:-:50] NOP
[-:-:-:1] BAR.ARV R27, 0x100
[-:-:-:20] NOP
[-:-:-:1] SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R22+URZ+0x120], RZ"""


def test_turns_follow_one_another() -> None:
    # A turn is 51 long and begins 10 of the barrier behind the end of the other one's: 61 each, two of them a trip.
    roles, mbarriers = ping_pong(program(TURNS))
    found = replay(roles, ROUND, mbarriers=mbarriers)
    assert [t.cycles for t in found.trips] == pytest.approx([122, 122], abs=4)
    assert all(t.waits["barrier"] > 20 for t in found.trips)


def test_a_loop_without_turns() -> None:
    with pytest.raises(ReplayError, match="named barriers SYNC; a ping-pong loop waits at one and arrives at one"):
        ping_pong(program(TURNS)[:3])


# A ring of two of K and of V, an mbarrier at 0x100 and on; a lane's box takes 10 in a loop of its own.
FILLED = """
        /*0010*/                   SYNCS.EXCH.64 URZ, [UR4+0x100], UR6 ;
.L_x_0:
        /*0020*/               @P0 BRA `(.L_x_1) ;
        /*0030*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4+0x148], R2 ;
        /*0040*/                   LDGSTS.E.BYPASS.128 [R5], desc[UR26][R2.64] ;
        /*0050*/                   LDGSTS.E.BYPASS.128 [R5], desc[UR26][R2.64] ;
.L_x_1:
        /*0060*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4+0x110], R2 ;
        /*0070*/                   SYNCS.ARRIVE.TRANS64 RZ, [UR4+0x100], R2 ;
.L_x_2:
        /*0080*/                   UTMALDG.5D [UR8], [UR36], desc[UR38] ;
        /*0090*/               @P0 BRA.U.ANY `(.L_x_2) ;
        /*00a0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4+0x130], R2 ;
        /*00b0*/                   SYNCS.ARRIVE.TRANS64 RZ, [UR4+0x120], R2 ;
.L_x_3:
        /*00c0*/                   UTMALDG.5D [UR8], [UR36], desc[UR38] ;
        /*00d0*/               @P0 BRA.U.ANY `(.L_x_3) ;
        /*00e0*/               @P1 BRA `(.L_x_0) ;
        /*00f0*/                   EXIT ;
"""
SOURCE = """
constexpr uint32_t kTokens = 64, kStages = 2;
constexpr uint32_t kIssue = 16;
struct Shared {
  uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages], q_full, q_empty;
};
      mbarrier_init(&shared.k_full[i], 1);
"""
TAKEN = """[-:-:-:1] SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R22+UR6+0x100], R23
[-:-:-:1] SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R22+UR6+0x120], R23
[-:-:-:20] NOP
[-:-:-:1] SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R22+URZ+0x110], RZ
[-:-:-:1] SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R22+URZ+0x130], RZ"""


def test_a_producer_is_a_role() -> None:
    producer = producer_of(blocks(FILLED), SOURCE)
    assert producer is not None
    # What waits for Q is done once; four lanes have a box of K each, and of V.
    assert sum(word.base == "UTMALDG" for word in producer.trip) == 8
    assert not any(word.base == "LDGSTS" for word in producer.trip)
    roles, mbarriers = ping_pong(program(TAKEN), producer)
    assert mbarriers["k_full"] == Mbarrier(1, 4) and mbarriers["v_empty"] == Mbarrier(8, 0, 2)
    assert [role.name for role in roles] == ["warpgroup 0", "warpgroup 1", "producer"]
    # Eight boxes of 50 are the limit of a tile; where they are cheap a tile goes round the ring of two: 100 of the copy, 10 of an
    # mbarrier there and 10 back, 23 of work, and the copies' own issue.
    slow = replay(roles, ROUND.at(tma_box=50), mbarriers=mbarriers).trip("warpgroup 0").cycles
    fast = replay(roles, ROUND, mbarriers=mbarriers).trip("warpgroup 0").cycles
    assert slow == pytest.approx(400, rel=0.02)
    assert 143 / 2 < fast < 100


def test_an_mbarrier_nobody_arrives_at() -> None:
    producer = producer_of(blocks(FILLED), SOURCE)
    with pytest.raises(ReplayError, match="nobody arrives at k_empty, v_empty"):
        ping_pong(program(TAKEN)[:3], producer)


def test_no_producer() -> None:
    assert producer_of(blocks(FILLED), SOURCE.replace("k_full[i]", "k_read[i]")) is None
    assert producer_of(blocks(FILLED.replace("UTMALDG", "NOP")), SOURCE) is None
    # Nobody tells of V in the loop that fills K.
    assert producer_of(blocks(FILLED.replace("[UR4+0x120]", "[UR4+0x100]")), SOURCE) is None
    # Every trip waits for Q.
    assert producer_of(blocks(FILLED.replace("@P0 BRA `(.L_x_1)", "NOP")), SOURCE) is None


def widened(*fetches: str) -> str:
    """Two loops that multiply, and one that widens rows of two records: left halves of one are longer, right halves of the other.
    Mbarriers are at 0x100 (full), 0x120 (empty), 0x140 (ready) and on. `fetches`: loads of either record."""
    add = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"
    ready = "SYNCS.{} [UR4+0x140], R2", "SYNCS.{} [UR4+0x148], R2"
    ask, tell = "PHASECHK.TRANS64.TRYWAIT P0,", "ARRIVE.TRANS64.A1T0 RZ,"
    lines = ["SYNCS.EXCH.64 URZ, [UR4+0x100], UR6"]
    for n in (0, 1):
        order = (
            (ready[0].format(tell), ready[1].format(ask)) if n == 0 else (ready[0].format(ask), ready[1].format(tell))
        )
        lines += [f".L_x_{n}:", f"SYNCS.{ask} [UR4+0x100], R2", f"SYNCS.{ask} [UR4+0x108], R2", add, *order]
        lines += [f"SYNCS.{tell} [UR4+{0x120 + 8 * n:#x}], R2", f"@P1 BRA `(.L_x_{n})"]
    lines.append(".L_x_2:")
    for half, lengths in enumerate(((9, 2), (3, 6))):
        lines.append(f"SYNCS.{ask} [UR4+{0x120 + 8 * half:#x}], R2")
        for record, length in enumerate(lengths):
            after = f".L_x_{3 + 4 * half + 2 * record}"
            lines += [f"@P{2 + record} BRA `({after})", *["F2FP.BF16.F32 R30, R31, R32"] * length, "STS.64 [R9], R28"]
            lines += [f"SYNCS.{tell} [UR4+{0x100 + 8 * half:#x}], R2", f"{after}:"]
        for record, fetch in enumerate(fetches):
            after = f".L_x_{4 + 4 * half + 2 * record}"
            lines += [f"@P{2 + record} BRA `({after})", fetch, f"{after}:"]
    lines += ["@P1 BRA `(.L_x_2)", "EXIT"]
    at = iter(range(16, 16 * len(lines) + 16, 16))
    return (
        "\n".join(x if x.endswith(":") else f"        /*{next(at):04x}*/                   {x} ;" for x in lines) + "\n"
    )


def test_a_tile_is_of_one_record() -> None:
    """Both ways of filling a half lie on the longest way through the text: a trip has the longer one of each half."""
    same = widened("LDG.E.64 R28, desc[UR6][R2.64]", "LDG.E R28, desc[UR6][R4.64]")
    (_, _, fills), _ = widening(blocks(same))
    kinds = Counter(word.base for word in fills.trip)
    assert (kinds["F2FP"], kinds["STS"], kinds["LDG"]) == (9 + 6, 2, 2)
    assert sorted(name for name in fills.mbarriers.values() if name) == sorted(
        ["left_empty", "left_full", "right_empty", "right_full"]
    )
    # Loads of registers of their own may all be of one tile.
    (_, _, fills), _ = widening(blocks(widened("LDG.E R28, desc[UR6][R2.64]", "LDG.E R29, desc[UR6][R2.64]")))
    assert sum(word.base == "LDG" for word in fills.trip) == 4
