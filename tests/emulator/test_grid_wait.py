"""Programmatic dependent launch: what another kernel may still be writing is touched only after griddepcontrol.wait."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from kvgen.emulator import Buffer, KernelFault, Library
from tests.emulator.conftest import Build
from tests.emulator.programs import aligned, nvrtc_ptx
from tests.support.over import over

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
MACROS = """
#define WAIT asm volatile("griddepcontrol.wait;" ::: "memory")
#define COPY asm volatile("cp.async.ca.shared.global [%0], [%1], 4; cp.async.wait_all;" \\
  :: "r"((unsigned)__cvta_generic_to_shared(s + t)), "l"(in + t) : "memory")
"""


@pytest.fixture(scope="module")
def library(build: Build) -> Library:
    kernels = "".join(
        f'extern "C" __global__ void {name}(int* out, const int* in, const int* settled)'
        f" {{ int t = threadIdx.x; {body} }}\n"
        for name, (body, _) in CASES.items()
    )
    return build([nvrtc_ptx(MACROS + kernels, arch="compute_90")])


def launch(library: Library, name: str, schedule: str | int, programmatic: bool) -> None:
    arrays = [aligned(512).view(np.int32) for _ in range(3)]
    buffers = [
        Buffer(n, a.ctypes.data, a.nbytes, n == "out", settled=n == "settled")
        for n, a in zip(("out", "in", "settled"), arrays, strict=True)
    ]
    args = [struct.pack("<Q", a.ctypes.data) for a in arrays]
    library.kernels[name].launch(
        (1, 1, 1), (128, 1, 1), args, buffers=buffers, schedule=schedule, programmatic=programmatic
    )


@over("schedule", ["ascending", "descending", 3])
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
