"""Clusters: distributed shared memory, the cluster's barrier, what orders the blocks, and what must not be done."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvgen.emulator import Counters, EmulatorError, KernelFault, Library
from tests.emulator.conftest import Build
from tests.emulator.programs import aligned, nvrtc_ptx, run
from tests.support.each_case import each_case

SIZE, THREADS = 4, 64
MACROS = r"""
typedef unsigned u32;
#define ARRIVE asm volatile("barrier.cluster.arrive.aligned;" ::: "memory")
#define RELAXED asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory")
#define WAIT asm volatile("barrier.cluster.wait.aligned;" ::: "memory")
#define SYNC ARRIVE; WAIT
#define FENCE asm volatile("fence.acq_rel.cluster;" ::: "memory")
__device__ __forceinline__ u32 rank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
__device__ __forceinline__ u32 count() { u32 r; asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(r)); return r; }
__device__ __forceinline__ u32 at(const void* p, u32 r) {
  u32 a, own = (u32)__cvta_generic_to_shared(p);
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(own), "r"(r));
  return a;
}
__device__ __forceinline__ int get(u32 a) {
  int v; asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(a) : "memory"); return v;
}
__device__ __forceinline__ void put(u32 a, int v) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(a), "r"(v) : "memory");
}
__device__ __forceinline__ void release(u32 a) {
  asm volatile("red.release.cluster.shared::cluster.add.u32 [%0], 1;" :: "r"(a) : "memory");
}
__device__ __forceinline__ void loose(u32 a) {
  asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], 1;" :: "r"(a) : "memory");
}
__device__ __forceinline__ int acquire(u32 a) {
  int v; asm volatile("ld.acquire.cluster.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(a) : "memory"); return v;
}
"""
# What a thread of each block runs; `s` is 64 ints of shared memory, `n` the next block of the ring. What must be found.
CASES: dict[str, tuple[str, str | None]] = {
    "reads_its_neighbour": ("s[t] = 100 * r + t; SYNC; v = get(at(s + t, n)); SYNC;", None),
    "writes_its_neighbour": ("put(at(s + t, n), t); SYNC; v = s[t];", None),
    "no_barrier": ("s[t] = t; __syncthreads(); v = get(at(s + t, n)); SYNC;", "uninitialised race"),
    "block_barrier_is_not_enough": ("put(at(s + t, n), t); __syncthreads(); v = s[t]; SYNC;", "uninitialised race"),
    "relaxed_arrive": ("s[t] = t; RELAXED; WAIT; v = get(at(s + t, n)); SYNC;", "race"),
    "fence_and_relaxed_arrive": ("s[t] = 100 * r + t; FENCE; RELAXED; WAIT; v = get(at(s + t, n)); SYNC;", None),
    "block_fence_and_relaxed_arrive": ("s[t] = t; __threadfence_block(); RELAXED; WAIT; v = get(at(s + t, n)); SYNC;", "race"),
    "overwritten_too_early": ("s[t] = t; SYNC; v = get(at(s + t, n)); s[t] = 0; SYNC;", "race"),
    "overwritten_in_time": ("s[t] = t; SYNC; v = get(at(s + t, n)); SYNC; s[t] = 0;", None),
    "leaves_too_early": ("s[t] = t; SYNC; if (r == 0) return; v = get(at(s + t, 0)); ", "exited_block race"),
    "two_writers": ("if (t == 0) put(at(s, 0), r); SYNC;", "race"),
    "atomics": ("if (r == 0 && t == 0) s[0] = 0; SYNC; if (t == 0) loose(at(s, 0)); SYNC; v = get(at(s, 0)); SYNC;", None),
    "flag_with_release": ("flag_setup; if (r == 1 && t == 0) { put(at(s + 1, 0), 7); release(at(s, 0)); }"
                          "if (r == 0 && t == 0) { while (acquire(at(s, 0)) == 0) {} v = s[1]; } SYNC;", None),
    "flag_without_release": ("flag_setup; if (r == 1 && t == 0) { put(at(s + 1, 0), 7); loose(at(s, 0)); }"
                             "if (r == 0 && t == 0) { while (acquire(at(s, 0)) == 0) {} v = s[1]; } SYNC;", "race"),
    "wait_without_arrive": ("WAIT;", "bad_barrier"),
    "arrive_twice": ("ARRIVE; ARRIVE; WAIT;", "bad_barrier"),
    "one_block_never_arrives": ("if (r == 3) asm volatile(\"bar.sync 1, 128;\"); SYNC;", "deadlock bad_barrier"),
    "rank_outside": ("v = get(at(s + t, 4));", "bad_cluster"),
    "past_its_end": ("s[t] = t; SYNC; v = get(at(s, n) + 4 * (t + 64)); SYNC;", "shared_out_of_bounds"),
    "generic": ("s[t] = 100 * r + t; SYNC; unsigned long long a = (unsigned long long)(s + t), b;"
                "asm volatile(\"mapa.u64 %0, %1, %2;\" : \"=l\"(b) : \"l\"(a), \"r\"(n)); v = *(volatile int*)b;"
                "u32 q; asm volatile(\"getctarank.u64 %0, %1;\" : \"=r\"(q) : \"l\"(b)); v += 10000 * q; SYNC;", None),
    "exit_counts_as_arrival": ("if (r == 2) return; SYNC; v = 1;", None),
}  # fmt: skip
VALUES: dict[str, Any] = {
    "reads_its_neighbour": lambda r, t: 100 * ((r + 1) % SIZE) + t,
    "fence_and_relaxed_arrive": lambda r, t: 100 * ((r + 1) % SIZE) + t,
    "writes_its_neighbour": lambda r, t: t,
    "overwritten_in_time": lambda r, t: t,
    "atomics": lambda r, t: SIZE,
    "flag_with_release": lambda r, t: 7 if r == t == 0 else -1,
    "generic": lambda r, t: 10100 * ((r + 1) % SIZE) + t,
    "exit_counts_as_arrival": lambda r, t: 1 if r != 2 else -1,
}


@pytest.fixture(scope="module")
def library(build: Build) -> Library:
    kernels = "".join(
        f"""extern "C" __global__ void {name}(int* out) {{
  __shared__ int s[64]; int t = threadIdx.x, v = -1; u32 r = rank(), n = (r + 1) % count();
  {body.replace("flag_setup;", "if (t == 0) s[0] = 0; SYNC;")}
  out[blockIdx.x * 64 + t] = v;
}}
"""
        for name, (body, _) in CASES.items()
    )
    return build([nvrtc_ptx(MACROS + kernels, arch="compute_90")])


def launch(library: Library, name: str, schedule: str | int, **more: Any) -> tuple[np.ndarray, Counters]:
    out = aligned(4 * 2 * SIZE * THREADS).view(np.int32)
    out[:] = -1
    options = {"grid": (2 * SIZE, 1, 1), "cluster": (SIZE, 1, 1), "block": THREADS, "schedule": schedule, **more}
    return out, run(library, name, out, **options)


@each_case("schedule", ["ascending", "descending", 5])
@pytest.mark.parametrize("name", CASES)
def test_cluster(name: str, schedule: str | int, library: Library) -> None:
    kinds = CASES[name][1]
    if kinds is None:
        out, _ = launch(library, name, schedule)
        if name in VALUES:
            want = [VALUES[name](b % SIZE, t) for b in range(2 * SIZE) for t in range(THREADS)]
            np.testing.assert_array_equal(out, want)
        return
    with pytest.raises(KernelFault) as caught:
        launch(library, name, schedule)
    assert caught.value.kind in kinds.split(), str(caught.value)


def test_ranks_follow_the_axes(build: Build) -> None:
    source = (
        MACROS
        + """
extern "C" __global__ void axes(int* out) {
  u32 c[6];
  asm volatile("mov.u32 %0, %%cluster_ctaid.x; mov.u32 %1, %%cluster_ctaid.y; mov.u32 %2, %%cluster_nctaid.y;"
    "mov.u32 %3, %%clusterid.x; mov.u32 %4, %%clusterid.y; mov.u32 %5, %%nclusterid.x;"
    : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3]), "=r"(c[4]), "=r"(c[5]));
  int b = blockIdx.x + gridDim.x * blockIdx.y;
  out[b] = rank() + 10 * c[0] + 100 * c[1] + 1000 * c[2] + 10000 * c[3] + 100000 * c[4] + 1000000 * c[5];
}"""
    )
    out = aligned(4 * 24).view(np.int32)
    run(build([nvrtc_ptx(source, arch="compute_90")]), "axes", out, grid=(6, 4, 1), cluster=(3, 2, 1), block=1)
    want = [
        (x % 3 + 3 * (y % 2)) + 10 * (x % 3) + 100 * (y % 2) + 2000 + 10000 * (x // 3) + 100000 * (y // 2) + 2000000
        for y in range(4)
        for x in range(6)
    ]
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ((3, 1, 1), "must divide the grid"),
        ((17, 1, 1), "x must be 1 to 16"),
        ((8, 4, 1), "at most 16 blocks"),
        ((0, 1, 1), "x must be"),
    ],
)
def test_bad_cluster(cluster: tuple[int, int, int], message: str, library: Library) -> None:
    with pytest.raises(EmulatorError, match=message):
        launch(library, "atomics", "ascending", cluster=cluster, grid=(32, 4, 1))


def test_workers_change_nothing(library: Library) -> None:
    results = [launch(library, "reads_its_neighbour", "ascending", workers=n) for n in (1, 3)]
    np.testing.assert_array_equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
