"""Trips worked out on paper: a few lines of machine code each, on a multiprocessor of round figures."""

from __future__ import annotations

import pytest

from kvgen.cycles.core import Mbarrier, Replay, ReplayError, Role, placed, replay
from tests.cycles.programs import ROUND, program


def alone(text: str, warps: int = 1, blocks: int = 1, **values: float) -> Replay:
    """One role; all of its warps on one sub-core where there are less than four."""
    return replay([Role("all", program(text), warps)], ROUND.at(**values), blocks=blocks)


def test_stall_counts() -> None:
    # 4 + 2 + 6
    assert (
        alone("[-:-:-:4] IADD3 R0, R0, R1, RZ\n[-:-:-:2] IADD3 R2, R0, R1, RZ\n[-:-:-:6] IADD3 R3, R0, R1, RZ")
        .trip()
        .cycles
        == 12
    )


def test_a_stall_count_of_none_is_a_cycle() -> None:
    assert alone("[-:-:-:0] NOP").trip().cycles == 1


def test_a_scoreboard() -> None:
    # The load issues at 0 and answers at 20; the sum issues then and stalls 4.
    found = alone("[-:0:-:1] LDS R0, [R1]\n[0:-:-:4] FADD R2, R0, R0").trip()
    assert found.cycles == 24
    assert found.waits == {"LDS": 19}


def test_operands_that_are_still_read() -> None:
    # The store reads its registers until 5; the sum, which overwrites one, waits for that: 5 + 2.
    assert alone("[-:-:1:1] STS [R1], R0\n[1:-:-:2] FADD R0, R2, R2").trip().cycles == 7


def test_a_load_takes_what_the_device_says() -> None:
    text = "[-:3:-:1] LDG.E R0, desc[UR6][R2.64]\n[3:-:-:1] IADD3 R4, R0, R0, RZ"
    assert alone(text).trip().cycles == 101
    assert alone(text, ldg=700).trip().cycles == 701


def test_warps_fill_each_others_stalls() -> None:
    # A warp alone issues every second cycle: 4. Two fill each other's stalls: 4 each. Three need 6 slots in 4 cycles: 6.
    text = "[-:-:-:2] IADD3 R0, R0, R1, RZ\n[-:-:-:2] IADD3 R2, R0, R1, RZ"
    assert [alone(text, warps).trip().cycles for warps in (1, 2, 3)] == pytest.approx([4, 4, 6], rel=0.05)
    assert alone(text, 2).issue == pytest.approx(1, rel=0.1)


def test_a_warp_goes_on_while_it_can() -> None:
    # No stalls: two warps take every cycle of a sub-core between them, 2 a trip on average, and who issued last goes on.
    found = replay([Role("all", program("[-:-:-:1] NOP"), 2, trips=10)], ROUND).trip()
    assert found.cycles == pytest.approx(2, rel=0.1)
    # The elder gets no cycle in all that time, which nobody would see who waited for it: so trips of all warps count.
    assert not found.waits


@pytest.mark.parametrize(("left", "cycles"), [(0, 104), (1, 52), (9, 13)])
def test_groups_of_copies(left: int, cycles: float) -> None:
    # The wait of trip n leaves `left` groups open, so it waits for the group of trip n - left - 1, which was asked for a cycle
    # after that trip's wait, takes 3 more until all of its 512 bytes are on their way, and lands 100 later: (left + 1) trips take
    # 104 cycles, or 13 each, which the stalls are.
    text = f"""[-:-:-:1] DEPBAR.LE SB0, {hex(left)}
[-:-:-:1] LDGSTS.E.BYPASS.128 [R1], desc[UR6][R2.64]
[-:0:-:1] LDGDEPBAR
[-:-:-:10] IADD3 R0, R0, R1, RZ"""
    found = replay([Role("all", program(text), 1, trips=40)], ROUND).trip()
    assert found.cycles == pytest.approx(cycles)
    assert ("copies: their group" in found.waits) == (cycles > 13)


def test_groups_complete_in_order() -> None:
    # The second group is a commit of nothing: complete no earlier than the first, 103 cycles behind its copy at 1.
    text = """[-:-:-:1] DEPBAR.LE SB0, 0x0
[-:-:-:1] LDGSTS.E.BYPASS.128 [R1], desc[UR6][R2.64]
[-:0:-:1] LDGDEPBAR
[-:0:-:1] LDGDEPBAR"""
    assert alone(text).trip().cycles == 104


def test_a_named_barrier() -> None:
    # Both roles meet at barrier 1: the slow one arrives at 30, and 10 later both begin again.
    slow = Role("slow", program("[-:-:-:15] NOP\n[-:-:-:15] NOP\n[-:-:-:1] BAR.SYNC.DEFER_BLOCKING 0x1, 0x40"), 1)
    fast = Role("fast", program("[-:-:-:5] NOP\n[-:-:-:1] BAR.SYNC.DEFER_BLOCKING 0x1, 0x40"), 1)
    found = replay([slow, fast], ROUND, placement="spread")
    assert [t.cycles for t in found.trips] == [40, 40]
    assert found.trip("fast").waits == {"barrier": 34}


def test_arriving_waits_for_nobody() -> None:
    # The producer's trip is its stalls, 50 + 1; the consumer's is the producer's.
    produces = Role(
        "produces",
        program("[-:-:-:15] NOP\n[-:-:-:15] NOP\n[-:-:-:15] NOP\n[-:-:-:5] NOP\n[-:-:-:1] BAR.ARV 0x2, 0x40"),
        1,
    )
    consumes = Role("consumes", program("[-:-:-:1] BAR.SYNC 0x2, 0x40\n[-:-:-:5] NOP"), 1)
    assert [t.cycles for t in replay([produces, consumes], ROUND).trips] == [51, 51]


def test_a_barrier_of_a_team_that_a_register_numbers() -> None:
    # Two teams of two warps, each with a barrier of its own: 10 behind the last arrival, at 1.
    found = replay([Role("all", program("[-:-:-:1] NOP\n[-:-:-:1] BAR.SYNC.DEFER_BLOCKING R5, 0x40"), 4)], ROUND)
    assert found.trip().cycles == 11


def test_who_waits_for_nobody_is_named() -> None:
    with pytest.raises(ReplayError, match=r"warp 0 of role all waits at 0010 'NOP' for what no warp does"):
        alone("[-:-:-:1] BAR.SYNC.DEFER_BLOCKING 0x1, 0x40\n[-:-:-:1] NOP")


def ring(stages: int, work: int) -> Replay:
    """A producer of bulk copies and a consumer over a ring of stages."""
    load = program("""[-:-:-:1] SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4+0x10], R3
[-:-:-:1] SYNCS.ARRIVE.TRANS64 RZ, [UR4], R3
[-:-:-:1] UTMALDG.4D [UR8], [UR4], desc[UR14]""")
    rest = "\n".join(["[-:-:-:10] NOP"] * (work // 10))
    use = program(
        f"[-:-:-:1] SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3\n{rest}\n[-:-:-:1] SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x10], RZ"
    )
    last = 16 * (len(use) - 1)
    roles = [
        Role("load", load, 1, 40, {0: "empty", 16: "full", 32: "full"}, {32: 1024}),
        Role("use", use, 1, 40, {0: "full", last: "empty"}),
    ]
    return replay(
        roles, ROUND, placement="spread", mbarriers={"full": Mbarrier(1, 1024), "empty": Mbarrier(1, ahead=stages)}
    )


def test_mbarriers_fed_by_bulk_copies() -> None:
    # A stage goes round: freed by the consumer at 0; 10 later the producer's wait ends, which it follows by an arrival at 10 and
    # the copy at 11; 100 later the bytes are there, 10 more and the consumer goes on at 121; it works for `work` and arrives.
    # With one stage a trip is all of that, 121 + work; with two, half of it where that is more than the consumer's own, which
    # is 1 of the wait, 10 from the phase, which was complete before, `work`, 1 of the arrival.
    assert ring(1, 50).trip("use").cycles == pytest.approx(121 + 50)
    assert ring(2, 50).trip("use").cycles == pytest.approx((121 + 50) / 2)
    assert ring(8, 50).trip("use").cycles == pytest.approx(52)
    assert ring(1, 50).trip("use").waits["mbarrier full"] > 100


def test_a_phase_needs_its_bytes() -> None:
    # Two copies of half the bytes: complete with the second, a cycle later than with one of all bytes.
    text = """[-:-:-:1] SYNCS.ARRIVE.TRANS64 RZ, [UR4], R3
[-:-:-:1] UTMALDG.4D [UR8], [UR4], desc[UR14]
[-:-:-:1] UTMALDG.4D [UR8], [UR4], desc[UR14]
[-:-:-:1] SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3"""
    role = Role("all", program(text), 1, 8, dict.fromkeys((0, 16, 32, 48), "full"), {16: 512, 32: 512})
    # Copies at 1 and 2; the second is there at 102, and the warp goes on at 112.
    assert replay([role], ROUND, mbarriers={"full": Mbarrier(1, 1024)}).trip().cycles == 112
    # Where a box takes 40 the second begins at 41.
    assert replay([role], ROUND.at(tma_box=40), mbarriers={"full": Mbarrier(1, 1024)}).trip().cycles == 151


def test_an_mbarrier_nobody_named() -> None:
    with pytest.raises(ReplayError, match=r"0000 'SYNCS.PHASECHK.* names no mbarrier that was given"):
        alone("[-:-:-:1] SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3")


def test_products_back_to_back() -> None:
    # Four HMMAs of 8 cycles; two warps share the pipe, so that each trip takes both's.
    text = "\n".join(["[-:-:-:1] HMMA.16816.F32.BF16 R4, R8, R2, R4"] * 4)
    assert alone(text).trip().cycles == 32
    assert alone(text, 2).trip().cycles == pytest.approx(64, rel=0.05)


def test_special_functions() -> None:
    # 32 lanes at 4 a cycle.
    assert alone("\n".join(["[-:-:-:1] MUFU.EX2 R1, R1"] * 4)).trip().cycles == 32


def test_products_of_a_warpgroup() -> None:
    # The chain runs behind the issue: two of 64 columns at half a cycle a column, done at 64, and 20 more until the wait ends
    # at 84. Their operands in shared memory, 64 columns of 32 bytes, take 16 of the 32 cycles.
    text = """[-:-:-:1] HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8], R24
[-:-:-:1] HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR8], R24, gsb0
[-:-:-:1] WARPGROUP.DEPBAR.LE gsb0, 0x0"""
    found = alone(text, 4).trip()
    assert found.cycles == pytest.approx(85, abs=1)
    assert found.waits["products of the warpgroup"] == pytest.approx(82, abs=1)


def test_operands_of_products_take_shared_memory() -> None:
    # 32 columns are 16 cycles of products; A and B in shared memory are (64 + 32) x 32 bytes: 24 cycles. Ten of them: 240.
    text = "\n".join(
        ["[-:-:-:1] HGMMA.64x32x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"] * 10
        + ["[-:-:-:1] WARPGROUP.DEPBAR.LE gsb0, 0x0"]
    )
    assert alone(text, 4).trip().cycles == pytest.approx(240 + 20 + 1, rel=0.05)
    # With A in registers it is 8 cycles of shared memory: the products are the limit.
    text = text.replace("gdesc[UR8], R24", "R4, gdesc[UR8], R24")
    assert alone(text, 4).trip().cycles == pytest.approx(160 + 20 + 1, rel=0.05)


def test_shared_memory_is_everybodys() -> None:
    # LDS.128 of all lanes is 512 bytes, 4 cycles. Eight of them: 32 for a warp alone, 128 for four warps on four sub-cores.
    text = "\n".join(["[-:-:-:1] LDS.128 R4, [R1]"] * 8)
    assert alone(text).trip().cycles == pytest.approx(32)
    assert alone(text, 4).trip().cycles == pytest.approx(128, rel=0.05)


def test_the_queue_of_a_sub_core() -> None:
    # Shuffles of one sub-core are taken every 4 cycles: ten take 40.
    text = "\n".join(["[-:-:-:1] SHFL.BFLY PT, R4, R5, 0x1, 0x1f"] * 10)
    assert alone(text, mio_interval=4).trip().cycles == pytest.approx(40)


def test_what_never_runs_takes_no_pipe() -> None:
    # ptxas writes such loads before copies; each is an issue slot and nothing more.
    assert alone("\n".join(["[-:-:-:1] @!PT LDS RZ, [RZ]"] * 10), mio_interval=4).trip().cycles == 10


def test_a_branch_that_is_taken() -> None:
    # The jump back costs 8 where the stall count says 5.
    assert alone("[-:-:-:1] NOP\n[-:-:-:5] @P0 BRA `(.L_x_1)", branch=8).trip().cycles == 9


def test_where_warps_lie() -> None:
    role = Role("all", program("[-:-:-:1] NOP"), 2)
    cores = {how: [core for *_, core in placed([role], 2, how)] for how in ("spread", "aligned", "worst")}
    assert cores == {"spread": [0, 1, 2, 3], "aligned": [0, 1, 0, 1], "worst": [0, 0, 0, 0]}
    six = Role("all", role.trip, 6)
    assert [core for *_, core in placed([six], 1, "worst")] == [0, 1, 2, 3, 0, 0]


def test_a_role_that_others_leave_behind_is_named() -> None:
    """The others never end, but what one role waits for comes from nobody."""
    waits = Role("waits", program("[-:-:-:1] BAR.SYNC.DEFER_BLOCKING 0x1, 0x60"), 1)
    runs = Role("runs", program("[-:-:-:1] NOP"), 1)
    with pytest.raises(ReplayError, match=r"warp 0 of role waits waits at 0000 'BAR"):
        replay([waits, runs], ROUND)


def test_the_mean_of_several_beginnings() -> None:
    """A replay in step with itself is one of several; the mean moves little where an instruction takes a cycle more."""
    text = program("[-:0:-:1] LDS R0, [R1]\n[0:-:-:4] FADD R2, R0, R0\n" + "[-:-:-:2] FADD R2, R2, R2\n" * 20)
    role = Role("all", text, 3)
    runs = [replay([role], ROUND, skews=(skew,)).trip() for skew in (0, 31)]
    both = replay([role], ROUND, skews=(0, 31)).trip()
    assert both.cycles == pytest.approx(sum(run.cycles for run in runs) / 2)
    assert sum(both.waits.values()) == pytest.approx(sum(sum(run.waits.values()) for run in runs) / 2)
    assert both.cycles >= 3 * len(text)  # three warps share the slots of a sub-core


def test_a_starved_block_waits_for_nobody_else() -> None:
    # Of blocks that could issue at every cycle the youngest do; an elder one's warps wait for each other, and none goes on.
    text = "[-:-:-:1] BAR.SYNC.DEFER_BLOCKING 0x0\n" + "[-:-:-:1] NOP\n" * 60
    found = alone(text, warps=8, blocks=8)
    assert found.issue > 0.9
    # A sub-core's 16 warps share its cycles.
    assert found.trip().cycles == pytest.approx(16 * 61, rel=0.3)
