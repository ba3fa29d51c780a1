"""Barriers at which one warp arrives and waits: phases counted in threads, lanes of an aligned instruction together."""

from __future__ import annotations

import numpy as np
import pytest

from kvgen.emulator import KernelFault, Library
from tests.emulator.conftest import Build
from tests.emulator.programs import HEADER, entry, run
from tests.support.each_case import each_case

SCHEDULES = ["ascending", "descending", 3]
SETUP = """
  .shared .align 4 .b32 s[64];
  mov.u32 %r40, %tid.x; and.b32 %r41, %r40, 31; shr.u32 %r42, %r40, 5; mov.u32 %r43, s; shl.b32 %r44, %r40, 2;
  cvt.u64.u32 %rd1, %r44; add.u64 %rd1, %rd0, %rd1; add.u32 %r45, %r43, %r44; xor.b32 %r46, %r45, 128;
  setp.eq.u32 %p1, %r42, 0; setp.eq.u32 %p2, %r42, 1; mov.u32 %r1, 0; setp.gt.u32 %p0, %r42, 1;
"""


def turns(start: str, give_back: str) -> str:
    """Two warps take turns at s[0], each with a barrier that both count for; `start` gives the first warp its turn."""
    return f"""
  mov.u32 %r2, 0; @%p2 bra SECOND;
  {start}
  st.shared.u32 [s], 0; bar.warp.sync -1;
FIRST:
  bar.sync 1, 64;
  setp.ne.u32 %p3, %r41, 0; @%p3 bra FIRST_DONE; ld.shared.u32 %r1, [s]; add.u32 %r1, %r1, 1; st.shared.u32 [s], %r1;
FIRST_DONE:
  bar.arrive 2, 64; add.u32 %r2, %r2, 1; setp.lt.u32 %p3, %r2, 3; @%p3 bra FIRST; bra END;
SECOND:
  bar.sync 2, 64;
  setp.ne.u32 %p3, %r41, 0; @%p3 bra SECOND_DONE; ld.shared.u32 %r1, [s]; mul.lo.u32 %r1, %r1, 10; st.shared.u32 [s], %r1;
SECOND_DONE:
  {give_back} add.u32 %r2, %r2, 1; setp.lt.u32 %p3, %r2, 3; @%p3 bra SECOND;
END: st.global.u32 [%rd1], %r1;"""


# name: (code, what the first lanes of both warps find, or the fault); 64 threads unless it says so
CASES: dict[str, tuple[str, list[int] | str]] = {
    "arrives_then_waits": ("bar.arrive 1, 64; bar.sync 1, 64; mov.u32 %r1, 7; st.global.u32 [%rd1], %r1;", [7, 7]),
    "each_thread_for_itself": (
        "barrier.arrive 1, 64; barrier.sync 1, 64; mov.u32 %r1, 7; st.global.u32 [%rd1], %r1;", [7, 7]),
    "turns": (turns("bar.arrive 1, 64;", "bar.arrive 1, 64;"), [111, 1110]),
    "nobody_starts": (turns("", "bar.arrive 1, 64;"), "deadlock"),
    "turn_not_given_back": (turns("bar.arrive 1, 64;", ""), "deadlock"),
    # A write between the two arrivals of a warp is released by the second of them only.
    "released_by_the_second": (
        "mov.u32 %r1, 0; @%p2 bra B; bar.arrive 1, 96; st.shared.u32 [%r45], 5; bar.sync 1, 96; bra END;"
        "B: bar.sync 1, 96; ld.shared.u32 %r1, [%r46]; END: st.global.u32 [%rd1], %r1;", [0, 5]),
    "not_released_by_the_first": (
        "@%p1 st.shared.u32 [%r45], 4; bar.sync 3, 64; mov.u32 %r1, 0; @%p2 bra B; bar.arrive 1, 64; st.shared.u32 [%r45], 5;"
        "bra END; B: bar.sync 1, 64; ld.shared.u32 %r1, [%r46]; END: st.global.u32 [%rd1], %r1;", "race"),
    "some_lanes_arrive": ("setp.lt.u32 %p3, %r41, 16; @%p3 bar.arrive 1, 64;", "divergent_barrier"),
    "lanes_arrive_at_two": (
        "setp.lt.u32 %p3, %r41, 16; @%p3 bra A; bar.arrive 1, 64; bra END; A: bar.arrive 2, 64; END:", "divergent_barrier"),
    "counts_differ": ("@%p1 bar.arrive 1, 64; @%p2 bar.arrive 1, 96;", "bad_barrier"),
}  # fmt: skip
# Three warps: the second and third may end their phase before a lane of the first has read the result of its own.
REDUCTIONS = """
  setp.lt.u32 %p3, %r40, 3; mov.u32 %r2, 0; mov.u32 %r1, 0; setp.eq.u32 %p4, %r42, 2; @%p4 bra LAST;
  bar.red.popc.u32 %r1, 1, 64, %p3; @%p1 bra END; bar.arrive 2, 64; bra NEXT;
LAST: bar.sync 2, 64;
NEXT: setp.eq.u32 %p5, %r40, 40; bar.red.popc.u32 %r2, 1, 64, %p5;
END: mad.lo.u32 %r1, %r2, 100, %r1; st.global.u32 [%rd1], %r1;"""


@pytest.fixture(scope="module")
def library(build: Build) -> Library:
    codes = {name: "@%p0 ret; " + code for name, (code, _) in CASES.items()} | {"reductions": REDUCTIONS}
    return build([HEADER + "".join(entry(name, SETUP + code) for name, code in codes.items())])


@each_case("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CASES)
def test_arrive_and_wait(name: str, schedule: str | int, library: Library) -> None:
    expected = CASES[name][1]
    out = np.zeros(64, np.uint32)
    if isinstance(expected, str):
        with pytest.raises(KernelFault) as caught:
            run(library, name, out, block=96, schedule=schedule)
        assert caught.value.kind == expected, str(caught.value)
        return
    run(library, name, out, block=96, schedule=schedule)
    assert [int(out[0]), int(out[32])] == expected


@each_case("schedule", SCHEDULES)
def test_a_result_is_that_of_its_phase(schedule: str | int, library: Library) -> None:
    out = np.zeros(96, np.uint32)
    run(library, "reductions", out, block=96, schedule=schedule)
    assert out.tolist() == [3] * 32 + [103] * 32 + [100] * 32
