"""Loads, stores, atomics and copies through every state space, against NumPy."""

from __future__ import annotations

import struct

import ml_dtypes
import numpy as np
import pytest

from kvgen.emulator import KernelFault, Library
from tests.emulator.conftest import Build
from tests.emulator.programs import HEADER, aligned, entry, nvrtc_ptx, run
from tests.support.each_case import each_case

SPACES = r"""
typedef unsigned u32; typedef unsigned long long u64;
struct Pair { int a[4]; float b; };
__constant__ int table[4] = {10, 20, 30, 40};
__device__ int counter = 5;
extern "C" __global__ void spaces(int* out, Pair p, unsigned char n, float f) {
  __shared__ int s[128]; extern __shared__ __align__(128) unsigned char dyn[];
  int t = threadIdx.x; float local[8];
  for (int i = 0; i < 8; i++) local[i] = f * i + t;
  s[t] = t * 3; dyn[t] = n + t; __syncthreads();
  int v = s[t ^ 1] + p.a[t & 3] + table[(n + t) & 3] + (int)local[out[t] & 7] + dyn[t ^ 1] + (int)p.b;
  out[t] = v + atomicAdd(&counter, 0);
}
extern "C" __global__ void generic(int* out, int which) {
  __shared__ int s[64]; int mine[4]; int t = threadIdx.x;
  s[t] = t; mine[0] = 7; mine[1] = t; mine[2] = 9; mine[3] = 1;
  out[t] = 5 * t; __syncthreads();
  int* p = which == 0 ? s + t : which == 1 ? out + t : mine + (t & 3);
  *p += 100;
  out[t] = *p + (__isShared(p) ? 1000 : 0) + mine[t & 1];
}
extern "C" __global__ void early(int* out, int n) {
  int t = threadIdx.x; if (t >= n) return;
  switch (out[t]) { case 0: out[t] = 3; break; case 1: out[t] = 8; break; case 2: out[t] = 1; break;
    case 3: out[t] = 12; break; case 4: out[t] = 7; break; case 5: out[t] = 5; break; default: out[t] = -1; }
}
extern "C" __global__ void spin(int* flag, int* out) {
  if (threadIdx.x == 0) {
    int v; do { asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(flag)); } while (v == 0);
    out[1] = out[0] + v;
  } else if (threadIdx.x == 32) {
    out[0] = 40; asm volatile("st.release.gpu.global.s32 [%0], 2;" :: "l"(flag));
  }
}
"""

VECTORS = {"v2.b32": 8, "v4.f32": 16, "v2.u64": 16, "v4.u16": 8, "v2.b8": 2, "v4.u8": 4, "b128": 16, "b64": 8, "b16": 2}


def vector_kernel(name: str, kind: str) -> str:
    """Copies global -> shared -> generic -> local -> global."""
    nbytes = VECTORS[kind]
    count = int(kind[1]) if kind[0] == "v" else 1
    width = int(kind.split(".")[-1].lstrip("bufs"))
    prefix = {8: "%rs", 16: "%rs", 32: "%r", 64: "%rd", 128: "%q"}[width]
    names = [f"{prefix}{8 + i}" for i in range(count)]
    value = "{" + ", ".join(names) + "}" if count > 1 else names[0]
    return entry(
        name,
        f"""
  .shared .align 16 .b8 buf_{name}[1024]; .local .align 16 .b8 mine_{name}[32]; .reg .b128 %q<10>;
  ld.param.u64 %rd1, [p1]; mov.u32 %r40, %tid.x;
  mad.wide.u32 %rd2, %r40, {nbytes}, %rd0; mad.wide.u32 %rd3, %r40, {nbytes}, %rd1;
  mov.u32 %r41, buf_{name}; mad.lo.u32 %r42, %r40, {nbytes}, %r41; cvt.u64.u32 %rd4, %r42; cvta.shared.u64 %rd5, %rd4;
  mov.b64 %rd6, mine_{name};
  ld.global.nc.L1::no_allocate.L2::128B.{kind} {value}, [%rd3]; st.shared.{kind} [%r42], {value};
  ld.{kind} {value}, [%rd5]; st.local.{kind} [%rd6+16], {value}; ld.local.{kind} {value}, [%rd6+16];
  st.global.cs.{kind} [%rd2], {value};""",
        ".param .u64 p0, .param .u64 p1",
    )


COPIES = entry(
    "copies",
    """
  .shared .align 16 .b8 ring[2048];
  ld.param.u64 %rd1, [p1]; mov.u32 %r40, %tid.x; mad.wide.u32 %rd2, %r40, 16, %rd0; mad.wide.u32 %rd3, %r40, 16, %rd1;
  mov.u32 %r41, ring; mad.lo.u32 %r42, %r40, 32, %r41; and.b32 %r43, %r40, 15;
  cp.async.cg.shared.global.L2::128B [%r42], [%rd3], 16, %r43; cp.async.commit_group;
  cp.async.ca.shared.global [%r42+16], [%rd3], 8; cp.async.ca.shared.global [%r42+24], [%rd3+8], 4;
  cp.async.commit_group; cp.async.wait_group 1;
  ld.shared.v4.u32 {%r1, %r2, %r3, %r4}, [%r42]; st.global.v4.u32 [%rd2], {%r1, %r2, %r3, %r4};
  cp.async.wait_all; ld.shared.v2.u32 {%r1, %r2}, [%r42+16]; ld.shared.u32 %r3, [%r42+24];
  st.global.v2.u32 [%rd2+1024], {%r1, %r2}; st.global.u32 [%rd2+1032], %r3;
""",
    ".param .u64 p0, .param .u64 p1",
)

SMALL_ATOMICS = entry(
    "small_atomics",
    """
  ld.param.u64 %rd1, [p1]; mov.b32 %r1, 0x3f800000; mov.b32 %r2, 0x3c003c00; mov.b32 %r3, 0x3f803f80; mov.u32 %r7, 9;
  red.global.add.f32 [%rd0], 0f3F000000; atom.global.add.noftz.f16x2 %r4, [%rd0+4], %r2;
  red.global.add.noftz.bf16x2 [%rd0+8], %r3; atom.global.cas.b32 %r5, [%rd0+12], 0, %r7;
  .shared .align 4 .b8 cell[4]; mov.u32 %r8, %tid.x; setp.eq.u32 %p1, %r8, 0; mov.u32 %r9, cell;
  @%p1 st.shared.u32 [%r9], 0; bar.sync 0; atom.shared.add.u32 %r10, [%r9], 2; red.shared.max.u32 [%r9], 3; bar.sync 0;
  ld.shared.u32 %r11, [%r9]; @%p1 st.global.u32 [%rd0+16], %r11;
  prefetch.global.L2 [%rd1]; prefetchu.L1 [%rd1]; createpolicy.fractional.L2::evict_first.b64 %rd5, 1.0;
  ld.global.L2::cache_hint.u32 %r12, [%rd1], %rd5; @%p1 st.global.L1::evict_last.u32 [%rd0+20], %r12;
  griddepcontrol.wait; griddepcontrol.launch_dependents;
""",
    ".param .u64 p0, .param .u64 p1",
)


DISCARDS = "discard.global.L2 [%rd2], 128; discard.L2 [%rd2], 128;"
DISCARD = entry(
    "discards", f"mov.u32 %r1, %ctaid.x; ld.param.u32 %r2, [p1]; mad.lo.u32 %r1, %r1, 128, %r2;"
    f" cvt.u64.u32 %rd2, %r1; add.u64 %rd2, %rd0, %rd2; {DISCARDS}", ".param .u64 p0, .param .u32 p1"
)  # fmt: skip

REGISTERS = {
    **{f"%{name}.{axis}": None for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"},
    "%laneid": 5, "%warpid": 1, "%nwarpid": 32, "%smid": 0, "%nsmid": 1,
    "%lanemask_eq": 1 << 5, "%lanemask_lt": 31, "%lanemask_le": 63, "%lanemask_gt": 0xFFFFFFC0, "%lanemask_ge": 0xFFFFFFE0,
    "%dynamic_smem_size": 100, "%total_smem_size": 256, "%aggr_smem_size": 1280, "WARP_SZ": 32,
    "%reserved_smem_offset_begin": 0, "%reserved_smem_offset_end": 1024, "%reserved_smem_offset_cap": 1024,
    "%reserved_smem_offset_0": 0, "%reserved_smem_offset_1": 0,
}  # fmt: skip
SPECIAL = entry(
    "special",
    """.shared .b8 some[40]; .reg .b32 %s<40>; mov.u32 %r1, some; mov.u32 %r2, %laneid; mov.u32 %r3, %warpid;
  setp.eq.u32 %p1, %r2, 5; setp.eq.and.u32 %p1, %r3, 1, %p1; mov.u32 %r4, %ctaid.z; setp.eq.and.u32 %p1, %r4, 1, %p1;
  mov.u32 %r4, %ctaid.x; setp.eq.and.u32 %p1, %r4, 1, %p1; @!%p1 ret;"""
    + "".join(f"mov.u32 %s{i}, {name}; st.global.u32 [%rd0+{4 * i}], %s{i};" for i, name in enumerate(REGISTERS))
    + f"mov.u64 %rd3, %current_graph_exec; mov.u64 %rd4, %gridid; or.b64 %rd3, %rd3, %rd4; st.global.u64 [%rd0+{8 * 20}], %rd3;",
)
CLOCKS = entry(
    "clocks",
    """mov.u64 %rd1, %clock64; mov.u64 %rd2, %globaltimer; mov.u32 %r1, %clock; mov.u32 %r2, %clock_hi;
  mov.u32 %r3, %globaltimer_lo; mov.u32 %r4, %globaltimer_hi; pmevent 3; pmevent.mask 0xff; nanosleep.u32 %r1;
WAIT: mov.u64 %rd3, %clock64; sub.u64 %rd4, %rd3, %rd1; setp.lt.u64 %p1, %rd4, 5000; @%p1 bra WAIT;
  st.global.u64 [%rd0], %rd4; sub.u64 %rd2, %rd2, %rd1; st.global.u64 [%rd0+8], %rd2;
  sub.u32 %r3, %r3, %r1; st.global.v2.u32 [%rd0+16], {%r2, %r3}; st.global.u32 [%rd0+24], %r4;""",
)
LOCALS = entry(
    "locals",
    """.local .align 16 .b8 first[16]; .local .align 16 .b8 second[48]; .local .b8 third[4]; ld.param.s32 %rd1, [p1];
  mov.u64 %rd2, second; add.s64 %rd3, %rd2, %rd1; mov.u32 %r1, 7; st.local.u32 [%rd3], %r1;
  mov.u64 %rd4, first; st.local.u32 [%rd4+12], %r1; mov.u64 %rd5, third; st.local.u32 [%rd5], %r1;
  cvta.local.u64 %rd6, %rd3; ld.u32 %r2, [%rd6].unified; st.global.u32 [%rd0], %r2;""",
    ".param .u64 p0, .param .u32 p1",
)
BREAK = entry("breaks", "mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 3; @%p1 brkpt;")


@pytest.fixture(scope="module")
def library(build: Build) -> Library:
    parts = [vector_kernel("vec_" + k.replace(".", "_"), k) for k in VECTORS]
    parts += [COPIES, SMALL_ATOMICS, DISCARD, SPECIAL, CLOCKS, LOCALS, BREAK]
    return build([HEADER + "".join(parts), nvrtc_ptx(SPACES)])


@pytest.mark.parametrize("kind", VECTORS)
def test_vectors(kind: str, library: Library) -> None:
    data = np.random.default_rng(1).integers(0, 256, 64 * VECTORS[kind], np.uint8)
    source, target = aligned(len(data)), aligned(len(data))
    source[:] = data
    counters = run(library, "vec_" + kind.replace(".", "_"), target, source, block=64, read_only=(1,))
    np.testing.assert_array_equal(target, data)
    assert counters.per_buffer["arg1"].load_bytes == len(data) == counters.per_buffer["arg0"].store_bytes
    assert counters.per_buffer["arg1"].load_requests == 2


def test_small_atomics_and_hints(library: Library) -> None:
    out, hint = np.zeros(8, np.uint32), np.array([123], np.uint32)
    counters = run(library, "small_atomics", out, hint, block=64)
    assert out.view(np.float32)[0] == 32.0
    np.testing.assert_array_equal(out[1:2].view(np.float16), [64, 64])
    np.testing.assert_array_equal(out[2:3].view(ml_dtypes.bfloat16).astype(float), [64, 64])
    assert list(out[3:6]) == [9, 128, 123]
    assert counters.per_buffer["arg0"].atomic_requests == 4 * 2
    assert counters.per_buffer["arg0"].atomic_sectors == 4 * 2


def test_asynchronous_copies(library: Library) -> None:
    data, out = aligned(64 * 16).view(np.uint32), aligned(64 * 32).view(np.uint32)
    data[:] = np.random.default_rng(3).integers(1, 2**32, 256, np.uint32)
    run(library, "copies", out, data, block=64)
    copied = out[:256].view(np.uint8).reshape(64, 16)
    for t in range(64):
        kept = data[4 * t : 4 * t + 4].view(np.uint8).copy()
        kept[t % 16 :] = 0
        np.testing.assert_array_equal(copied[t], kept)
        np.testing.assert_array_equal(out[256 + 4 * t : 259 + 4 * t], data[4 * t : 4 * t + 3])


@each_case("schedule", ["ascending", "descending", 0, 7])
def test_state_spaces(schedule: str | int, library: Library) -> None:
    t = np.arange(128)
    start = np.random.default_rng(4).integers(0, 100, 128, np.int32)
    for _ in range(2):  # module variables start afresh with every launch
        out = start.copy()
        run(
            library,
            "spaces",
            out,
            struct.pack("4if", 1, 2, 3, 4, 6.5),
            bytes([7]),
            2.0,
            dynamic_shared=128,
            schedule=schedule,
        )
        pick = np.array([1, 2, 3, 4])[t & 3] + np.array([10, 20, 30, 40])[(7 + t) & 3]
        np.testing.assert_array_equal(out, (t ^ 1) * 3 + pick + 2 * (start & 7) + t + 7 + (t ^ 1) + 6 + 5)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_generic_addresses(which: int, library: Library) -> None:
    out, t = np.zeros(64, np.int32), np.arange(64)
    run(library, "generic", out, which, block=64)
    mine = np.stack([t * 0 + 7, t, t * 0 + 9, t * 0 + 1])
    if which == 2:
        mine[t & 3, t] += 100
    value = (t + 1100, 5 * t + 100, mine[t & 3, t])[which]
    np.testing.assert_array_equal(out, value + mine[t & 1, t])


def test_early_return_and_switch(library: Library) -> None:
    out = np.arange(64, dtype=np.int32) % 8
    expected = np.where(np.arange(64) < 40, np.array([3, 8, 1, 12, 7, 5, -1, -1])[out], out)
    run(library, "early", out, 40, block=64)
    np.testing.assert_array_equal(out, expected)


@each_case("schedule", ["ascending", "descending", 3])
def test_spinning_on_a_flag_lets_others_run(schedule: str | int, library: Library) -> None:
    flag, out = np.zeros(1, np.int32), np.zeros(2, np.int32)
    run(library, "spin", flag, out, block=64, schedule=schedule)
    assert list(out) == [40, 42]


def test_discarded_lines_are_lost(library: Library) -> None:
    line = aligned(512)
    line = line[-line.ctypes.data % 128 :][:384]
    line[:] = 7
    run(library, "discards", line, 128, block=1)
    assert (line[128:256] == 0xFF).all() and (line[:128] == 7).all() and (line[256:] == 7).all()
    for offset, options, kind in ((128, {"read_only": (0,)}, "read_only"), (64, {}, "misaligned"),
                                  (384, {}, "global_out_of_bounds")):  # fmt: skip
        with pytest.raises(KernelFault) as caught:
            run(library, "discards", line, offset, block=1, **options)
        assert caught.value.kind == kind


def test_special_registers(library: Library) -> None:
    out = np.zeros(48, np.uint32)
    run(library, "special", out, grid=(2, 1, 2), block=(8, 3, 4), dynamic_shared=100)
    wanted = [v for v in REGISTERS.values() if v is not None]
    assert list(out[:12]) == [5, 1, 1, 8, 3, 4, 1, 0, 1, 2, 1, 2]
    assert list(out[12 : 12 + len(wanted)]) == wanted
    assert list(out[40:42]) == [0, 0]


def test_clocks_advance(library: Library) -> None:
    runs = []
    for _ in range(2):
        out = np.zeros(4, np.uint64)
        run(library, "clocks", out, block=1)
        waited, apart, clock_pair, timer_high = (int(x) for x in out)
        assert 5000 <= waited < 5100 and 0 < apart < 1000
        assert clock_pair & 0xFFFFFFFF == 0 == timer_high and 0 < clock_pair >> 32 < 1000
        runs.append(waited)
    assert runs[0] == runs[1]


def test_what_runs_over_a_local_array_lies_in_no_other(library: Library) -> None:
    for offset in (0, 44):
        out = np.zeros(1, np.uint32)
        run(library, "locals", out, offset, block=1)
        assert out[0] == 7
    for offset in (-4, 48, 46, 52):
        with pytest.raises(KernelFault) as caught:
            run(library, "locals", np.zeros(1, np.uint32), offset, block=1)
        assert caught.value.kind == "local_out_of_bounds"


def test_breakpoint_is_a_trap(library: Library) -> None:
    with pytest.raises(KernelFault, match=r"brkpt") as caught:
        run(library, "breaks", np.zeros(1, np.uint32), block=32)
    assert caught.value.kind == "trap" and caught.value.thread == (3, 0, 0)
