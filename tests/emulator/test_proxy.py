"""Proxy fences: what the async proxy may see of generic writes. Each pair differs in one fence or in its place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvgen.emulator import KernelFault, Library
from tests.emulator.conftest import Build
from tests.emulator.programs import aligned, nvrtc_ptx, run
from tests.support.each_case import each_case

HEADER = (Path(__file__).parent / "cuda" / "async.cuh").read_text()
SCHEDULES = ["ascending", "descending", 3]
STORE = "if (!t) { store(out, s, 512); commit(); wait_group<0>(); }"
STORE_32 = "if (t == 32) { store(out, s, 512); commit(); wait_group<0>(); }"
LOAD = "if (!t) { expect(one, 512); load(s, in, 512, one); } wait(one, 0);"
# name: (code, whether a fence is missing). Every kernel writes s[t] = t first where it says WRITE.
CASES = {
    "by_the_writers": (f"WRITE; fence_shared(); __syncthreads(); {STORE}", False),
    "of_all_spaces": (f"WRITE; fence_async(); __syncthreads(); {STORE}", False),
    "by_the_issuer": (f"WRITE; __syncthreads(); if (!t) fence_shared(); {STORE}", False),
    "by_a_third": (
        f"WRITE; __syncthreads(); if (t == 64) fence_shared(); __syncthreads(); {STORE}", False),
    "through_an_mbarrier": (
        "WRITE; fence_shared(); arrive(all); if (!t) wait(all, 0); " + STORE, False),
    "through_two_mbarriers": (
        "WRITE; arrive(all); if (t == 32) { wait(all, 0); fence_shared(); arrive(one); } if (!t) wait(one, 0); " + STORE,
        False),
    "through_a_named_barrier": (
        'WRITE; fence_shared(); asm volatile("bar.sync 3, 128;" ::: "memory"); ' + STORE, False),
    "missing": (f"WRITE; __syncthreads(); {STORE}", True),
    "before_the_write": (f"fence_shared(); WRITE; __syncthreads(); {STORE}", True),
    "after_the_arrival": ("WRITE; arrive(all); fence_shared(); if (!t) wait(all, 0); " + STORE, True),
    "by_the_wrong_thread": (f"WRITE; __syncthreads(); if (t == 64) fence_shared(); {STORE}", True),
    "by_some_writers": (f"WRITE; if (t != 77) fence_shared(); __syncthreads(); {STORE}", True),
    "of_another_space": (f"WRITE; fence_global(); __syncthreads(); {STORE}", True),
    "of_inits_only": (f"WRITE; fence_init(); __syncthreads(); {STORE}", True),
    "of_threads": (f"WRITE; fence_threads(); __threadfence(); __syncthreads(); {STORE}", True),
    "written_again": (f"WRITE; fence_shared(); __syncthreads(); if (t == 40) s[40] = 1; __syncthreads(); {STORE}", True),
    "long_ago": (f"WRITE; for (int i = 0; i < 5; i++) __syncthreads(); {STORE}", True),
    "long_ago_with_fence": (f"WRITE; fence_shared(); for (int i = 0; i < 5; i++) __syncthreads(); {STORE}", False),
    "bytes": (f"WRITE; fence_shared(); __syncthreads(); if (t == 9) ((char*)s)[77] = 1; __syncthreads(); {STORE}", True),
    "bytes_with_fence": (
        f"WRITE; fence_shared(); __syncthreads(); if (t == 9) {{ ((char*)s)[77] = 1; fence_shared(); }} __syncthreads();"
        f" {STORE}", False),
    "many_fences": (
        "for (int i = 0; i < 40; i++) { s[t] = i; fence_shared(); __syncwarp(); } __syncthreads(); " + STORE, False),
    "many_rounds": (
        "for (int i = 0; i < 6; i++) { WRITE; fence_shared(); __syncthreads();"
        " if (!t) { store(out, s, 512); commit(); wait_read<0>(); } __syncthreads(); } if (!t) wait_group<0>();", False),
    # ---- copies
    "cp_async": (f"copy4(s + t, in + t); copies_wait(); __syncthreads(); {STORE}", True),
    "cp_async_fenced": (f"copy4(s + t, in + t); copies_wait(); fence_shared(); __syncthreads(); {STORE}", False),
    "cp_async_by_mbarrier": (f"copy4(s + t, in + t); copies_arrive(all); wait(all, 0); {STORE}", True),
    "cp_async_by_mbarrier_fenced": (
        f"copy4(s + t, in + t); copies_arrive(all); wait(all, 0); fence_shared(); {STORE}", False),
    "loaded_then_stored": (f"{LOAD} {STORE}", False),
    "loaded_then_stored_by_another": (f"{LOAD} __syncthreads(); {STORE_32}", False),
    "load_over_a_write": (f"WRITE; __syncthreads(); {LOAD}", True),
    "load_over_a_fenced_write": (f"WRITE; fence_shared(); __syncthreads(); {LOAD}", False),
    "load_over_a_read": (
        f"WRITE; fence_shared(); __syncthreads(); {LOAD} v = s[t ^ 3]; __syncthreads();"
        " if (!t) { expect(one, 512); load(s, in, 512, one); } wait(one, 1);", False),
    "load_then_read": (f"{LOAD} v = s[t ^ 3];", False),
    # ---- mbarriers
    "init": ("INIT(2); __syncthreads(); if (!t) { expect(bars + 2, 16); load(s, in, 16, bars + 2); } wait(bars + 2, 0);",
             True),
    "init_fenced": (
        "INIT(2); if (!t) fence_init(); __syncthreads();"
        " if (!t) { expect(bars + 2, 16); load(s, in, 16, bars + 2); } wait(bars + 2, 0);", False),
    "init_fenced_by_another": (
        "INIT(2); __syncthreads(); if (t == 32) fence_init(); __syncthreads();"
        " if (!t) { expect(bars + 2, 16); load(s, in, 16, bars + 2); } wait(bars + 2, 0);", True),
    "init_and_full_fence": (
        "INIT(2); __syncthreads(); if (!t) { fence_async(); expect(bars + 2, 16); load(s, in, 16, bars + 2); }"
        " __syncthreads(); wait(bars + 2, 0);", False),
    "init_without_copies": ("INIT(2); __syncthreads(); if (!t) arrive(bars + 2); wait(bars + 2, 0);", False),
    # ---- global memory
    "global": ("out[t] = t; __syncthreads(); if (!t) { expect(one, 512); load(s, out, 512, one); } wait(one, 0);", True),
    "global_fenced": (
        "out[t] = t; fence_global(); __syncthreads(); if (!t) { expect(one, 512); load(s, out, 512, one); } wait(one, 0);",
        False),
    "global_of_shared_fence": (
        "out[t] = t; fence_shared(); __syncthreads(); if (!t) { expect(one, 512); load(s, out, 512, one); } wait(one, 0);",
        True),
    "global_read_back": (f"WRITE; fence_shared(); __syncthreads(); {STORE} __syncthreads(); v = out[t];", False),
}  # fmt: skip
# Block 0 writes `out` and publishes it, block 1 loads it by a bulk copy.
BLOCKS = {
    "blocks_fenced_by_the_writer": ("fence_async();", "", False),
    "blocks_fenced_by_the_reader": ("", "fence_async();", False),
    "blocks_fenced_by_one": ("__syncthreads(); if (!t) fence_global();", "", False),
    "blocks_fenced_by_one_too_early": ("if (!t) fence_global();", "", True),
    "blocks_unfenced": ("", "", True),
    "blocks_fenced_for_shared": ("fence_shared();", "fence_shared();", True),
}


def source(name: str, code: str) -> str:
    return f"""extern "C" __global__ void {name}(const int* in, int* out, int* flag) {{
  __shared__ __align__(128) int s[128]; __shared__ u64 bars[4];
  u64 *one = bars, *all = bars + 1; int t = threadIdx.x, v = 0;
  if (t == 0) {{ init(one, 1); init(all, 128); fence_init(); }} __syncthreads();
  {code}
  if (v == 12345) flag[1] = v; }}
"""


def pair(name: str, writer: str, reader: str) -> str:
    return source(
        name,
        f"""if (blockIdx.x == 0) {{ out[t] = t; {writer} __syncthreads(); if (!t) {{ __threadfence(); atomicAdd(flag, 1); }} }}
  else if (!t) {{ atomicAdd(flag, 0); __threadfence(); {reader} expect(one, 512); load(s, out, 512, one); wait(one, 0); }}""",
    )


@pytest.fixture(scope="module")
def library(build: Build) -> Library:
    macros = "#define WRITE s[t] = t\n#define INIT(i) if (!t) init(bars + i, 1)\n"
    parts = [source(n, code) for n, (code, _) in CASES.items()] + [pair(n, w, r) for n, (w, r, _) in BLOCKS.items()]
    return build([nvrtc_ptx(HEADER + macros + "".join(parts), arch="compute_90a", name="proxy.cu")])


def launch(library: Library, name: str, schedule: str | int, blocks: int = 1) -> np.ndarray:
    data, out = aligned(512).view(np.int32), aligned(512).view(np.int32)
    data[:] = 1000 + np.arange(128)
    flag = np.zeros(2, np.int32)
    run(library, name, data, out, flag, grid=(blocks, 1, 1), read_only=(0,), schedule=schedule)
    return out


@each_case("schedule", SCHEDULES)
@pytest.mark.parametrize("name", [*CASES, *BLOCKS])
def test_proxy_fence(name: str, schedule: str | int, library: Library) -> None:
    missing = CASES[name][1] if name in CASES else BLOCKS[name][2]
    blocks = 2 if name in BLOCKS else 1
    if not missing:
        launch(library, name, schedule, blocks)
        return
    with pytest.raises(KernelFault) as caught:
        launch(library, name, schedule, blocks)
    assert caught.value.kind == "proxy_fence", str(caught.value)
    assert caught.value.buffer in ("s", "bars", "arg1")


def test_values_pass_through(library: Library) -> None:
    np.testing.assert_array_equal(launch(library, "by_the_writers", 1), np.arange(128))
    np.testing.assert_array_equal(launch(library, "loaded_then_stored", 1), 1000 + np.arange(128))
    np.testing.assert_array_equal(launch(library, "cp_async_fenced", 1), 1000 + np.arange(128))
