"""The race checker: each pair differs in what orders two accesses, and only the unordered one may fail."""

from __future__ import annotations

import numpy as np
import pytest

from kvgen.emulator import KernelFault, Library
from tests.emulator.conftest import Build
from tests.emulator.programs import nvrtc_ptx, run
from tests.support.each_case import each_case

# Shared and block-level cases: the shared array starts initialised and ordered. (code, what must be found)
CASES = {
    "raw_across_warps": ("s[t] = t * 2; v = s[(t + 32) & 127];", "race"),
    "raw_with_barrier": ("s[t] = t * 2; __syncthreads(); v = s[(t + 32) & 127];", None),
    "war_across_warps": ("v = s[(t + 32) & 127]; s[t] = t * 2;", "race"),
    "war_with_barrier": ("v = s[(t + 32) & 127]; __syncthreads(); s[t] = t * 2;", None),
    "waw": ("one = t; __syncthreads(); v = one;", "race"),
    "waw_volatile": ("*(volatile int*)&one = t;", "race"),
    "raw_in_warp": ("s[t] = t * 2; v = s[t ^ 1];", "race"),
    "raw_in_warp_synced": ("s[t] = t * 2; __syncwarp(); v = s[t ^ 1];", None),
    "shuffle_is_no_barrier": ("s[t] = t * 2; v = __shfl_xor_sync(~0u, t, 1); v += s[t ^ 1];", "race"),
    "half_masks": ("s[t] = t * 2; __syncwarp(t & 16 ? 0xffff0000u : 0xffffu); v = s[t ^ 1];", None),
    "across_half_masks": ("s[t] = t * 2; __syncwarp(t & 16 ? 0xffff0000u : 0xffffu); v = s[t ^ 16];", "race"),
    "named_barriers": ("s[t] = t * 2; NAMED; v = s[t ^ 32];", None),
    "across_named_barriers": ("s[t] = t * 2; NAMED; v = s[t ^ 64];", "race"),
    "arrive_and_sync": (
        "if (t < 64) { s[t] = 1; ARRIVE; } else { SYNC; v = s[t - 64]; }", None),
    "arrive_is_one_way": (
        "if (t < 64) { ARRIVE; s[t] = 1; } else { SYNC; v = s[t - 64]; }", "race"),
    "shared_atomics": ("atomicAdd(&s[0], 1); __syncthreads(); v = s[0];", None),
    "atomic_and_plain_read": ("atomicAdd(&s[0], 1); v = s[0];", "race"),
    "atomics_of_both_warps": (
        "if (t < 64) { atomicAdd(&s[0], 1); ARRIVE_96; } else if (t < 96) { SYNC_96; v = s[0]; }", None),
    "atomics_of_the_first_warp": (
        "if (t < 64) { atomicAdd(&s[0], 1); if (t < 32) ARRIVE_64; } else if (t < 96) { SYNC_64; v = s[0]; }", "race"),
    "atomics_of_the_second_warp": (
        "if (t < 64) { atomicAdd(&s[0], 1); if (t > 31) ARRIVE_64; } else if (t < 96) { SYNC_64; v = s[0]; }", "race"),
    "neighbouring_bytes": ("((char*)s)[t] = 1; __syncthreads(); v = ((char*)s)[t ^ 1];", None),
    "same_byte": ("((char*)s)[t / 2] = t; __syncthreads(); v = s[t];", "race"),
    # One instruction of a warp that stores one value twice: whichever lane wins, nobody can tell.
    "same_byte_same_value": ("((char*)s)[t / 2] = 1; __syncthreads(); v = s[t];", None),
    "same_word_same_value": ("if (t < 32) *(volatile int*)&one = 7; __syncthreads(); v = one;", None),
    "same_vector": ("((int4*)s)[t / 8] = make_int4(t / 8, 1, 2, t / 16); __syncthreads(); v = s[t];", None),
    "same_vector_but_one": ("((int4*)s)[t / 8] = make_int4(1, 2, 3, t); __syncthreads(); v = s[t];", "race"),
    "same_value_of_two_warps": ("if (t % 32 == 0) *(volatile int*)&one = 7; __syncthreads(); v = one;", "race"),
    "same_value_of_two_lines": (
        "if (t == 0) *(volatile int*)&one = 7;\n if (t == 1) *(volatile int*)&one = 7; __syncthreads(); v = one;", "race"),
    "same_value_then_read": ("*(volatile int*)&s[t / 32] = t / 32; v = *(volatile int*)&s[t / 32 ^ 1];", "race"),
    "shared_release_acquire": (
        "if (t == 0) { s[5] = 9; RELEASE_S; } else if (t == 32) { ACQUIRE_S; v = s[5]; }", None),
    "shared_relaxed_flag": (
        "if (t == 0) { s[5] = 9; RELAXED_S; } else if (t == 32) { ACQUIRE_S; v = s[5]; }", "race"),
    "global_in_block": ("g[t] = t; v = g[t ^ 1];", "race"),
    "global_in_block_barrier": ("g[t] = t; __syncthreads(); v = g[t ^ 1];", None),
    "two_readers_one_writer": ("v = s[0]; __syncthreads(); if (t == 5) s[0] = 1;", None),
    "loop_without_second_barrier": (
        "for (int i = 0; i < 3; i++) { s[t] = i; __syncthreads(); v += s[t ^ 64]; }", "race"),
    "loop_with_both_barriers": (
        "for (int i = 0; i < 3; i++) { s[t] = i; __syncthreads(); v += s[t ^ 64]; __syncthreads(); }", None),
    "cp_async_over_a_reader": ("v = s[t ^ 4]; COPY; WAIT;", "race"),
    "cp_async_read_by_others_after_wait_only": ("COPY; WAIT; v = s[t ^ 4];", "race"),
    "cp_async_wait_and_barrier": ("__syncthreads(); COPY; WAIT; __syncthreads(); v = s[t ^ 4];", None),
}  # fmt: skip
# Every block adds to g[t], the last one reads the sums: what is around the counter, and how it reads.
SUM = (
    "atomicAdd(g + t, 1); __syncthreads(); if (t == 0) {{ {} one = atomicAdd(flag, 1); {} }} __syncthreads();"
    " if (one == 1) v = {};"
)
# Cross-block cases: block 0 writes g[t], block 1 reads it; `flag` is a counter.
GRID_CASES = {
    "same_word": ("g[t] = t;", "race"),
    "read_after_write": ("if (b == 0) g[t] = t; else v = g[t];", "race"),
    "fence_and_atomic": (
        "if (b == 0) { g[t] = t; __syncthreads(); if (t == 0) { __threadfence(); atomicAdd(flag, 1); } }"
        "else { if (t == 0) { atomicAdd(flag, 0); __threadfence(); } __syncthreads(); v = g[t]; }",
        None,
    ),
    "fence_before_the_barrier": (
        "if (b == 0) { g[t] = t; __threadfence(); __syncthreads(); if (t == 1) atomicAdd(flag, 1); }"
        "else { if (t == 0) { atomicAdd(flag, 0); __threadfence(); } __syncthreads(); v = g[t]; }",
        "race",
    ),
    "no_release_fence": (
        "if (b == 0) { g[t] = t; __syncthreads(); if (t == 0) atomicAdd(flag, 1); }"
        "else { if (t == 0) { atomicAdd(flag, 0); __threadfence(); } __syncthreads(); v = g[t]; }",
        "race",
    ),
    "no_acquire_fence": (
        "if (b == 0) { g[t] = t; __syncthreads(); if (t == 0) { __threadfence(); atomicAdd(flag, 1); } }"
        "else { if (t == 0) { atomicAdd(flag, 0); } __syncthreads(); v = g[t]; }",
        "race",
    ),
    "block_fence_is_too_narrow": (
        "if (b == 0) { g[t] = t; __syncthreads(); if (t == 0) { __threadfence_block(); atomicAdd(flag, 1); } }"
        "else { if (t == 0) { atomicAdd(flag, 0); __threadfence(); } __syncthreads(); v = g[t]; }",
        "race",
    ),
    "release_acquire": (
        "if (b == 0) { g[t] = t; __syncthreads(); if (t == 0) ATOM_ACQ_REL; }"
        "else { if (t == 0) ATOM_ACQ_REL; __syncthreads(); v = g[t]; }",
        None,
    ),
    "other_flag": (
        "if (b == 0) { g[t] = t; __syncthreads(); if (t == 0) { __threadfence(); atomicAdd(flag, 1); } }"
        "else { if (t == 0) { atomicAdd(flag + 1, 0); __threadfence(); } __syncthreads(); v = g[t]; }",
        "race",
    ),
    "chain_of_three": (
        "if (t == 0) ATOM_ACQ_REL; __syncthreads(); if (b == 2) v = g[t]; if (b == 0) { g[t] = t; } __syncthreads();"
        "if (t == 0) ATOM_ACQ_REL;",
        None,
    ),
    "atomics_on_one_word": ("atomicAdd(g, 1);", None),
    # Who has seen a strong write follows it, and what it followed in its turn.
    "last_block_resets": ("if (t == 0 && atomicAdd(flag, 1) == 2) *flag = 0;", None),
    "a_reader_resets": (
        "if (t == 0) { if (b == 0) atomicAdd(flag, 1); else if (b == 1) { ACQUIRE_G; if (v == 1) *flag = 0; } }",
        None,
    ),
    "a_stranger_resets": ("if (t == 0) { if (b == 0) atomicAdd(flag, 1); else if (b == 1) *flag = 0; }", "race"),
    "another_thread_resets": ("if (t == 0) v = atomicAdd(flag, 1); if (t == 32 && b == 2) *flag = 0;", "race"),
    "seen_before_the_last": (
        "if (t == 0) { ACQUIRE_G; if (b == 1) *flag = 0; else atomicAdd(flag, 1); ACQUIRE_G; if (b == 2) v = g[t]; }"
        "if (b == 1 && t == 0) g[t] = 1;",
        "race",
    ),
    "sum_of_atomics": (SUM.format("__threadfence();", "__threadfence();", "g[t]"), None),
    "sum_of_atomics_not_released": (SUM.format("", "__threadfence();", "g[t]"), "race"),
    "sum_of_atomics_not_acquired": (SUM.format("__threadfence();", "", "g[t]"), "race"),
    "sum_of_atomics_by_an_atomic": (SUM.format("", "", "atomicAdd(g + t, 0)"), None),
    "sum_fenced_one_way": (SUM.format("FENCE(release);", "FENCE(acquire);", "g[t]"), None),
    "sum_fenced_the_other_way": (SUM.format("FENCE(acquire);", "FENCE(acquire);", "g[t]"), "race"),
    "sum_acquired_by_a_release": (SUM.format("FENCE(release);", "FENCE(release);", "g[t]"), "race"),
    "sum_fenced_for_the_cluster": (SUM.format("CLUSTER_FENCE;", "CLUSTER_FENCE;", "g[t]"), "race"),
    "release_in_the_cluster": (
        "if (b == 0) { g[t] = t; __syncthreads(); if (t == 0) ATOM_CLUSTER; }"
        "else { if (t == 0) ATOM_ACQ_REL; __syncthreads(); v = g[t]; }",
        "race",
    ),
}
THREE_BLOCKS = ("chain_of_three", "last_block_resets", "another_thread_resets", "seen_before_the_last")
MACROS = r"""
#define NAMED if (t < 64) asm volatile("bar.sync 1, 64;" ::: "memory"); \
  else asm volatile("bar.sync 2, 64;" ::: "memory")
#define ARRIVE asm volatile("bar.arrive 3, 128;" ::: "memory")
#define SYNC asm volatile("bar.sync 3, 128;" ::: "memory")
#define ARRIVE_64 asm volatile("bar.arrive 4, 64;" ::: "memory")
#define SYNC_64 asm volatile("bar.sync 4, 64;" ::: "memory")
#define ARRIVE_96 asm volatile("bar.arrive 4, 96;" ::: "memory")
#define SYNC_96 asm volatile("bar.sync 4, 96;" ::: "memory")
#define FENCE(what) asm volatile("fence." #what ".gpu;" ::: "memory")
#define CLUSTER_FENCE asm volatile("fence.acq_rel.cluster;" ::: "memory")
#define ATOM_CLUSTER asm volatile("atom.acq_rel.cluster.global.add.s32 %0, [%1], 1;" : "=r"(v) : "l"(flag) : "memory")
#define ACQUIRE_G asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory")
#define ADDRESS(x) (unsigned)__cvta_generic_to_shared(x)
#define RELEASE_S asm volatile("st.release.cta.shared.s32 [%0], 7;" :: "r"(ADDRESS(&one)) : "memory")
#define RELAXED_S asm volatile("st.relaxed.cta.shared.s32 [%0], 7;" :: "r"(ADDRESS(&one)) : "memory")
#define ACQUIRE_S do asm volatile("ld.acquire.cta.shared.s32 %0, [%1];" : "=r"(v) : "r"(ADDRESS(&one)) : "memory"); \
  while (v != 7)
#define COPY asm volatile("cp.async.ca.shared.global [%0], [%1], 4; cp.async.commit_group;" \
  :: "r"(ADDRESS(s + t)), "l"(g + t) : "memory")
#define WAIT asm volatile("cp.async.wait_group 0;" ::: "memory")
#define ATOM_ACQ_REL asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(v) : "l"(flag) : "memory")
"""


def source(name: str, code: str) -> str:
    return f"""extern "C" __global__ void {name}(int* g, int* flag, int* out) {{
  __shared__ int s[128]; __shared__ int one; int t = threadIdx.x, b = blockIdx.x, v = 0;
  s[t] = t; if (t == 0) one = 1; __syncthreads();
  {code}
  out[b * 128 + t] = v; }}
"""


@pytest.fixture(scope="module")
def library(build: Build) -> Library:
    texts = [source(n, c) for n, (c, _) in {**CASES, **GRID_CASES}.items()]
    return build([nvrtc_ptx(MACROS + "".join(texts), name="races.cu")])


@each_case("schedule", ["ascending", "descending", 5])
@pytest.mark.parametrize("name", [*CASES, *GRID_CASES])
def test_race(name: str, schedule: str | int, library: Library) -> None:
    expected = {**CASES, **GRID_CASES}[name][1]
    arrays = [np.zeros(128, np.int32), np.zeros(2, np.int32), np.zeros(3 * 128, np.int32)]
    grid = (3 if name in THREE_BLOCKS else 2 if name in GRID_CASES else 1, 1, 1)
    if expected is None:
        run(library, name, *arrays, grid=grid, schedule=schedule)
        return
    with pytest.raises(KernelFault) as caught:
        run(library, name, *arrays, grid=grid, schedule=schedule)
    assert caught.value.kind == expected, str(caught.value)
    assert caught.value.source is not None and caught.value.source.startswith("races.cu:")
    assert caught.value.buffer in ("s", "one", "arg0", "arg1")
