"""Facts of machine code: what is counted, and what is not."""

from __future__ import annotations

import pytest

from kvgen.cycles.device import DEVICES
from kvgen.cycles.facts import Facts, awaited_loads, dependent_loads, facts_of, serialised
from kvgen.cycles.kernel import Kernel, blocks_per_multiprocessor, least_in_flight
from tests.cycles.programs import program

LOAD = "[-:5:-:1] LDG.E R4, desc[UR6][R2.64]"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (f"{LOAD}\n[5:-:-:1] IADD3 R5, R4, R4, RZ", 1),
        (f"{LOAD}\n{LOAD}\n[5:-:-:1] IADD3 R5, R4, R4, RZ\n[5:-:-:1] NOP", 2),
        (f"[5:-:-:1] IADD3 R5, R4, R4, RZ\n{LOAD}", 0),  # the next trip waits
        (f"{LOAD}\n[4:-:-:1] NOP", 0),
        # Who else has the scoreboard is waited for as well.
        (f"{LOAD}\n[-:5:-:1] LDS R8, [R9]\n[5:-:-:1] IADD3 R5, R8, R8, RZ", 1),
        ("[-:5:-:1] @!PT LDG.E R4, desc[UR6][R2.64]\n[5:-:-:1] NOP", 0),
    ],
)
def test_loads_that_their_trip_waits_for(text: str, count: int) -> None:
    assert awaited_loads(program(text)) == count


FIRST = "[-:-:-:1] HGMMA.64x32x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0"
SECOND = "[-:-:-:1] HGMMA.64x32x16.F32.BF16 R24, R8, gdesc[UR8], R24, gsb0"
WAIT = "[-:-:-:1] WARPGROUP.DEPBAR.LE gsb0, 0x0"


@pytest.mark.parametrize(
    ("lines", "count"),
    [
        ((FIRST, SECOND, WAIT), 0),
        ((FIRST, WAIT, SECOND), 1),
        ((FIRST, WAIT, "[-:-:-:1] FMUL R30, R30, R1", SECOND), 0),  # somebody rescales the sums: R24 to R39
        ((FIRST, WAIT, "[-:-:-:1] FMUL R40, R40, R1", SECOND), 1),
        ((FIRST, WAIT, "[-:-:-:1] FADD R50, R39, R51", SECOND), 0),
        ((FIRST, WAIT, SECOND.replace("R24,", "R60,", 1).replace(", R24, gsb0", ", RZ, !UPT, gsb0")), 0),
    ],
)
def test_products_one_after_the_other(lines: tuple[str, ...], count: int) -> None:
    assert serialised(program("\n".join(lines))) == count


COPY = "[-:-:-:1] LDGSTS.E.128 [R{}], desc[UR6][R2.64]"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("[-:-:-:1] LDGSTS.E.128 [R1], desc[UR6][R2.64]", 0),
        (f"{LOAD}\n[-:-:-:1] LDGSTS.E.128 [R1], desc[UR6][R4.64]", 1),
        (f"{LOAD}\n[-:-:-:1] IMAD.WIDE R6, R4, 0x4, R8\n[-:-:-:1] LDG.E R9, desc[UR6][R6.64]\n{COPY.format(9)}", 2),
        # Two that do not need each other are one.
        (f"{LOAD}\n[-:-:-:1] LDG.E R5, desc[UR6][R2.64]\n[-:-:-:1] LDGSTS.E.128 [R5], desc[UR6][R4.64]", 1),
        # A branch on what was loaded.
        (f"{LOAD}\n[-:-:-:1] ISETP.NE.AND P0, PT, R4, RZ, PT\n[-:-:-:1] @P0 BRA `(.L_x_1)\n{LOAD}\n{COPY.format(4)}", 2),
        # Through shared memory.
        (f"{LOAD}\n[-:-:-:1] STS [R1], R4\n[-:-:-:1] LDS R5, [R1]\n[-:-:-:1] LDGSTS.E.128 [R1], desc[UR6][R5.64]", 1),
        # What comes behind the first copy does not count.
        (f"[-:-:-:1] LDGSTS.E.128 [R1], desc[UR6][R2.64]\n{LOAD}", 0),
        # Overwritten by what was not loaded, unless that has a guard.
        (f"{LOAD}\n[-:-:-:1] MOV R4, R9\n[-:-:-:1] LDGSTS.E.128 [R1], desc[UR6][R4.64]", 0),
        (f"{LOAD}\n[-:-:-:1] @P0 MOV R4, R9\n[-:-:-:1] LDGSTS.E.128 [R1], desc[UR6][R4.64]", 1),
    ],
)  # fmt: skip
def test_loads_ahead_of_the_first_copy(text: str, count: int) -> None:
    assert dependent_loads(program(text)) == count


LISTING = """
        /*0010*/                   LDG.E R4, desc[UR6][R2.64] ;
.L_x_0:
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ;
        /*0030*/                   MEMBAR.ALL.CTA ;
        /*0040*/                   STL [R1], R4 ;
        /*0050*/               @P3 BRA `(.L_x_0) ;
        /*0060*/                   MEMBAR.SC.GPU ;
        /*0070*/                   EXIT ;
"""


def test_a_kernel() -> None:
    found = facts_of(LISTING, "take_registers<192>();", "wgmma.mma_async instructions are serialized due to ...")
    assert found == Facts(
        awaited_loads=0, serialised_products=1, setmaxnreg_dropped=1, local_accesses=1, loop_fences=1, dependent_loads=1
    )
    kept = facts_of(LISTING.replace("MEMBAR.SC.GPU", "USETMAXREG.DEALLOC.CTAPOOL 0x28"), "release_registers<40>();")
    defined = facts_of(LISTING, 'void take_registers() { asm("setmaxnreg.inc.sync.aligned.u32 %0;"); }')
    assert not defined.setmaxnreg_dropped
    assert kept.setmaxnreg_dropped == kept.serialised_products == 0
    kernel = Kernel("x", "sm_90a", LISTING, threads=64, registers=100, shared=0)
    assert kernel.facts.local_accesses == 1 and len(kernel.trip) == 4
    assert Kernel("x", "sm_90a", LISTING.replace("MEMBAR.ALL.CTA", "SYNCS.ARRIVE.TRANS64 RZ"), 64, 100, 0).roles == (
        (),
        {},
    )


def test_warpgroups_that_meet_at_named_barriers_alone() -> None:
    """All of them run one loop, and products are counted once a warpgroup."""
    text = LISTING.replace("HMMA.16816.F32.BF16 R4, R8, R2, R4", "HGMMA.64x16x16.F32 R8, R4, gdesc[UR4], R8, gsb0")
    kernel = Kernel("x", "sm_90a", text, threads=256, registers=100, shared=100_000)
    (role,), mbarriers = kernel.roles
    device = DEVICES["H200"]
    assert role.warps == 8 and not mbarriers and kernel.blocks == 2
    assert kernel.product_cycles(device) == 2 * 2 * 16 * device.hgmma_rate.value


@pytest.mark.parametrize(("left", "least"), [(2, 2 * 512), (0, 0)])
def test_the_poorest_point_of_a_trip(left: int, least: int) -> None:
    """Behind the wait, before the next copy: what the wait leaves."""
    text = f"""[-:-:-:1] DEPBAR.LE SB0, {hex(left)}
[-:-:-:1] @!PT LDGSTS.E.128 [R1], desc[UR6][R2.64]
[-:-:-:1] LDGSTS.E.BYPASS.128 [R1], desc[UR6][R2.64]
[-:0:-:1] LDGDEPBAR"""
    assert least_in_flight(program(text)) == least


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "blocks"),
    [(156, 106496, 64, 2), (255, 0, 256, 1), (128, 0, 128, 4), (32, 0, 1024, 2), (33, 0, 1024, 1)],
)
def test_blocks_of_a_multiprocessor(registers: int, shared: int, threads: int, blocks: int) -> None:
    assert blocks_per_multiprocessor("sm_90a", registers, shared, threads) == blocks
