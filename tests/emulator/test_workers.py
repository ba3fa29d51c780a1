"""Blocks over several OS threads: results, counters and reports are the same for any number of them, every time."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvgen import emulator
from kvgen.emulator import Counters, KernelFault, Library
from tests.emulator.conftest import Build
from tests.emulator.programs import aligned, nvrtc_ptx, run
from tests.support.each_case import each_case

WORKERS = (1, 2, 5, 5)
ROUNDS = 500  # some ten milliseconds a launch
KERNELS = r"""
// Chaotic, so that every difference shows; long enough for the other workers to start, who wait two milliseconds.
__device__ float busy(float x, int rounds) {
  for (int i = 0; i < rounds; i++) x = 1 - 1.3f * x * x + 0.1f * __shfl_xor_sync(~0u, x, 1 + (i & 15));
  return x;
}
extern "C" __global__ void apart(float* out, const float* in, int rounds) {
  int t = threadIdx.x + blockIdx.x * blockDim.x;
  out[t] = busy(in[t], rounds);
}
// Each block adds up its part; the last one to finish adds the parts in the order in which they were counted.
extern "C" __global__ void split(float* out, const float* in, float* parts, unsigned* counter, int rounds) {
  __shared__ unsigned rank;
  int t = threadIdx.x, b = blockIdx.x;
  float x = busy(in[t + b * 32], rounds);
  for (int o = 16; o; o /= 2) x += __shfl_xor_sync(~0u, x, o);
  if (t == 0) {
    parts[b] = x;
    __threadfence();
    rank = atomicAdd(counter, 1);
  }
  __syncthreads();
  if (rank != gridDim.x - 1) return;
  __threadfence();
  float sum = 0;
  if (t == 0) { for (int i = 0; i < gridDim.x; i++) sum = sum * 0.9f + ((volatile float*)parts)[i]; *out = sum; }
}
extern "C" __global__ void add(float* out, const float* in, unsigned* order, int rounds) {
  int t = threadIdx.x + blockIdx.x * 32;
  float x = busy(in[t], rounds);
  atomicAdd(out, x);
  if (threadIdx.x == 0) order[blockIdx.x] = atomicAdd(order + gridDim.x, 1);
}
// A block waits for the one before it; `back` makes each wait for the one behind it. A volatile load orders nothing, but
// runs in fast mode.
__device__ int acquired(int* flag, int is_volatile) {
  int v;
  if (is_volatile) return *(volatile int*)flag;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory");
  return v;
}
extern "C" __global__ void chain(int* out, int* flags, int back, int is_volatile) {
  int b = blockIdx.x, from = back ? b + 1 : b - 1;
  if (threadIdx.x == 0) {
    if (from >= 0 && from < gridDim.x) {
      while (acquired(flags + from, is_volatile) == 0) {}
      __threadfence();
      out[b] = out[from] + b;
    } else {
      out[b] = 100;
    }
    __threadfence();
    atomicExch(flags + b, 1);
  }
}
// The flag is a plain store behind a fence.
extern "C" __global__ void late(int* flag) {
  if (threadIdx.x == 0 && blockIdx.x == 0) while (*(volatile int*)flag == 0) {}
  if (threadIdx.x == 0 && blockIdx.x == 1) { __threadfence(); *flag = 1; }
}
extern "C" __global__ void broken(float* out, const float* in, int first, int how, int rounds) {
  int t = threadIdx.x + blockIdx.x * 32;
  float x = busy(in[t], rounds * (1 + 6 * ((blockIdx.x / 2 + how) % 2)));
  if ((int)blockIdx.x >= first && blockIdx.x % 2 == 1) {
    if (how == 0 && threadIdx.x == 7) asm volatile("trap;");
    if (how == 1 && threadIdx.x < 16) __syncthreads();
    if (how == 2) out[t + 100000] = x;
    if (how == 3) x += __shfl_sync(0xffffu, x, 3);
  }
  out[t] = x;
}
extern "C" __global__ void tiny(unsigned* out) {
  if (threadIdx.x == 0) out[blockIdx.x] = blockIdx.x * 2654435761u;
}
extern "C" __global__ void gather(float* out, const float* in, int* bad, int rounds) {
  int t = threadIdx.x + blockIdx.x * 32;
  float x = busy(in[t], rounds);
  if (threadIdx.x == 0 && blockIdx.x % 3 == 0) atomicMax(bad, (int)blockIdx.x);
  out[(t * 7) % (gridDim.x * 32)] = x;
}
"""


@pytest.fixture(scope="module", params=["fast", "check"])
def mode(request: pytest.FixtureRequest) -> emulator.host.Mode:
    found: emulator.host.Mode = request.param
    return found


@pytest.fixture(scope="module")
def library(mode: emulator.host.Mode, build: Build) -> Library:
    return build([nvrtc_ptx(KERNELS)], mode=mode)


def floats(count: int) -> np.ndarray:
    values = aligned(4 * count).view(np.float32)
    values[:] = np.random.default_rng(7).uniform(-1, 1, count)
    return values


def zeros(count: int) -> np.ndarray:
    return aligned(4 * count).view(np.int32)


def same(launch: Callable[[int], tuple[Counters, list[np.ndarray]]]) -> list[np.ndarray]:
    """Launch with every number of workers; the arrays of the first."""
    counters, arrays = launch(1)
    for workers in WORKERS[1:]:
        again, found = launch(workers)
        assert again == counters
        for a, b in zip(arrays, found, strict=True):
            assert a.tobytes() == b.tobytes(), workers
    return arrays


@each_case("schedule", ["ascending", 11])
def test_blocks_apart(library: Library, schedule: str | int) -> None:
    data = floats(64 * 12)

    def launch(workers: int) -> tuple[Counters, list[np.ndarray]]:
        out = aligned(data.nbytes).view(np.float32)
        done = run(library, "apart", out, data, ROUNDS, grid=(12, 1, 1), block=64, read_only=(1,), workers=workers,
                   schedule=schedule)  # fmt: skip
        return done, [out]

    (out,) = same(launch)
    assert len(set(out)) > 700


def test_last_block_merges(library: Library) -> None:
    data = floats(32 * 24)

    def launch(workers: int) -> tuple[Counters, list[np.ndarray]]:
        out, parts, counter = zeros(1), zeros(24), zeros(1)
        done = run(library, "split", out, data, parts, counter, ROUNDS, grid=(24, 1, 1), block=32, read_only=(1,),
                   workers=workers)  # fmt: skip
        assert counter[0] == 24
        return done, [out, parts]

    same(launch)


@each_case("schedule", ["ascending", "descending", 11])
def test_atomics_of_floats_add_up_in_one_order(library: Library, schedule: str | int) -> None:
    data = floats(32 * 24)

    def launch(workers: int) -> tuple[Counters, list[np.ndarray]]:
        out, order = zeros(1), zeros(25)
        done = run(library, "add", out, data, order, ROUNDS, grid=(24, 1, 1), block=32, read_only=(1,), workers=workers,
                   schedule=schedule)  # fmt: skip
        assert list(order) == [*range(24), 24]
        return done, [out]

    same(launch)


@pytest.mark.parametrize("is_volatile", [0, 1])
def test_a_block_may_wait_for_an_earlier_one(mode: str, library: Library, is_volatile: int) -> None:
    def launch(workers: int) -> tuple[Counters, list[np.ndarray]]:
        out, flags = zeros(40), zeros(40)
        done = run(library, "chain", out, flags, 0, is_volatile, grid=(40, 1, 1), block=32, workers=workers)
        return done, [out, flags]

    if is_volatile and mode == "check":  # a volatile load is no acquire
        assert faults(launch).kind == "race"
        return
    out, flags = same(launch)
    assert list(out) == list(100 + np.cumsum(range(40))) and set(flags) == {1}


def faults(launch: Callable[[int], object]) -> KernelFault:
    """The fault of the launch, which must not depend on the number of workers."""
    found = []
    for workers in WORKERS:
        with pytest.raises(KernelFault) as caught:
            launch(workers)
        found.append(caught.value)
    assert len({(str(f), f.kind, f.block, f.thread, f.source, f.buffer, f.detail) for f in found}) == 1
    return found[0]


@pytest.mark.parametrize("how", [0, 1, 2, 3])
@pytest.mark.parametrize("first", [0, 9])
def test_the_first_bad_block_is_reported(mode: str, library: Library, how: int, first: int) -> None:
    how = 0 if (how, mode) == (2, "fast") else how  # fast mode does not look at addresses
    data, out = floats(32 * 33), aligned(4 * 32 * 33).view(np.float32)

    def launch(workers: int) -> None:
        run(
            library,
            "broken",
            out,
            data,
            first,
            how,
            ROUNDS // 2,
            grid=(33, 1, 1),
            block=32,
            read_only=(1,),
            workers=workers,
        )

    fault = faults(launch)
    assert fault.block == (first | 1, 0, 0)
    assert fault.kind == ("trap", "divergent_barrier", "global_out_of_bounds", "warp_mask")[how]


def test_waiting_for_a_later_block_is_a_deadlock(library: Library) -> None:
    arrays = zeros(8), zeros(8)
    fault = faults(lambda w: run(library, "chain", *arrays, 1, 1, grid=(8, 1, 1), block=32, workers=w))
    assert fault.kind == "deadlock" and fault.block == (0, 0, 0)
    fault = faults(lambda w: run(library, "late", arrays[1], grid=(2, 1, 1), block=32, workers=w))
    assert fault.kind == "deadlock" and fault.block == (0, 0, 0)


def test_ten_thousand_tiny_blocks(library: Library) -> None:
    def launch(workers: int) -> tuple[Counters, list[np.ndarray]]:
        out = zeros(10_000)
        return run(library, "tiny", out, grid=(10_000, 1, 1), block=32, workers=workers), [out]

    (out,) = same(launch)
    np.testing.assert_array_equal(out.view(np.uint32), np.arange(10_000, dtype=np.uint32) * np.uint32(2654435761))


def test_scattered_stores_and_atomics(library: Library) -> None:
    data = floats(32 * 20)

    def launch(workers: int) -> tuple[Counters, list[np.ndarray]]:
        out, bad = aligned(data.nbytes).view(np.float32), zeros(1)
        done = run(
            library, "gather", out, data, bad, ROUNDS, grid=(20, 1, 1), block=32, read_only=(1,), workers=workers
        )
        return done, [out, bad]

    assert same(launch)[1][0] == 18


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
def test_workers_are_threads_that_end_with_the_launch(library: Library) -> None:
    data, out = floats(32 * 64), aligned(4 * 32 * 64).view(np.float32)

    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    def most(workers: int) -> int:
        """Threads seen beside those before the launch."""
        seen, done = [threads()], threading.Event()
        watcher = threading.Thread(target=lambda: seen.extend(threads() for _ in iter(lambda: done.wait(0.001), True)))
        watcher.start()
        run(library, "apart", out, data, 2000, grid=(64, 1, 1), block=32, read_only=(1,), workers=workers)
        done.set()
        watcher.join()
        return max(seen) - seen[0] - 1

    for workers in (1, 2, 5):  # on a busy machine not all may be seen
        found = [most(workers)]
        while max(found) < workers - 1 and len(found) < 5:
            found.append(most(workers))
        assert workers // 2 <= max(found) < workers


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_waits_for_launches_and_its_child_can_launch(library: Library) -> None:
    """A child has the runtime's memory as it was at the fork: in the middle of a launch it is no state to begin one from."""
    data, out, expected = floats(32 * 64), aligned(4 * 32 * 64).view(np.float32), aligned(4 * 32 * 64).view(np.float32)
    kernel: dict[str, Any] = {"grid": (64, 1, 1), "block": 32, "read_only": (1,), "workers": 2}
    run(library, "apart", expected, data, 4000, **kernel)

    def child_of(fork: Callable[[], int]) -> None:
        child = fork()
        if not child:
            signal.alarm(30)  # ends it where a lock is never given back
            complete = bool((out == expected).all())
            os._exit(0 if complete and run(library, "apart", out, data, 10, **kernel).warp_operations == 640 else 1)
        assert os.waitpid(child, 0)[1] == 0

    def fork_inside() -> int:
        while not out.any():  # until the launch has written something
            time.sleep(0.0005)
        return os.fork()

    beside = threading.Thread(target=lambda: run(library, "apart", out, data, 4000, **kernel))
    beside.start()
    child_of(fork_inside)
    beside.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_signal_handler_forks_from_the_thread_that_launches(library: Library) -> None:
    data, out = floats(32 * 64), aligned(4 * 32 * 64).view(np.float32)
    children: list[int] = []

    def handler(*_: Any) -> None:  # runs where the launch has come back to Python, its lock not yet given back
        if not (child := os.fork()):
            os._exit(0)
        children.append(child)

    before = signal.signal(signal.SIGUSR1, handler)
    timer = threading.Timer(0.005, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    try:
        timer.start()
        run(library, "apart", out, data, 4000, grid=(64, 1, 1), block=32, read_only=(1,))
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [os.waitpid(child, 0)[1] for child in children] == [0]
