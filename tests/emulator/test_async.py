"""mbarriers, cp.async with mbarriers and bulk copies: each misuse is caught, its correct twin is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvgen.emulator import KernelFault, Library
from tests.emulator.conftest import Build
from tests.emulator.programs import HEADER as PTX_HEADER
from tests.emulator.programs import aligned, entry, nvrtc_ptx, run
from tests.support.each_case import each_case

HEADER = (Path(__file__).parent / "cuda" / "async.cuh").read_text()
SCHEDULES = ["ascending", "descending", 1, 2]
EARLY = "in_flight race uninitialised"  # bytes read before their wait: the kind says how far the copy was

# name: (code, the kinds of fault that may say so). `one` is an mbarrier for 1 arrival, `all` for 128; `s` holds 128 ints.
CASES = {
    "load": ("if (!t) { expect(one, 512); load(s, in, 512, one); } wait(one, 0); v = s[t ^ 5];", ""),
    "load_before_expect": ("if (!t) { load(s, in, 512, one); expect(one, 512); } wait(one, 0); v = s[t ^ 5];", ""),
    "load_in_parts": (
        "if (!t) { expect_more(one, 384); for (int i = 0; i < 4; i++) load(s + 32 * i, in + 32 * i, 128, one);"
        " expect(one, 128); } wait(one, 0); v = s[t ^ 5];", ""),
    "load_polled": (
        "if (!t) { expect(one, 512); load(s, in, 512, one); } while (!test_wait(one, 0)); v = s[t ^ 5];", ""),
    "load_without_wait": (
        "if (!t) { expect(one, 512); load(s, in, 512, one); } __syncthreads(); v = s[t];", EARLY),
    "load_wrong_parity": ("if (!t) { expect(one, 512); load(s, in, 512, one); } __syncthreads(); wait(one, 1); v = s[t];", EARLY),
    "load_seen_by_one": (
        "if (!t) { expect(one, 512); load(s, in, 512, one); wait(one, 0); } else if (t > 31) v = s[t];", EARLY),
    "load_passed_on": (
        "if (!t) { expect(one, 512); load(s, in, 512, one); wait(one, 0); } __syncthreads(); v = s[t];", ""),
    "load_passed_on_by_mbarrier": (
        "if (!t) { expect(one, 512); load(s, in, 512, one); wait(one, 0); }"
        " arrive(all); wait(all, 0); v = s[t];", ""),
    "write_under_way": (
        "if (!t) { expect(one, 512); load(s, in, 512, one); } __syncthreads(); if (t == 40) s[3] = 1; wait(one, 0);",
        "in_flight race"),
    "load_without_expect": ("if (!t) { load(s, in, 512, one); arrive(one); } __syncthreads(); wait(one, 0); v = s[t];",
                            EARLY + " deadlock"),
    "load_expects_more": ("if (!t) { expect(one, 528); load(s, in, 512, one); } wait(one, 0);", "deadlock"),
    "load_expects_less": ("if (!t) { expect(one, 256); load(s, in, 512, one); } wait(one, 0);", "deadlock"),
    "load_left_behind": ("if (!t) { expect(one, 512); load(s, in, 512, one); }", "in_flight"),
    "expect_left_behind": ("if (!t) { expect_more(one, 16); }", "in_flight"),
    "load_over_readers": (
        "if (!t) { s[1] = 0; fence_shared(); } __syncthreads(); if (t == 64) v = s[1];"
        " if (!t) { expect(one, 512); load(s, in, 512, one); } wait(one, 0);", "race in_flight"),
    "load_after_readers": (
        "if (!t) { s[1] = 0; fence_shared(); } __syncthreads(); if (t == 64) v = s[1]; arrive(all);"
        " if (!t) { wait(all, 0); expect(one, 512); load(s, in, 512, one); } wait(one, 0);", ""),
    "load_twice": (
        "if (!t) { expect(one, 1024); load(s, in, 512, one); load(s, in, 512, one); } wait(one, 0);", "in_flight race"),
    "load_past_source": ("if (!t) { expect(one, 512); load(s, in + 4, 512, one); } wait(one, 0);",
                         "global_out_of_bounds"),
    "load_past_target": ("if (!t) { expect(one, 512); load(s + 4, in, 512, one); } wait(one, 0);",
                         "shared_out_of_bounds"),
    "load_odd_size": ("if (!t) { expect(one, 8); load(s, in, 8, one); } wait(one, 0);", "bad_copy"),
    "load_odd_source": ("if (!t) { expect(one, 16); load(s, in + 1, 16, one); } wait(one, 0);", "misaligned"),
    "load_odd_target": ("if (!t) { expect(one, 16); load(s + 2, in, 16, one); } wait(one, 0);", "misaligned"),
    "load_on_no_mbarrier": ("if (!t) load(s, in, 16, (u64*)(r + 4));", "bad_mbarrier"),
    "load_over_mbarrier": ("if (!t) { expect(one, 16); load(bars, in, 16, one); }", "bad_mbarrier"),
    "many_mbarriers": (
        "__shared__ u64 more[62]; __shared__ __align__(16) int lots[62][4]; if (t < 62) { init(more + t, 1); fence_init();"
        " expect(more + t, 16); load(lots[t], in + 4 * (t & 31), 16, more + t); } __syncthreads();"
        " for (int i = 0; i < 62; i++) { wait(more + i, 0); v += lots[i][t & 3]; }", ""),
    # ---- counting
    "all_arrive": ("s[t] = t; arrive(all); wait(all, 0); v = s[t ^ 32];", ""),
    "two_phases": ("s[t] = t; arrive(all); wait(all, 0); v = s[t ^ 32]; arrive(all); wait(all, 1); s[t ^ 64] = 1;", ""),
    "one_phase_for_two": ("s[t] = t; arrive(all); wait(all, 0); v = s[t ^ 32]; s[t ^ 64] = 1;", "race"),
    "arrive_then_write": ("arrive(all); s[t] = t; wait(all, 0); v = s[t ^ 32];", "race uninitialised"),
    "arrive_relaxed": ("s[t] = t; arrive_relaxed(all); wait(all, 0); v = s[t ^ 32];", "race"),
    "fence_and_arrive_relaxed": ("s[t] = t; fence_threads(); arrive_relaxed(all); wait(all, 0); v = s[t ^ 32];", ""),
    "wait_relaxed": ("s[t] = t; arrive(all); while (!wait_relaxed(all, 0)); v = s[t ^ 32];", "race"),
    "wait_relaxed_and_fence": (
        "s[t] = t; arrive(all); while (!wait_relaxed(all, 0)); fence_threads(); v = s[t ^ 32];", ""),
    "one_missing": ("if (t) arrive(all); wait(all, 0);", "deadlock"),
    "one_missing_polled": ("if (t) arrive(all); while (!test_wait(all, 0));", "deadlock"),
    "too_many_at_once": ("if (!t) arrive(all, 129);", "bad_mbarrier"),
    "arrive_for_several": ("if (!t) arrive(all, 100); else if (t < 29) arrive(all); wait(all, 0);", ""),
    "arrive_for_none": ("if (!t) arrive(all, 0);", "bad_mbarrier"),
    "dropped": (
        "if (t < 32) drop(all); else { arrive(all); wait(all, 0); arrive(all); wait(all, 1); v = 7; }", ""),
    "state": ("u64 x = arrive_state(all); while (!test_state(all, x)); v = 9;", ""),
    "state_of_this_phase": (
        "u64 x = arrive_state(all); while (!test_state(all, x)); x = arrive_state(all); v = test_state(all, x + 0);"
        " wait(all, 1);", ""),
    "pending": ("if (!t) { u64 x = arrive_inside(all, 5); v = pending(x); x = arrive_inside(all, 3); v = 1000 * v"
                " + pending(x); } __syncthreads();", ""),
    "inside_completes": ("if (!t) arrive_inside(one, 1);", "bad_mbarrier"),
    "bytes_by_hand": ("if (!t) { expect(one, 40); complete(one, 30); complete(one, 10); } wait(one, 0);", ""),
    "bytes_by_hand_missing": ("if (!t) { expect(one, 40); complete(one, 30); } wait(one, 0);", "deadlock"),
    "too_many_bytes": ("if (!t) expect(one, 1 << 20);", "bad_mbarrier"),
    "wait_for_third_parity": ("if (!t) wait(one, 2);", "bad_mbarrier"),
    # ---- the object
    "not_initialised": ("if (!t) arrive(bars + 2);", "bad_mbarrier"),
    "wait_on_not_initialised": ("if (!t) wait(bars + 2, 0);", "bad_mbarrier"),
    "initialised_twice": ("if (!t) init(one, 1);", "bad_mbarrier"),
    "initialised_afresh": ("if (!t) { arrive(one); invalidate(one); init(one, 2); arrive(one, 2); wait(one, 0); }", ""),
    "count_none": ("if (!t) init(bars + 2, 0);", "bad_mbarrier"),
    "count_too_great": ("if (!t) init(bars + 2, 1 << 20);", "bad_mbarrier"),
    "misaligned": ("if (!t) init((u64*)((char*)bars + 20), 1);", "misaligned"),
    "init_unordered": ("if (t == 40) init(bars + 2, 1); __syncwarp(); if (t == 64) arrive(bars + 2);",
                       "race bad_mbarrier"),
    "init_ordered": ("if (t == 40) init(bars + 2, 1); __syncthreads(); if (t == 64) arrive(bars + 2);", ""),
    "plain_read": ("if (!t) v = (int)*(volatile u64*)one;", "bad_mbarrier"),
    "plain_write": ("if (!t) ((volatile int*)one)[1] = 0;", "bad_mbarrier"),
    "memory_reused": ("if (!t) { invalidate(one); *(volatile u64*)one = 3; v = (int)*(volatile u64*)one; }", ""),
    # ---- cp.async and mbarriers
    "copies": ("copy4(s + t, in + t); copies_arrive(all); wait(all, 0); v = s[t ^ 37];", ""),
    "copies_extra": ("copy4(s + t, in + t); copies_arrive_extra(all); arrive(all); wait(all, 0); v = s[t ^ 37];", ""),
    "copies_extra_alone": ("copy4(s + t, in + t); copies_arrive_extra(all); wait(all, 0); v = s[t ^ 37];", "deadlock"),
    "copies_not_waited": ("copy4(s + t, in + t); copies_arrive(all); __syncthreads(); v = s[t ^ 37];", EARLY),
    "copies_waited_too": (
        "copy4(s + t, in + t); copies_arrive(all); copies_wait(); v = s[t]; wait(all, 0); v += s[t ^ 37];", ""),
    "copies_of_the_exited": ("copy4(s + t, in + t); copies_arrive(all); if (t > 31) return; wait(all, 0); v = s[t ^ 37];",
                             ""),
    "copy_after_arrive": ("copies_arrive(all); copy4(s + t, in + t); wait(all, 0); v = s[t ^ 37];", EARLY),
    "copies_publish_no_store": (
        "copy4(s + t, in + t); ((volatile int*)r)[t] = t; copies_arrive(all); wait(all, 0); v = r[t ^ 37];", "race"),
    # ---- bulk stores
    "store": (
        "s[t] = 3 * t; fence_shared(); __syncthreads(); if (!t) { store(out, s, 512); commit(); wait_group<0>(); }"
        " stored = true;", ""),
    "store_read_only_wait": (
        "s[t] = 3 * t; fence_shared(); __syncthreads(); if (!t) { store(out, s, 512); commit(); wait_read<0>(); }"
        " __syncthreads(); s[t] = 1; stored = true;", ""),
    "source_overwritten": (
        "s[t] = 3 * t; fence_shared(); __syncthreads(); if (!t) { store(out, s, 512); commit(); } __syncthreads();"
        " if (t == 70) s[70] = 1; if (!t) wait_read<0>(); stored = true;", "in_flight"),
    "source_overwritten_by_copy": (
        "s[t] = 3 * t; fence_shared(); __syncthreads(); if (!t) { store(out, s, 512); commit(); expect(one, 16);"
        " load(s, in, 16, one); wait_read<0>(); wait(one, 0); } stored = true;", "in_flight"),
    "source_overwritten_unordered": (
        "s[t] = 3 * t; fence_shared(); __syncthreads(); if (!t) { store(out, s, 512); commit(); wait_read<0>(); }"
        " if (t == 70) ((volatile int*)s)[70] = 1; stored = true;", "in_flight race"),
    "one_group_too_few": (
        "s[t] = 3 * t; fence_shared(); __syncthreads(); if (!t) { store(out, s, 256); commit();"
        " store(out + 64, s + 64, 256); commit(); wait_read<1>(); s[1] = 0; s[64] = 0; wait_read<0>(); } stored = true;",
        "in_flight"),
    "first_group_only": (
        "s[t] = 3 * t; fence_shared(); __syncthreads(); if (!t) { store(out, s, 256); commit();"
        " store(out + 64, s + 64, 256); commit(); wait_read<1>(); s[1] = 0; wait_read<0>(); } stored = true;", ""),
    "no_commit": (
        "s[t] = 3 * t; fence_shared(); __syncthreads(); if (!t) { store(out, s, 512); wait_group<0>(); } stored = true;",
        "in_flight"),
    "store_not_waited": (
        "s[t] = 3 * t; fence_shared(); __syncthreads(); if (!t) { store(out, s, 512); commit(); } stored = true;",
        "in_flight"),
    "store_read_back": (
        "s[t] = 3 * t; fence_shared(); __syncthreads(); if (!t) { store(out, s, 512); commit(); wait_group<0>();"
        " v = ((volatile int*)out)[5]; } stored = true;", ""),
    "store_read_back_early": (
        "s[t] = 3 * t; fence_shared(); __syncthreads(); if (!t) { store(out, s, 512); commit(); wait_read<0>();"
        " v = ((volatile int*)out)[5]; } stored = true;", "in_flight"),
    "store_unordered": ("s[t] = 3 * t; fence_shared(); if (!t) { store(out, s, 512); commit(); wait_group<0>(); }"
                        " stored = true;", "race uninitialised"),
    "store_uninitialised": ("if (!t) { store(out, s, 512); commit(); wait_group<0>(); } stored = true;",
                            "uninitialised"),
    "store_to_read_only": (
        "s[t] = 3 * t; fence_shared(); __syncthreads(); if (!t) { store((void*)in, s, 512); commit(); wait_group<0>(); }",
        "read_only"),
    "store_races": (
        "s[t] = 3 * t; fence_shared(); __syncthreads(); if (t == 32) ((volatile int*)out)[40] = 1;"
        " if (!t) { store(out, s, 512); commit(); wait_group<0>(); } stored = true;", "race in_flight proxy_fence"),
}  # fmt: skip
# What each correct kernel writes, for thread t; `in` holds 1000 + t. The rest writes 0.
RESULTS = {
    **dict.fromkeys(("load", "load_before_expect", "load_in_parts", "load_polled"), lambda t: 1000 + (t ^ 5)),
    **dict.fromkeys(("load_passed_on", "load_passed_on_by_mbarrier"), lambda t: 1000 + t),
    **dict.fromkeys(("copies", "copies_extra"), lambda t: 1000 + (t ^ 37)),
    "copies_waited_too": lambda t: 2000 + t + (t ^ 37),
    "copies_of_the_exited": lambda t: np.where(t < 32, 1000 + (t ^ 37), 0),
    "load_after_readers": lambda t: 0 * t,
    "many_mbarriers": lambda t: sum(1000 + 4 * (i % 32) + t % 4 for i in range(62)),
    **dict.fromkeys(
        ("all_arrive", "two_phases", "fence_and_arrive_relaxed", "wait_relaxed_and_fence"), lambda t: t ^ 32
    ),
    "dropped": lambda t: np.where(t < 32, 0, 7),
    "state": lambda t: 9 + 0 * t,
    "pending": lambda t: np.where(t == 0, 128123, 0),
    "memory_reused": lambda t: np.where(t == 0, 3, 0),
    **dict.fromkeys(("store", "store_read_only_wait", "first_group_only", "store_read_back"), lambda t: 3 * t),
}

# A producer thread fills a ring of 3 stages of 1 KB, 96 threads sum them up; defines leave out one synchronisation.
RING = r"""
extern "C" __global__ void NAME(const int* in, int* out, int tiles) {
  __shared__ __align__(16) int ring[3][256]; __shared__ u64 full[3], empty[3];
  int t = threadIdx.x;
  if (t == 0) { for (int i = 0; i < 3; i++) { init(full + i, 1); init(empty + i, 96); } FENCE_INIT; }
  __syncthreads();
  if (t < 96) {
    int sum = 0;
    for (int k = 0; k < tiles; k++) {
      int s = k % 3;
      FULL_WAIT(full + s, k / 3 & 1);
      for (int i = t; i < 256; i += 96) sum += (k + 1) * ring[s][i];
      EMPTY_ARRIVE(empty + s);
    }
    out[t] = sum;
  } else if (t == 96) {
    for (int k = 0; k < tiles; k++) {
      int s = k % 3;
      if (k >= 3) EMPTY_WAIT(empty + s, (k / 3 & 1) ^ 1);
      EXPECT(full + s, 1024);
      load(ring[s], in + 256 * k, 512, full + s);
      load(ring[s] + 128, in + 256 * k + 128, 512, full + s);
    }
  }
}
"""
RINGS = {
    "ring": ("", ""),
    "ring_no_full_wait": ("FULL_WAIT", EARLY),
    "ring_no_empty_wait": ("EMPTY_WAIT", "race in_flight bad_mbarrier"),
    "ring_no_empty_arrive": ("EMPTY_ARRIVE", "deadlock"),
    "ring_no_expect": ("EXPECT", "deadlock in_flight"),
    "ring_no_init_fence": ("FENCE_INIT", "proxy_fence"),
}
STEPS = {"FULL_WAIT": "wait", "EMPTY_WAIT": "wait", "EMPTY_ARRIVE": "arrive", "EXPECT": "expect",
         "FENCE_INIT": "fence_init()"}  # fmt: skip


def source(name: str, code: str) -> str:
    return f"""
#line 1 "{name}.cu"
extern "C" __global__ void {name}(const int* in, int* out) {{
  __shared__ __align__(128) int s[128]; __shared__ int r[128]; __shared__ u64 bars[4];
  u64 *one = bars, *all = bars + 1; int t = threadIdx.x, v = 0; bool stored = false;
  if (t == 0) {{ init(one, 1); init(all, 128); fence_init(); }} __syncthreads();
  {code}
  if (!stored) out[t] = v; }}
"""


def ring(name: str, without: str) -> str:
    lines = [f"#undef {step}\n#define {step}{'' if step == without else ' ' + call}" for step, call in STEPS.items()]
    if without and without != "FENCE_INIT":
        lines.append(f"#undef {without}\n#define {without}(...)")
    return "\n".join(lines) + RING.replace("NAME", name)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    parts = [source(n, c) for n, (c, _) in CASES.items()] + [ring(n, w) for n, (w, _) in RINGS.items()]
    return [nvrtc_ptx(HEADER + "".join(parts), arch="compute_90a", name="async.cu")]


@pytest.fixture(scope="module")
def library(build: Build, texts: list[str]) -> Library:
    return build(texts)


def launch(library: Library, name: str, schedule: str | int) -> np.ndarray:
    data, out = aligned(512).view(np.int32), aligned(512).view(np.int32)
    data[:] = 1000 + np.arange(128)
    run(library, name, data, out, read_only=(0,), schedule=schedule)
    return out


def caught(library: Library, name: str, schedule: str | int) -> KernelFault:
    with pytest.raises(KernelFault) as fault:
        launch(library, name, schedule)
    return fault.value


@each_case("schedule", SCHEDULES)
@pytest.mark.parametrize("name", [n for n, c in CASES.items() if not c[1]])
def test_correct(name: str, schedule: str | int, library: Library) -> None:
    out, expected = launch(library, name, schedule), RESULTS.get(name)
    if expected is not None:
        np.testing.assert_array_equal(out, expected(np.arange(128)))


@each_case("schedule", SCHEDULES)
@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c[1]])
def test_misuse_is_caught(name: str, schedule: str | int, library: Library) -> None:
    fault = caught(library, name, schedule)
    assert fault.kind in CASES[name][1].split(), str(fault)
    if fault.source is not None:
        assert any(place.endswith(f"{name}.cu:5") for place in (fault.source, *fault.inlined_at)), str(fault)


def launch_ring(library: Library, name: str, schedule: str | int) -> tuple[np.ndarray, np.ndarray]:
    data, out = aligned(8 * 1024).view(np.int32), aligned(96 * 4).view(np.int32)
    data[:] = np.random.default_rng(7).integers(-1000, 1000, len(data))
    run(library, name, data, out, 8, read_only=(0,), schedule=schedule)
    return data.reshape(8, 256), out


@each_case("schedule", [*SCHEDULES, 3, 4, 5])
def test_ring(schedule: str | int, library: Library) -> None:
    data, out = launch_ring(library, "ring", schedule)
    weighted = data * np.arange(1, 9)[:, None]
    np.testing.assert_array_equal(out, [weighted[:, t::96].sum() for t in range(96)])


@each_case("schedule", SCHEDULES)
@pytest.mark.parametrize("name", [n for n, (without, _) in RINGS.items() if without])
def test_each_step_of_the_ring_is_needed(name: str, schedule: str | int, library: Library) -> None:
    with pytest.raises(KernelFault) as caught:
        launch_ring(library, name, schedule)
    assert caught.value.kind in RINGS[name][1].split(), str(caught.value)


def test_fast_mode_agrees_and_shows_late_copies(build: Build, texts: list[str]) -> None:
    fast = build(texts, mode="fast")
    for name, expected in RESULTS.items():
        np.testing.assert_array_equal(launch(fast, name, "descending"), expected(np.arange(128)))
    assert (launch(fast, "load_without_wait", "ascending") == -1).all()  # shared memory starts as 0xFF bytes
    assert launch(fast, "source_overwritten", "ascending")[70] == 1
    for name in ("one_missing", "not_initialised", "load_odd_size", "load_expects_more"):
        assert caught(fast, name, 1).kind in CASES[name][1].split()


def test_deadlock_names_the_mbarrier(library: Library) -> None:
    text = str(caught(library, "load_expects_more", "ascending"))
    assert "wait at mbarrier bars+0 for the end of phase 0: 0 of 1 arrivals and 16 bytes are missing" in text
    assert "128 of 128" not in text and "load_expects_more.cu" not in text.split("state of every warp")[0]
    text = str(caught(library, "one_missing", "ascending"))
    assert "wait at mbarrier bars+8 for the end of phase 0: 1 of 128 arrivals and 0 bytes are missing" in text


def test_a_forgotten_retry_is_found_by_some_schedule(build: Build) -> None:
    code = "s[t] = t; arrive(all); while (!try_wait(all, 0)); v = s[t ^ 64];"
    both = source("patient", code) + source("hasty", code.replace("while (!try_wait(all, 0))", "try_wait(all, 0)"))
    built = build([nvrtc_ptx(HEADER + both, arch="compute_90a")])
    kinds = set()
    for seed in range(6):
        launch(built, "patient", seed)
        try:
            launch(built, "hasty", seed)
        except KernelFault as fault:
            kinds.add(fault.kind)
    assert kinds and kinds <= {"race", "uninitialised"}


def test_a_predicate_says_whether_the_source_is_read(build: Build) -> None:
    """cp.async with ignore-src, plain and negated: zeros where it holds."""
    body = """.shared .align 16 .b8 s[1024]; mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 1; setp.eq.u32 %p1, %r2, 1;
  mul.wide.u32 %rd1, %r1, 4; add.u64 %rd2, %rd0, %rd1; mov.u32 %r3, s; mad.lo.u32 %r4, %r1, 4, %r3;
  cp.async.ca.shared.global [%r4], [%rd2], 4, %p1; cp.async.ca.shared.global [%r4+128], [%rd2], 4, !%p1;
  cp.async.wait_all; ld.shared.u32 %r5, [%r4]; ld.shared.u32 %r6, [%r4+128];
  st.global.u32 [%rd2+128], %r5; st.global.u32 [%rd2+256], %r6;"""
    memory = aligned(384).view(np.uint32)
    memory[:32] = np.arange(1, 33)
    run(build([PTX_HEADER + entry("k", body)]), "k", memory, block=32)
    odd = np.arange(32) % 2 == 1
    np.testing.assert_array_equal(memory[32:64], np.where(odd, 0, memory[:32]))
    np.testing.assert_array_equal(memory[64:], np.where(odd, memory[:32], 0))
