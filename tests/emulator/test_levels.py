"""Levels: what the PTX ISA does not promise and hardware does is found by "check" and not by "hardware"; the true bug next
to it is found by both."""

from __future__ import annotations

import numpy as np
import pytest

from kvgen.emulator import KernelFault, Library
from tests.emulator.conftest import Build
from tests.emulator.programs import HEADER, aligned, entry, run
from tests.support.each_case import each_case

SETUP = """
  .shared .align 1024 .b32 s[512]; .shared .align 8 .b64 bar;
  ld.param.u64 %rd1, [p1]; mov.u32 %r40, %tid.x; shl.b32 %r41, %r40, 2; cvt.u64.u32 %rd2, %r41; add.u64 %rd2, %rd2, %rd0;
  mov.u32 %r42, s; add.u32 %r43, %r42, %r41; xor.b32 %r44, %r43, 4; mov.u32 %r45, bar; cvt.u64.u32 %rd3, %r41;
  add.u64 %rd3, %rd3, %rd1; mov.u32 %r1, 0; setp.eq.u32 %p1, %r40, 0; setp.eq.u32 %p2, %r40, 32; setp.lt.u32 %p3, %r40, 32;
"""
OUT = "st.global.u32 [%rd2], %r1;"
WRITE = "st.shared.u32 [%r43], %r40;"
MMA = "mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%r20, %r21}, {%r22, %r23}, {%r24}, {%r20, %r21};"
INIT = "@%p1 mbarrier.init.shared::cta.b64 [%r45], {0};"
WAIT = "W{0}: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r45], 0; @!%p4 bra W{0};"
LOAD = """@!%p1 bra L; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r45], 512;
  cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r42], [%rd1], 512, [%r45]; L:""" + WAIT.format(1)
STORE = "cp.async.bulk.global.shared::cta.bulk_group [%rd0+512], [%r42], 512; cp.async.bulk.commit_group;"
PROXY = "fence.proxy.async;"
COPY = """cp.async.ca.shared.global [%r43], [%rd3], 4; cp.async.ca.shared.global [%r43+512], [%rd3], 4;
  cp.async.ca.shared.global [%r43+1024], [%rd3], 4; cp.async.wait_all;"""
WGMMA = """shr.u32 %r2, %r42, 4; cvt.u64.u32 %rd4, %r2; or.b64 %rd4, %rd4, 0x1000080000; mov.b64 %rd5, %rd4;
  mov.f32 %f1, 0f00000000; mov.f32 %f2, %f1; mov.f32 %f3, %f1; mov.f32 %f4, %f1; wgmma.fence.sync.aligned;
  wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%f1, %f2, %f3, %f4}, {%r22, %r22, %r22, %r22}, %rd5, 1, 1, 1;
  wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; mov.b32 %r1, %f1;"""
# name: (code, what check finds, what hardware finds)
CASES: dict[str, tuple[str, str | None, str | None]] = {
    # ---- .sync.aligned as memory order within a warp
    "mma_orders": (f"{WRITE} bar.sync 0; {WRITE} {MMA} ld.shared.u32 %r1, [%r44];", "race", None),
    "mma_orders_for_others": (
        f"{INIT.format(1)} bar.sync 0; @!%p3 bra B; {WRITE} {MMA} @%p1 mbarrier.arrive.shared::cta.b64 _, [%r45]; bra END;"
        f"B: @!%p2 bra END; {WAIT.format(0)} ld.shared.u32 %r1, [s+8]; END:", "race", None),
    "barrier_arrival_orders": (
        f"{WRITE} bar.arrive 3, 32; ld.shared.u32 %r1, [%r44]; bar.sync 1, 128;", "race", None),
    "nothing_orders": (f"{WRITE} bar.sync 0; {MMA} {WRITE} ld.shared.u32 %r1, [%r44]; {MMA}", "race", "race"),
    "shuffle_orders_nothing": (
        f"{WRITE} shfl.sync.bfly.b32 %r2, %r40, 1, 31, -1; ld.shared.u32 %r1, [%r44];", "race", "race"),
    "mma_of_one_warp": (
        f"{WRITE} {MMA} xor.b32 %r2, %r43, 128; ld.shared.u32 %r1, [%r2];", "race uninitialised", "race uninitialised"),
    # ---- a bulk store not waited for before the exit
    "store_and_exit": (f"{WRITE} {PROXY} bar.sync 0; @%p1 {STORE.replace('; cp', '; @%p1 cp')}", "in_flight", None),
    "store_and_overwrite": (
        f"{WRITE} {PROXY} bar.sync 0; @%p1 {STORE.replace('; cp', '; @%p1 cp')} bar.sync 0; {WRITE}", "in_flight", "in_flight"),
    # ---- mbarrier.init, a barrier, a copy
    "init_and_barrier": (f"{INIT.format(1)} bar.sync 0; {LOAD} ld.shared.u32 %r1, [%r43];", "proxy_fence", None),
    "init_without_barrier": (
        f"{INIT.format(1)} {LOAD.replace(WAIT.format(1), '')} bar.sync 0; {WAIT.format(2)} ld.shared.u32 %r1, [%r43];",
        "proxy_fence", "proxy_fence"),
    # ---- cp.async, then wgmma
    "copied_for_wgmma": (f"{COPY} bar.sync 0; {WGMMA}", "proxy_fence", None),
    "written_for_wgmma": (
        f"st.shared.u32 [%r43], 0; st.shared.u32 [%r43+512], 0; st.shared.u32 [%r43+1024], 0; bar.sync 0; {WGMMA}",
        "proxy_fence", "proxy_fence"),
    "copied_for_a_store": (
        f"{COPY} bar.sync 0; @%p1 {STORE.replace('; cp', '; @%p1 cp')} @%p1 cp.async.bulk.wait_group 0;",
        "proxy_fence", "proxy_fence"),
    "copied_without_barrier": (f"{COPY} {WGMMA}", "proxy_fence race in_flight", "race in_flight"),
    # ---- padding
    "unwritten_unused": ("ld.shared.v2.u32 {%r2, %r3}, [s+2040]; mov.u32 %r1, 5;", "uninitialised", None),
    "unwritten_half": (
        "@%p1 st.shared.u32 [s], 6; bar.warp.sync -1; @%p1 ld.shared.v2.u32 {%r1, %r3}, [s];", "uninitialised", None),
    "unwritten_used": ("@%p1 ld.shared.u32 %r1, [s+2040];", "uninitialised", "uninitialised"),
    "unwritten_decides": (
        "ld.shared.u32 %r2, [s+2040]; setp.eq.u32 %p4, %r2, 0; @%p4 bra END; mov.u32 %r3, 1; END:",
        "uninitialised", "uninitialised"),
    "unwritten_address": (
        "ld.shared.u32 %r2, [s+2040]; and.b32 %r2, %r2, 4; add.u32 %r2, %r2, %r42; @%p1 st.shared.v2.u32 [s], {5, 6};"
        "bar.sync 0; ld.shared.u32 %r1, [%r2];", "uninitialised", "uninitialised"),
    "unwritten_rows": (
        f"{WRITE} bar.sync 0; and.b32 %r2, %r40, 7; shl.b32 %r2, %r2, 4; add.u32 %r2, %r2, %r42;"
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r3}, [%r2+1024];", "uninitialised", None),
    "unwritten_matrix_used": (
        f"{WRITE} bar.sync 0; and.b32 %r2, %r40, 7; shl.b32 %r2, %r2, 4; add.u32 %r2, %r2, %r42;"
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r2+1024];", "uninitialised", "uninitialised"),
    "unwritten_column_of_wgmma": (  # of B; only the even columns of the product are used
        "and.b32 %r2, %r40, 31; setp.lt.u32 %p5, %r2, 28; @%p5 st.shared.u32 [%r43], 0; fence.proxy.async; bar.sync 0;"
        f"{WGMMA}", "uninitialised", None),
    "unwritten_column_used": (
        "and.b32 %r2, %r40, 31; setp.lt.u32 %p5, %r2, 28; @%p5 st.shared.u32 [%r43], 0; fence.proxy.async; bar.sync 0;"
        f"{WGMMA} mov.b32 %r1, %f2;", "uninitialised", "uninitialised"),
    "unwritten_stored": (
        f"@%p1 {STORE.replace('; cp', '; @%p1 cp')} @%p1 cp.async.bulk.wait_group 0;", "uninitialised", "uninitialised"),
    "raced_read_unused": (
        "@%p1 st.shared.u32 [s+512], 3; @%p2 ld.shared.u32 %r2, [s+512];", "race uninitialised", None),
    "raced_read_used": (
        "@%p1 st.shared.u32 [s+512], 3; bar.sync 0; @%p1 st.shared.u32 [s+512], 3; @%p2 ld.shared.u32 %r1, [s+512];",
        "race", "race"),
    "raced_write_unused": ("mov.u32 %r1, 4; st.shared.u32 [s+512], %r40;", "race", None),
    "raced_write_used": ("st.shared.u32 [s+512], %r40; bar.sync 0; ld.shared.u32 %r1, [s+512];", "race", "race"),
    "raced_then_written": (
        "st.shared.u32 [s+512], %r40; bar.sync 0; @%p1 st.shared.u32 [s+512], 9; bar.sync 0; ld.shared.u32 %r1, [s+512];",
        "race", None),
    "raced_global": ("st.global.u32 [%rd0], %r40;", "race", "race"),
}  # fmt: skip
# Launches that are suspected, and so run again over the memory that they began with.
REPEATED = {
    "counted": "ld.shared.u32 %r2, [s+2040]; ld.global.u32 %r1, [%rd2]; add.u32 %r1, %r1, 1;",
    # The unwritten word, all ones at first, says which page of `out` is written.
    "elsewhere": (
        "ld.shared.u32 %r2, [s+2040]; and.b32 %r2, %r2, 4096; cvt.u64.u32 %rd3, %r2; add.u64 %rd2, %rd2, %rd3; mov.u32 %r1, 7;"
    ),
}  # fmt: skip
SCHEDULES = ["ascending", "descending", 3]


@pytest.fixture(scope="module")
def text() -> str:
    codes = {name: code for name, (code, _, _) in CASES.items()} | REPEATED
    return HEADER + "".join(
        entry(name, SETUP + code + OUT, ".param .u64 p0, .param .u64 p1") for name, code in codes.items()
    )


@pytest.fixture(scope="module")
def libraries(build: Build, text: str) -> dict[str, Library]:
    return {mode: build([text], mode=mode) for mode in ("check", "hardware")}


def launch(library: Library, name: str, schedule: str | int) -> tuple[KernelFault | None, np.ndarray]:
    out, data = aligned(1024).view(np.uint32), aligned(512).view(np.uint32)
    data[:] = 500 + np.arange(128)
    try:
        run(library, name, out, data, read_only=(1,), schedule=schedule)
    except KernelFault as fault:
        return fault, out
    return None, out


@each_case("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CASES)
def test_level(name: str, schedule: str | int, libraries: dict[str, Library]) -> None:
    _, strict, loose = CASES[name]
    for mode, expected in (("check", strict), ("hardware", loose)):
        fault, _ = launch(libraries[mode], name, schedule)
        if expected is None:
            assert fault is None, f"{mode}: {fault}"
            continue
        assert fault is not None, mode
        assert fault.kind in expected.split(), f"{mode}: {fault}"
        assert f"level {fault.level})" in str(fault)
        if mode == "hardware":
            assert fault.level == "hardware"
        elif loose is None and not name.startswith(("unwritten", "raced")):  # padding is of both levels
            assert fault.level == "check", str(fault)


def test_a_race_across_warps_is_of_both_levels(libraries: dict[str, Library]) -> None:
    for name in ("raced_global", "raced_read_used", "written_for_wgmma", "init_without_barrier"):
        fault, _ = launch(libraries["check"], name, "ascending")
        assert fault is not None and fault.level == "hardware", str(fault)


@pytest.mark.parametrize("name", REPEATED)
def test_memory_is_left_as_the_first_launch_leaves_it(name: str, libraries: dict[str, Library]) -> None:
    """In the middle of other arrays, which share its first and last page with it."""
    around, data = aligned(16384).view(np.uint32), aligned(512).view(np.uint32)
    around[:] = wanted = np.arange(len(around), dtype=np.uint32)
    out = around[5:3000]
    try:
        run(libraries["hardware"], name, out, data, read_only=(1,))
        fault = None
    except KernelFault as found:
        fault = found
    if name == "counted":
        assert fault is None
        wanted[5 : 5 + 128] += 1
    else:
        assert fault is not None and "byte 0 of 'arg0' is 0x07 and no longer 0x05" in fault.detail, fault
        wanted[5 + 1024 : 5 + 1024 + 128] = 7
    np.testing.assert_array_equal(around, wanted)
