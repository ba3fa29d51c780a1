"""Programmatic dependent launch: what another kernel may still be writing is touched only after griddepcontrol.wait, and what
another one may overwrite is read only before griddepcontrol.launch_dependents."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from kvgen.emulator import Buffer, KernelFault, Library
from tests.emulator.conftest import Build
from tests.emulator.programs import aligned, nvrtc_ptx
from tests.support.each_case import each_case

# name: (body, whether it must be caught). `settled` is memory that no running kernel writes.
CASES = {
    "waits_first": ("WAIT; out[t] = in[t] + settled[t];", None),
    "settled_before": ("int v = settled[t]; WAIT; out[t] = v + in[t];", None),
    "read_before": ("int v = in[t]; WAIT; out[t] = v + settled[t];", "in"),
    "write_before": ("out[t] = settled[t]; WAIT;", "out"),
    "never_waits": ("out[t] = in[t] + settled[t];", "in"),
    "one_thread_waits": ("if (t == 0) WAIT; out[t] = in[t] + settled[t];", "in"),
    "one_thread_and_barrier": ("if (t == 5) WAIT; __syncthreads(); out[t] = in[t] + settled[t];", None),
    "one_lane_and_warp_sync": ("if (t % 32 == 0) WAIT; __syncwarp(); out[t] = in[t] + settled[t];", None),
    "another_warp": ("if (t < 32) WAIT; __syncwarp(); out[t] = in[t] + settled[t];", "in"),
    "named_barrier": ('if (t < 64) { if (t == 1) WAIT; asm volatile("bar.sync 1, 64;" ::: "memory"); out[t] = in[t]; }', None),
    "copy_before": ("__shared__ int s[128]; COPY; WAIT; out[t] = s[t];", "in"),
    "atomic_before": ("atomicAdd(out + t, 1); WAIT;", "out"),
    "barrier_before_the_wait": ("__syncthreads(); if (t == 0) WAIT; out[t] = in[t];", "in"),
}  # fmt: skip
# Kernels that call launch_dependents, behind a wait: (body, the buffer whose read must be found).
TRIGGERS = {
    "never_triggers": ("out[t] = in[t];", None),
    "triggers_behind_a_barrier": ("int v = in[t]; __syncthreads(); TRIGGER; out[t] = v;", None),
    "one_triggers_behind_a_barrier": ("int v = in[t]; __syncthreads(); if (t == 9) TRIGGER; out[t] = v;", None),
    "settled_after": ("int v = in[t]; __syncthreads(); TRIGGER; out[t] = v + settled[t];", None),
    "writes_after": ("out[t] = in[t]; __syncthreads(); TRIGGER; out[t + 128] = t;", None),
    "triggers_first": ("TRIGGER; out[t] = in[t];", "in"),
    "one_triggers_first": ("if (t == 127) TRIGGER; __syncthreads(); out[t] = in[t];", "in"),
    "no_barrier": ("int v = in[t]; TRIGGER; out[t] = v;", "in"),
    "no_barrier_for_others": ("int v = in[t]; if (t == 64) TRIGGER; out[t] = v;", "in"),
    "barrier_of_a_warp": ("int v = in[t]; __syncwarp(); if (t == 64) TRIGGER; out[t] = v;", "in"),
    "named_barrier_of_all_readers": (
        'if (t < 64) { int v = in[t]; asm volatile("bar.sync 1, 64;" ::: "memory"); if (t == 0) TRIGGER; out[t] = v; }', None),
    "named_barrier_of_some": (
        'int v = in[t]; if (t < 64) { asm volatile("bar.sync 1, 64;" ::: "memory"); if (t == 0) TRIGGER; } out[t] = v;', "in"),
    "reads_what_it_wrote": ("out[t] = in[t]; __syncthreads(); TRIGGER; out[t + 128] = out[t];", "out"),
    "atomic_after": ("__syncthreads(); TRIGGER; atomicAdd(out + t, 1);", "out"),
    "reduction_before": ("atomicAdd(out + t, 1); __syncthreads(); TRIGGER;", None),
    "copy_landed": ("__shared__ int s[128]; COPY; int v = s[t]; __syncthreads(); TRIGGER; out[t] = v;", None),
    "copy_under_way": ("__shared__ int s[128]; ISSUE; __syncthreads(); TRIGGER; LANDED; out[t] = s[t];", "in"),
    "copy_never_awaited": ("__shared__ int s[128]; ISSUE; __syncthreads(); TRIGGER; out[t] = t;", "in"),
    "bulk_awaited_by_the_trigger": ("BULK; if (t == 0) { AWAIT; TRIGGER; } else { AWAIT; } out[t] = s[t];", None),
    "bulk_awaited_by_others": ("BULK; if (t > 0) { AWAIT; out[t] = s[t]; } else TRIGGER;", "in"),
    "bulk_after": ("__syncthreads(); if (t == 1) TRIGGER; __syncthreads(); BULK; AWAIT; out[t] = s[t];", "in"),
}  # fmt: skip
MACROS = """
#define TRIGGER asm volatile("griddepcontrol.launch_dependents;" ::: "memory")
#define ISSUE asm volatile("cp.async.ca.shared.global [%0], [%1], 4; cp.async.commit_group;" \\
  :: "r"((unsigned)__cvta_generic_to_shared(s + t)), "l"(in + t) : "memory")
#define LANDED asm volatile("cp.async.wait_all;" ::: "memory")
// All of `in` by one copy, which every thread can wait for.
#define BULK __shared__ alignas(16) int s[128]; __shared__ alignas(8) long long bar; \\
  unsigned to = (unsigned)__cvta_generic_to_shared(s), full = (unsigned)__cvta_generic_to_shared(&bar); \\
  if (t == 0) \\
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; fence.mbarrier_init.release.cluster;" :: "r"(full) : "memory"); \\
  __syncthreads(); \\
  if (t == 0) asm volatile("{ .reg .b64 a; mbarrier.arrive.expect_tx.shared::cta.b64 a, [%1], 512; " \\
    "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%2], 512, [%1]; }" \\
    :: "r"(to), "r"(full), "l"(in) : "memory")
#define AWAIT asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @!p bra W; }" \\
  :: "r"(full) : "memory")
#define WAIT asm volatile("griddepcontrol.wait;" ::: "memory")
#define COPY asm volatile("cp.async.ca.shared.global [%0], [%1], 4; cp.async.wait_all;" \\
  :: "r"((unsigned)__cvta_generic_to_shared(s + t)), "l"(in + t) : "memory")
"""


@pytest.fixture(scope="module")
def ptx() -> list[str]:
    bodies = {name: body for name, (body, _) in CASES.items()}
    bodies |= {name: f"WAIT; {body}" for name, (body, _) in TRIGGERS.items()}
    kernels = "".join(
        f'extern "C" __global__ void {name}(int* out, const int* in, const int* settled)'
        f" {{ int t = threadIdx.x; {body} }}\n"
        for name, body in bodies.items()
    )
    return [nvrtc_ptx(MACROS + kernels, arch="compute_90")]


@pytest.fixture(scope="module")
def library(build: Build, ptx: list[str]) -> Library:
    return build(ptx)


def launch(library: Library, name: str, schedule: str | int, programmatic: bool) -> None:
    arrays = [aligned(1024 if n == "out" else 512).view(np.int32) for n in ("out", "in", "settled")]
    buffers = [
        Buffer(n, a.ctypes.data, a.nbytes, n == "out", settled=n == "settled")
        for n, a in zip(("out", "in", "settled"), arrays, strict=True)
    ]
    args = [struct.pack("<Q", a.ctypes.data) for a in arrays]
    library.kernels[name].launch(
        (1, 1, 1), (128, 1, 1), args, buffers=buffers, schedule=schedule, programmatic=programmatic
    )


@each_case("schedule", ["ascending", "descending", 3])
@pytest.mark.parametrize("name", CASES)
def test_programmatic_launch(name: str, schedule: str | int, library: Library) -> None:
    buffer = CASES[name][1]
    if buffer is None:
        launch(library, name, schedule, programmatic=True)
        return
    with pytest.raises(KernelFault, match=r"before griddepcontrol\.wait") as caught:
        launch(library, name, schedule, programmatic=True)
    assert (caught.value.kind, caught.value.buffer) == ("before_grid_wait", buffer)


@pytest.mark.parametrize("name", CASES)
def test_an_ordinary_launch_follows_the_kernel_before(name: str, library: Library) -> None:
    launch(library, name, "ascending", programmatic=False)


@each_case("schedule", ["ascending", "descending", 3])
@pytest.mark.parametrize("name", TRIGGERS)
def test_what_a_kernel_behind_may_overwrite(name: str, schedule: str | int, library: Library) -> None:
    launch(library, name, schedule, programmatic=False)
    buffer = TRIGGERS[name][1]
    if buffer is None:
        launch(library, name, schedule, programmatic=True)
        return
    with pytest.raises(KernelFault, match=r"griddepcontrol\.launch_dependents.*may overwrite") as caught:
        launch(library, name, schedule, programmatic=True)
    assert (caught.value.kind, caught.value.buffer, caught.value.level) == ("after_trigger", buffer, "hardware")


@pytest.mark.parametrize("name", ["triggers_first", "no_barrier_for_others", "copy_under_way"])
def test_hardware_mode_finds_it_too(name: str, build: Build, ptx: list[str]) -> None:
    with pytest.raises(KernelFault, match="may overwrite"):
        launch(build(ptx, mode="hardware"), name, "ascending", programmatic=True)
