"""Bugs around wgmma and setmaxnreg: each planted bug is caught, its correct twin gives the right sum."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kvgen.compile.nvrtc import compile_text
from kvgen.emulator import EmulatorError, KernelFault, Library, TranslateError
from tests.emulator.conftest import Build
from tests.emulator.programs import HEADER, entry, nvrtc_ptx, run
from tests.support.each_case import each_case

# A product adds 16 to every element of d, as all of both operands is 1. A: 64 rows of 16 at s, B: 8 rows at s + 1024.
PRELUDE = r"""
typedef unsigned long long u64;
#define ASM(text) asm volatile(text ::: "memory");
#define FENCE ASM("wgmma.fence.sync.aligned;")
#define COMMIT ASM("wgmma.commit_group.sync.aligned;")
#define WAIT(n) ASM("wgmma.wait_group.sync.aligned " #n ";")
#define PROXY_FENCE ASM("fence.proxy.async;")
#define BARRIER ASM("bar.sync 0;")
#define REGISTERS(action, n) ASM("setmaxnreg." #action ".sync.aligned.u32 " #n ";")
#define GO COMMIT WAIT(0)
#define SUMS(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define FORM(type, a, more, d, ...) asm volatile("{ .reg .pred p; setp.ne.b32 p, %6, 0; wgmma.mma_async.sync.aligned." \
  type " {%0, %1, %2, %3}, " a ", %5, p, 1, 1" more "; }" : SUMS(d) : __VA_ARGS__ : "memory");
#define SCALED(d, a, b, scale) FORM("m64n8k16.f32.bf16.bf16", "%4", ", 0, 0", d, "l"(a), "l"(b), "r"(scale))
#define MMA(d, a, b) SCALED(d, a, b, 1)
#define TF32(d, a, b) FORM("m64n8k8.f32.tf32.tf32", "%4", "", d, "l"(a), "l"(b), "r"(1))
#define MMA_R(d, x, b) FORM("m64n8k16.f32.bf16.bf16", "{%4, %4, %4, %4}", ", 0", d, "r"(x), "l"(b), "r"(1))
#define DESC(p) ((u64)((unsigned)__cvta_generic_to_shared(p) >> 4 & 0x3fff) | 8ull << 16 | 16ull << 32)
#define OUT(x) out[t] = (x);
#define FILL s[t] = 0x3f80, s[t + 256] = 0x3f80, s[t + 512] = 0x3f80, s[t + 768] = 0x3f80; if (t < 128) s[t + 1024] = 0x3f80;
#define READY FILL if (t == 0) flag = 0; PROXY_FENCE __syncthreads();
#define AT(p) "r"((unsigned)__cvta_generic_to_shared(p))
#define SIGNAL if (t == 0) asm volatile("st.release.cta.shared.u32 [%0], 1;" :: AT(&flag) : "memory");
#define AWAIT for (int seen = 0; !seen;) asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(seen) : AT(&flag) : "memory");
#define DECLARE __shared__ __align__(1024) unsigned short s[2048]; __shared__ int flag; int t = threadIdx.x; \
  u64 a = DESC(s), b = DESC(s + 1024); float d[4] = {}, e[4] = {};
#define FIRST if (t < 128)
#define OTHERS if (t >= 128)
"""
FINE = {  # name: (code, what the first 128 threads find in out)
    "plain": ("READY FIRST { FENCE MMA(d, a, b) GO OUT(d[0] + d[3]) }", 32),
    "chain": ("READY FIRST { FENCE MMA(d, a, b) MMA(d, a, b) MMA(d, a, b) GO OUT(d[1]) }", 48),
    "two_groups": ("READY FIRST { FENCE MMA(d, a, b) COMMIT MMA(e, a, b) MMA(e, a, b) COMMIT "
                   "WAIT(1) float x = d[0]; WAIT(0) OUT(100 * x + e[0]) }", 1632),
    "across_groups": ("READY FIRST { FENCE MMA(d, a, b) COMMIT MMA(d, a, b) COMMIT WAIT(1) FENCE MMA(d, a, b) GO "
                      "OUT(d[2]) }", 48),
    "swapped": ("READY FIRST { _Pragma(\"unroll 1\") for (int i = 0; i < n; ++i) { FENCE MMA(d, a, b) COMMIT "
                "for (int j = 0; j < 4; ++j) { float x = d[j]; d[j] = e[j]; e[j] = x; } } WAIT(0) "
                "OUT(100 * d[0] + e[3]) }", 3248),
    "chosen": ("READY FIRST { FENCE MMA(d, a, b) MMA(e, a, b) MMA(e, a, b) COMMIT "
               "for (int j = 0; j < 4; ++j) d[j] = n & 1 ? d[j] : e[j]; WAIT(0) OUT(d[0]) }", 16),
    "again": ("READY FIRST { FENCE MMA(d, a, b) GO d[0] += 1; FENCE MMA(d, a, b) GO OUT(d[0]) }", 33),
    "overwritten": ("READY FIRST { d[0] = 5; FENCE SCALED(d, a, b, n - 5) GO OUT(d[0]) }", 16),
    "from_registers": ("READY FIRST { FENCE MMA_R(d, 0x3f803f80, b) GO OUT(d[0]) }", 16),
    "registers_changed": ("READY FIRST { int x = n == 5 ? 0x3f803f80 : 0; FENCE MMA_R(d, x, b) COMMIT WAIT(1) "
                          "x += n - 5; FENCE MMA_R(d, x, b) GO OUT(d[0]) }", 32),
    "other_shape": ("READY FIRST { FENCE MMA(d, a, b) COMMIT FENCE TF32(d, a, b) GO OUT(d[0] > 16) }", 1),
    "released": ("READY FIRST { FENCE MMA(d, a, b) GO BARRIER OUT(d[0]) } OTHERS { BARRIER s[t] = 0; }", 16),
    "one_releases": ("READY FIRST { FENCE MMA(d, a, b) GO OUT(d[0]) } "
                     "SIGNAL OTHERS { AWAIT s[t] = 0; }", 16),
    "both_groups": ("READY FENCE MMA(d, a, b) GO OUT(d[0])", 16),
    "registers_given": ("FIRST REGISTERS(dec, 40) OTHERS REGISTERS(inc, 216) OUT(7)", 7),
    "registers_given_late": ("FIRST { BARRIER REGISTERS(dec, 40) } OTHERS { BARRIER REGISTERS(inc, 216) } OUT(7)", 7),
    "registers_given_back": ("FIRST { REGISTERS(dec, 40) BARRIER REGISTERS(inc, 128) } "
                             "OTHERS { REGISTERS(inc, 216) BARRIER REGISTERS(dec, 120) } OUT(7)", 7),
}  # fmt: skip
BUGS = {  # name: (code, kinds)
    "no_wait": ("READY FIRST { FENCE MMA(d, a, b) COMMIT OUT(d[0]) WAIT(0) }", "in_flight"),
    "wait_leaves_one": ("READY FIRST { FENCE MMA(d, a, b) COMMIT MMA(e, a, b) COMMIT WAIT(1) OUT(e[0]) WAIT(0) }",
                        "in_flight"),
    "no_commit": ("READY FIRST { FENCE MMA(d, a, b) WAIT(0) OUT(d[0]) COMMIT WAIT(0) }", "in_flight"),
    "used_in_arithmetic": ("READY FIRST { FENCE MMA(d, a, b) COMMIT d[0] = d[0] * 2; WAIT(0) OUT(d[0]) }", "in_flight"),
    "shuffled": ("READY FIRST { FENCE MMA(d, a, b) COMMIT d[0] = __shfl_xor_sync(~0u, d[0], 1); WAIT(0) OUT(d[0]) }",
                 "in_flight"),
    "stored_in_shared": ("READY FIRST { FENCE MMA(d, a, b) COMMIT ((volatile float*)s)[600 + t] = d[0]; WAIT(0) }",
                         "in_flight"),
    "never_waited": ("READY FIRST { FENCE MMA(d, a, b) COMMIT }", "in_flight"),
    "no_fence": ("READY FIRST { MMA(d, a, b) GO OUT(d[0]) }", "missing_fence"),
    "no_fence_again": ("READY FIRST { FENCE MMA(d, a, b) GO d[0] += 1; MMA(d, a, b) GO OUT(d[0]) }", "missing_fence"),
    "no_fence_for_registers": ("READY FIRST { int x = 0x3f803f80; FENCE MMA_R(d, x, b) COMMIT WAIT(1) x += n; "
                               "MMA_R(d, x, b) GO OUT(d[0]) }", "missing_fence"),
    "no_fence_for_shape": ("READY FIRST { FENCE MMA(d, a, b) COMMIT TF32(d, a, b) GO OUT(d[0]) }", "missing_fence"),
    "overwritten_by_itself": ("READY FIRST { FENCE MMA(d, a, b) COMMIT s[t] = 0; WAIT(0) OUT(d[0]) }", "in_flight"),
    "overwritten_by_others": ("READY FIRST { FENCE MMA(d, a, b) GO OUT(d[0]) } OTHERS s[t] = 0;", "in_flight race"),
    "released_early": ("READY FIRST { FENCE MMA(d, a, b) COMMIT BARRIER WAIT(0) OUT(d[0]) } OTHERS { BARRIER s[t] = 0; }",
                       "in_flight race"),
    "one_releases_early": ("READY FIRST { FENCE MMA(d, a, b) COMMIT } SIGNAL OTHERS { AWAIT s[t] = 0; } "
                           "FIRST { WAIT(0) OUT(d[0]) }", "in_flight race"),
    "unwritten": ("READY FIRST { FENCE MMA(d, a, DESC(s + 1032)) GO OUT(d[0]) }", "uninitialised"),
    "no_proxy_fence": ("FILL __syncthreads(); FIRST { FENCE MMA(d, a, b) GO OUT(d[0]) }", "proxy_fence"),
    "no_barrier": ("READY __syncthreads(); FILL PROXY_FENCE FIRST { FENCE MMA(d, a, b) GO OUT(d[0]) }", "race proxy_fence"),
    "past_the_end": ("READY FIRST { FENCE MMA(d, a, DESC(s + 2000)) GO OUT(d[0]) }", "shared_out_of_bounds"),
    "null_descriptor": ("READY FIRST { FENCE MMA(d, a, 0ull) GO OUT(d[0]) }", "shared_out_of_bounds"),
    "base_offset": ("READY FIRST { FENCE MMA(d, a | 1ull << 49, b) GO OUT(d[0]) }", "bad_descriptor"),
    "reserved_bits": ("READY FIRST { FENCE MMA(d, a, b | 1ull << 15) GO OUT(d[0]) }", "bad_descriptor"),
    "inside_of_a_pattern": ("READY FIRST { FENCE MMA(d, a, DESC(s + 64) | 1ull << 62) GO OUT(d[0]) }", "misaligned"),
    "across_a_row": ("READY FIRST { FENCE MMA(d, a, DESC(s + 24) | 2ull << 62) GO OUT(d[0]) }", "misaligned"),
    "three_warps": ("READY FIRST { if (t < 96) { FENCE MMA(d, a, b) GO OUT(d[0]) } }", "warp_mismatch"),
    "three_warps_and_a_barrier": ("READY FIRST { FENCE if (t < 96) { MMA(d, a, b) GO } BARRIER OUT(d[0]) } OTHERS BARRIER",
                                  "deadlock"),
    "descriptor_of_a_warp": ("READY FIRST { FENCE MMA(d, a + (t / 32) * 32, b) GO OUT(d[0]) }", "warp_mismatch"),
    "descriptor_of_a_lane": ("READY FIRST { FENCE MMA(d, a, b + t % 2) GO OUT(d[0]) }", "warp_mismatch"),
    "two_products": ("READY FIRST { FENCE if (t < 64) { MMA(d, a, b) } else { TF32(d, a, b) } GO OUT(d[0]) }",
                     "warp_mismatch"),
    "half_a_warp": ("READY FIRST { FENCE if (t & 16) { MMA(d, a, b) } GO OUT(d[0]) }", "warp_mask warp_mismatch"),
    "registers_of_three_warps": ("if (t < 96) REGISTERS(dec, 40) OUT(0)", "warp_mismatch"),
    "registers_too_many": ("FIRST REGISTERS(dec, 24) OTHERS REGISTERS(inc, 240) OUT(0)", "bad_registers"),
    "registers_too_few": ("FIRST REGISTERS(dec, 48) OTHERS REGISTERS(inc, 216) OUT(0)", "deadlock"),
    "registers_behind_a_barrier": ("FIRST { BARRIER REGISTERS(dec, 40) } OTHERS { REGISTERS(inc, 216) BARRIER } OUT(0)",
                                   "deadlock"),
    "registers_both_take": ("REGISTERS(inc, 136) OUT(0)", "deadlock"),
    "registers_upwards": ("REGISTERS(dec, 136) OUT(0)", "bad_registers"),
    "registers_downwards": ("REGISTERS(inc, 128) REGISTERS(inc, 120) OUT(0)", "bad_registers"),
    "registers_differ": ("if (t < 32) REGISTERS(dec, 40) else REGISTERS(dec, 48) OUT(0)", "warp_mismatch"),
}  # fmt: skip
SCHEDULES = ["ascending", "descending", 4]


def source(name: str, code: str) -> str:
    return f"""
#line 1 "{name}.cu"
extern "C" __global__ void __launch_bounds__(256, 2) {name}(float* out, int n) {{
  DECLARE {code}
}}
"""


@pytest.fixture(scope="module")
def text() -> str:
    cases = {**{n: c for n, (c, _) in FINE.items()}, **{n: c for n, (c, _) in BUGS.items()}}
    return nvrtc_ptx(PRELUDE + "".join(source(n, c) for n, c in cases.items()), arch="compute_90a")


@pytest.fixture(scope="module")
def library(build: Build, text: str) -> Library:
    return build([text])


def launch(library: Library, name: str, schedule: str | int, threads: int = 256) -> np.ndarray:
    out = np.zeros(256, np.float32)
    run(library, name, out, 5, block=threads, schedule=schedule)
    return out


@each_case("schedule", SCHEDULES)
@pytest.mark.parametrize("name", FINE)
def test_correct_twin(name: str, schedule: str | int, library: Library) -> None:
    assert set(launch(library, name, schedule)[:128]) == {FINE[name][1]}


@each_case("schedule", SCHEDULES)
@pytest.mark.parametrize("name", BUGS)
def test_bug_is_caught(name: str, schedule: str | int, library: Library) -> None:
    with pytest.raises(KernelFault) as caught:
        launch(library, name, schedule)
    assert caught.value.kind in BUGS[name][1].split(), str(caught.value)
    if caught.value.kind != "deadlock":
        assert caught.value.source == f"{name}.cu:2", str(caught.value)


def test_report_names_the_product(library: Library) -> None:
    with pytest.raises(KernelFault, match=r"st.global\S* uses a result of the wgmma at \S*no_wait.cu:2 before"):
        launch(library, "no_wait", "ascending")
    with pytest.raises(KernelFault, match=r"the wgmma.mma_async\S+ issued at \S*by_itself.cu:2 may still read it"):
        launch(library, "overwritten_by_itself", "ascending")


def test_registers_that_are_waited_for(library: Library) -> None:
    with pytest.raises(
        KernelFault, match=r"wait for 11264 more registers of the warpgroup, 10240 are free, in setmaxnreg.inc"
    ):
        launch(library, "registers_too_few", "ascending")
    with pytest.raises(
        KernelFault, match=r"240: 128 threads take 30720 registers and 128 others at least 3072, of 32768"
    ):
        launch(library, "registers_too_many", "ascending")
    out = np.zeros(256, np.float32)
    run(library, "registers_too_few", out, 5, block=256, registers=136)  # another ptxas may give more
    with pytest.raises(EmulatorError, match="264 for each of 256 threads"):
        run(library, "registers_too_few", out, 5, block=256, registers=264)


BOUNDS = {
    "__launch_bounds__(384, 1)": 168, "__launch_bounds__(256, 1)": 240, "__launch_bounds__(256, 2)": 128,
    "__launch_bounds__(640, 1)": 96, "__maxnreg__(120)": 120, "__launch_bounds__(384)": None, "": None,
}  # fmt: skip


@pytest.mark.parametrize("bounds", BOUNDS)
def test_registers_at_the_start_are_those_of_ptxas(bounds: str, build: Build) -> None:
    code = "FIRST REGISTERS(dec, 24) OTHERS REGISTERS(inc, 240) OUT(0)"
    text = PRELUDE + source("k", code).replace("__launch_bounds__(256, 2)", bounds)
    library, found = build([nvrtc_ptx(text, arch="compute_90a")]), BOUNDS[bounds]
    assert library.kernels["k"].registers == found
    outcome = compile_text(text, ["--gpu-architecture=sm_90a", "--ptxas-options=-v"], "cubin")
    assert outcome.ok
    if found is not None:
        assert f"Used {found} registers" in outcome.log
        return
    assert "'setmaxnreg' ignored; unable to determine register count" in outcome.log
    with pytest.raises(KernelFault, match="ptxas drops it") as caught:
        launch(library, "k", "ascending")
    assert caught.value.kind == "bad_registers"


def test_warpgroup_needs_four_warps(library: Library) -> None:
    with pytest.raises(KernelFault, match="no four whole warps"):
        launch(library, "both_groups", "ascending", threads=224)
    assert set(launch(library, "registers_given", "ascending", threads=160)[:160]) == {7}


def test_late_results_without_checks(build: Build, text: str) -> None:
    """Fast mode says nothing, but shows it: results are NaN before the wait, and operands are read at the wait."""
    fast = build([text], mode="fast")
    for name, (_, value) in FINE.items():
        assert set(launch(fast, name, "ascending")[:128]) == {value}, name
    for name in ("no_wait", "wait_leaves_one", "no_commit", "used_in_arithmetic"):
        assert np.isnan(launch(fast, name, "ascending")[:128]).all(), name
    assert not (launch(fast, "overwritten_by_itself", "ascending")[:128] == 16).all()


SUMS = "{%f0, %f1, %f2, %f3}"
REFUSED = {
    "sparse": (f"wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {SUMS}, %rd1, %rd2, %r1, 0, 1, 1, 1, 0, 0;", "sparse"),
    "n": (f"wgmma.mma_async.sync.aligned.m64n12k16.f32.f16.f16 {SUMS}, %rd1, %rd2, 1, 1, 1, 0, 0;", "n cannot be 12"),
    "integer n": (f"wgmma.mma_async.sync.aligned.m64n40k32.s32.s8.s8 {SUMS}, %rd1, %rd2, 1;", "n cannot be 40"),
    "k": (f"wgmma.mma_async.sync.aligned.m64n8k8.f32.f16.f16 {SUMS}, %rd1, %rd2, 1, 1, 1, 0, 0;", "k of .f16 is 16"),
    "types": (f"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.bf16 {SUMS}, %rd1, %rd2, 1, 1, 1, 0, 0;", "be multiplied"),
    "sum": ("wgmma.mma_async.sync.aligned.m64n8k16.f16.bf16.bf16 {%r1, %r2}, %rd1, %rd2, 1, 1, 1, 0, 0;", "accumulators of"),
    "bits": (f"wgmma.mma_async.sync.aligned.m64n8k256.s32.b1.b1.and.popc {SUMS}, %rd1, %rd2, 1;", "is not one of"),
    "count": ("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1}, %rd1, %rd2, 1, 1, 1, 0, 0;", "takes 4"),
    "scale": (f"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {SUMS}, %rd1, %rd2, 1, 2, 1, 0, 0;", "imm-scale"),
    "transposed": (f"wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {SUMS}, %rd1, %rd2, 1, 1, 1, 0, 0;", "operands"),
    "satfinite": (f"wgmma.mma_async.sync.aligned.m64n8k16.satfinite.f32.f16.f16 {SUMS}, %rd1, %rd2, 1, 1, 1, 0, 0;", "integers"),
    "wait": ("wgmma.wait_group.sync.aligned 8;", "0 to 7"),
    "aligned": ("wgmma.fence.sync;", "needs one of .aligned"),
    "few registers": ("setmaxnreg.dec.sync.aligned.u32 16;", "16 registers"),
    "odd registers": ("setmaxnreg.inc.sync.aligned.u32 100;", "100 registers"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, build: Build) -> None:
    code, message = REFUSED[name]
    with pytest.raises(TranslateError, match=re.escape(message)):
        build([HEADER + entry("k", code)])
