"""Planted bugs: each is caught with its kernel, place, buffer and offset; its correct twin passes."""

from __future__ import annotations

import numpy as np
import pytest

from kvgen.emulator import KernelFault, Library
from tests.emulator.conftest import Build
from tests.emulator.programs import aligned, nvrtc_ptx, run
from tests.support.each_case import each_case

# name: (body, kind, buffer, part of the detail); line 3 of each kernel is the culprit.
BUGS = {
    "global_read": ("out[t] = in[t + 1];", "global_out_of_bounds", "arg1", "byte 512"),
    "global_write": ("out[t + 128] = in[t];", "global_out_of_bounds", "arg0", "starts 0 bytes past its end"),
    "global_before": ("out[t] = in[t - 3];", "global_out_of_bounds", "arg1", "12 bytes before its start"),
    "far_pointer": ("out[t] = *(int*)(0x1234567890ull + t * 4);", "global_out_of_bounds", None, "lies in no buffer"),
    "crossing": ("if (t == 127) *(volatile long long*)(out + 127) = 1;", "global_out_of_bounds", "arg0", "crosses"),
    "read_only": ("const_cast<int*>(in)[t] = 1;", "read_only", "arg1", "byte 0 of 'arg1'"),
    "static_shared": ("((volatile int*)s)[t + 1] = 1;", "shared_out_of_bounds", "s", "offset 512"),
    "static_shared_before": ("((volatile int*)s)[t - 1 - (int)(t > 0)] = 1;", "shared_out_of_bounds", None, "address"),
    "dynamic_shared": ("((volatile int*)dyn)[t] = 1;", "shared_out_of_bounds", "dynamic shared memory", "gave 256"),
    "uninitialised": ("s[t] = 1; __syncthreads(); out[t] = ((volatile int*)dyn)[t & 3];", "uninitialised",
                      "dynamic shared memory", "nobody has written"),
    "part_uninitialised": ("((volatile char*)s)[4 * t] = 1; out[t] = ((volatile int*)s)[t];", "uninitialised", "s",
                           "byte 1"),
    "misaligned_global": ("int4 v = *(const int4*)(in + 1); out[t] = v.x + v.y + v.z + v.w;", "misaligned", "arg1",
                          "alignment of 16"),
    "misaligned_shared": ("((volatile long long*)((volatile char*)s + 4))[t & 1] = 1;", "misaligned", "s",
                          "byte 4"),
    "copy_without_wait": ("COPY(in); out[t] = ((volatile int*)s)[t];", "in_flight", "s", "byte 0"),
    "overlapping_copies": ("COPY(in); COPY(in);", "in_flight", "s", "byte 0"),
    "copy_past_source": ("COPY(in + 1); WAIT;", "global_out_of_bounds", "arg1", "byte 512"),
    "divergent_barrier": ("if (t & 16) __syncthreads(); else { s[t] = 1; __syncthreads(); out[t] = s[t]; }",
                          "divergent_barrier", None, "lanes"),
    "barrier_for_some": ("if (t < 64) __syncthreads();", "divergent_barrier", None, "exit"),
    "count_mismatch": ("if (t < 32) asm volatile(\"bar.sync 1, 64;\"); "
                       "else if (t < 64) asm volatile(\"bar.sync 1, 96;\");",
                       "bad_barrier", None, "thread counts differ"),
    "odd_count": ("asm volatile(\"bar.sync 1, 100;\");", "bad_barrier", None, "multiple of 32"),
    "missing_lane": ("if (t & 1) out[t] = __shfl_xor_sync(~0u, t, 2);", "warp_mask", None, ""),
    "lane_outside": ("out[t] = t < 16 ? __shfl_xor_sync(0xffffu, t, 16) : 0;", "warp_mask", None, "not taking part"),
    "not_in_own_mask": ("out[t] = __ballot_sync(1u, t);", "warp_mask", None, "own mask"),
    "different_ops": ("out[t] = t & 1 ? __shfl_xor_sync(~0u, t, 2) : __ballot_sync(~0u, t);", "warp_mismatch", None,
                      "shfl.sync"),
    "different_masks": ("out[t] = __shfl_xor_sync(t & 1 ? ~0u : 0x7fffffffu | (t << 31), t, 2);", "warp_mismatch", None,
                        "mask"),
    "deadlock": ("if (t < 32) asm volatile(\"bar.sync 1, 64;\"); else if (t < 64) asm volatile(\"bar.sync 2, 64;\");",
                 "deadlock", None, "warp 1: lanes ffffffff wait at barrier 2 (32 of 64 arrived)"),
    "spin_forever": ("if (t == 0) while (*(volatile int*)out == 0) {}", "deadlock", None, "warp 0"),
    "endless": ("for (;;) if (t == 200) out[0]++;", "runaway", None, "endless loop"),
    "not_constant": ("out[t] = t; __syncthreads(); int v = __ldg(out + (t ^ 1)); __syncthreads(); out[t] = v;",
                     "not_constant", "arg0", "wrote it at"),
    "trap": ("if (t == 77) __trap();", "trap", None, "trap"),
    "division": ("out[t] = 5 / in[t];", "arithmetic", None, "division by zero"),
}  # fmt: skip
FINE = {
    "fine_bounds": "out[t] = in[t];",
    "fine_constant": "out[t] = __ldg(in + t) + __ldg(in + (t ^ 1));",
    "fine_shared": "s[t] = t; dyn[t] = 1; dyn[t + 128] = 2; __syncthreads(); out[t] = s[127 - t] + dyn[t ^ 1];",
    "fine_copy": "COPY(in); WAIT; __syncthreads(); out[t] = s[t ^ 1];",
    "fine_vector": "if (t < 32) { int4 v = ((const int4*)in)[t]; ((int4*)out)[t] = v; }",
    "fine_named": 'if (t < 64) asm volatile("bar.sync 1, 64;"); else asm volatile("bar.sync 2, 64;");',
    "fine_partial_mask": "if (t & 1) out[t] = __shfl_xor_sync(0xaaaaaaaau, t, 2);",
}
MACROS = r"""
#define COPY(p) asm volatile("cp.async.ca.shared.global [%0], [%1], 4; cp.async.commit_group;" \
  :: "r"((unsigned)__cvta_generic_to_shared(s + t)), "l"(p + t) : "memory")
#define WAIT asm volatile("cp.async.wait_group 0;" ::: "memory")
__device__ __forceinline__ void put(int* p, int i, int v) {
#line 900 "device/helper.cuh"
  p[i] = v;
}
"""


def source(name: str, body: str) -> str:
    return f"""
#line 1 "generated/set/{name}.cu"
extern "C" __global__ void {name}(int* out, const int* in) {{
  __shared__ __align__(16) int s[128]; extern __shared__ __align__(16) unsigned char dyn[]; int t = threadIdx.x;
  {body}
}}
"""


@pytest.fixture(scope="module")
def texts() -> list[str]:
    bodies = {**{n: b[0] for n, b in BUGS.items()}, **FINE, "inlined": "put(out, t + 200, 1);"}
    return [nvrtc_ptx(MACROS + "".join(source(n, b) for n, b in bodies.items()))]


@pytest.fixture(scope="module")
def library(build: Build, texts: list[str]) -> Library:
    return build(texts)


def launch(library: Library, name: str, schedule: str | int = "ascending") -> np.ndarray:
    """The arrays lie in one buffer, far enough apart that the array nearest to a wrong address is always the same."""
    memory = aligned(8192)
    out, data = (memory[at : at + 512].view(np.int32) for at in (2048, 5120))
    run(library, name, out, data, read_only=(1,), dynamic_shared=256, schedule=schedule)
    return out


@each_case("schedule", ["ascending", "descending", 2])
@pytest.mark.parametrize("name", BUGS)
def test_bug_is_caught(name: str, schedule: str | int, library: Library) -> None:
    _, kind, buffer, detail = BUGS[name]
    with pytest.raises(KernelFault) as caught:
        launch(library, name, schedule)
    fault = caught.value
    assert fault.kind == kind, str(fault)
    assert fault.kernel == name
    assert fault.block == (0, 0, 0) and fault.thread is not None
    if kind not in ("deadlock", "divergent_barrier"):
        assert fault.source is not None and fault.source.endswith(f"generated/set/{name}.cu:3"), str(fault)
    if buffer is not None:
        assert fault.buffer == buffer, str(fault)
    if schedule == "ascending":
        assert detail in fault.detail, str(fault)


@each_case("schedule", ["ascending", "descending", 2])
@pytest.mark.parametrize("name", FINE)
def test_correct_twin_passes(name: str, schedule: str | int, library: Library) -> None:
    launch(library, name, schedule)


def test_inlined_function_names_its_own_line_and_the_call(library: Library) -> None:
    with pytest.raises(KernelFault) as caught:
        launch(library, "inlined")
    assert caught.value.source is not None and caught.value.source.endswith("device/helper.cuh:900")
    assert caught.value.inlined_at == ("generated/set/inlined.cu:3",)


def test_paths_below_the_working_directory_are_relative(library: Library) -> None:
    with pytest.raises(KernelFault, match=r"global_out_of_bounds.*generated/set/global_read.cu:3") as caught:
        launch(library, "global_read")
    assert caught.value.source == "generated/set/global_read.cu:3"


def test_library_survives_a_fault(library: Library) -> None:
    with pytest.raises(KernelFault):
        launch(library, "global_write")
    launch(library, "fine_shared")


def test_fast_mode_still_reports_a_deadlock(build: Build, texts: list[str]) -> None:
    fast = build(texts, mode="fast")
    launch(fast, "fine_shared")
    for name, kind in (("deadlock", "deadlock"), ("divergent_barrier", "divergent_barrier"), ("trap", "trap")):
        with pytest.raises(KernelFault) as caught:
            launch(fast, name)
        assert caught.value.kind == kind
