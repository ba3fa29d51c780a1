"""Counts of check mode, against models in plain Python: sectors, wavefronts, classes, lines, bytes in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvgen.emulator import BufferCounters, Counters, Library, SharedCounters, TensorMap
from kvgen.emulator.classes import CLASSES, instruction_class
from tests.emulator.conftest import Build
from tests.emulator.programs import HEADER, aligned, entry, nvrtc_ptx, run
from tests.support.each_case import each_case

SCHEDULES: tuple[str | int, ...] = ("ascending", "descending", 5)
WIDTHS = {1: "u8", 2: "u16", 4: "u32", 8: "v2.u32", 16: "v4.u32"}
VALUES = {1: "%rs1", 2: "%rs1", 4: "%r1", 8: "{%r1, %r2}", 16: "{%r1, %r2, %r3, %r4}"}

KERNELS = r"""
__device__ __forceinline__ int twice(const int* p) {
  return p[0] + p[64];
}
__device__ __noinline__ int fetch(const int* p, int i) { return p[i]; }
extern "C" __global__ void lines(const int* in, int* out) {
  int t = threadIdx.x;
  out[t] = twice(in + t);
}
extern "C" __global__ void calls(const int* in, int* out) {
  int t = threadIdx.x; out[t] = fetch(in, t) + fetch(in, 8 * t);
}
__device__ __noinline__ int deep(const int* p, int n) { return n ? 3 * deep(p + 32, n - 1) + p[0] : 0; }
extern "C" __global__ void recursive(const int* in, int* out) { out[threadIdx.x] = deep(in + threadIdx.x, 3); }
extern "C" __global__ void side_by_side(const int* in, int* out) {
  int t = threadIdx.x, sum = 0;
#pragma unroll
  for (int i = 0; i < 24; i++) sum = __shfl_xor_sync(~0u, sum, 1) + *(volatile const int*)(in + i * 1024 + t);
  out[t] = sum;
}
extern "C" __global__ void alone(const int* in, int* out, int rounds) {
  int t = threadIdx.x + blockIdx.x * blockDim.x, sum = 0;
  for (int i = 0; i < rounds; i++) sum += in[(i * 640 + t) & 4095];
  out[t] = sum;
}
extern "C" __global__ void ragged(const int* in, int* out) {
  int t = threadIdx.x, sum = 0;
#pragma unroll 1
  for (int i = 0; i <= t; i++) sum += in[i * 8];
  out[t] = sum;
}
extern "C" __global__ void pipeline(const uint4* in, int* out, int stages) {
  __shared__ uint4 s[64 * 4]; int t = threadIdx.x;
  unsigned at = (unsigned)__cvta_generic_to_shared(s + t);
  for (int i = 0; i < stages; i++) {
    int some = (t ^ blockIdx.x) & 1 ? 4 : 16;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(at + i * 1024), "l"(in + t / 2), "r"(some) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    if (i == 0) asm volatile("cp.async.wait_group 0;" ::: "memory");
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  out[t + 64 * blockIdx.x] = s[t].x;
}
extern "C" __global__ void matrices(int* out, int stride, int count) {
  __shared__ __align__(16) unsigned char s[32 * 256]; int t = threadIdx.x;
  for (int i = t; i < 32 * 64; i += 32) ((int*)s)[i] = i;
  __syncthreads();
  unsigned r[4] = {}, at = (unsigned)__cvta_generic_to_shared(s + t * stride);
  if (count == 4) asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
  else asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(at));
  out[t] = r[0] + r[1] + r[2] + r[3];
}
"""


def access(op: str, space: str, width: int) -> str:
    """Threads with offsets[thread] >= 0 load or store `width` bytes there, on the last line but one."""
    kind, value = WIDTHS[width], VALUES[width]
    shared = space == "shared"
    do = f"ld.{space}.{kind} {value}, [%rd4];" if op == "load" else f"st.{space}.{kind} [%rd4], {value};"
    return entry(
        f"{op}_{space}_{width}",
        f"""mov.u32 %r12, %tid.x; mad.wide.u32 %rd2, %r12, 4, %rd0; ld.global.s32 %r9, [%rd2]; ld.param.u64 %rd3, [p1];
  {".shared .align 16 .b8 s[8192]; mov.u32 %r10, s; cvt.u64.u32 %rd3, %r10;" if shared else ""}
  mov.u32 %r1, 0; mov.u32 %r2, 0; mov.u32 %r3, 0; mov.u32 %r4, 0; mov.u16 %rs1, 0;
  {FILL if shared else ""}
  setp.lt.s32 %p1, %r9, 0; @%p1 ret; cvt.s64.s32 %rd5, %r9; add.u64 %rd4, %rd3, %rd5;
  {do}""",
        ".param .u64 p0, .param .u64 p1",
    )


FILL = """mad.lo.u32 %r11, %r12, 16, %r10; st.shared.v4.u32 [%r11], {%r1, %r2, %r3, %r4};
  st.shared.v4.u32 [%r11+2048], {%r1, %r2, %r3, %r4}; st.shared.v4.u32 [%r11+4096], {%r1, %r2, %r3, %r4};
  st.shared.v4.u32 [%r11+6144], {%r1, %r2, %r3, %r4}; bar.sync 0;"""
ATOMICS = "".join(
    entry(
        f"atomics_{width}",
        f""".shared .align 16 .b8 s[8192]; mov.u32 %r12, %tid.x; mad.wide.u32 %rd2, %r12, 4, %rd0; ld.global.u32 %r9, [%rd2];
  mov.u32 %r10, s; mov.u32 %r1, 0; mov.u32 %r2, 0; mov.u32 %r3, 0; mov.u32 %r4, 0; mov.u16 %rs1, 0;
  {FILL} add.u32 %r11, %r10, %r9;
  {op}""",
    )
    for width, op in ((4, "atom.shared.add.u32 %r2, [%r11], 1;"), (2, "atom.shared.cas.b16 %rs2, [%r11], %rs1, %rs1;"))
)


BULK = r"""
extern "C" __global__ void bulk(const __grid_constant__ TensorMap map, const char* in, int* out) {
  __shared__ __align__(128) unsigned char s[3200]; __shared__ u64 bar;
  if (threadIdx.x) return;
  init(&bar, 1); fence_init(); expect(&bar, 3200);
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 2048, [%2];"
    :: "r"(shared(s)), "l"(in + 16), "r"(shared(&bar)) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 1024, [%2];"
    :: "r"(shared(s) + 2048), "l"(in + 4096), "r"(shared(&bar)) : "memory");
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %3}], [%2];"
    :: "r"(shared(s) + 3072), "l"(&map), "r"(shared(&bar)), "r"(0) : "memory");
  wait(&bar, 0);
  out[0] = *(int*)s;
}
"""


@pytest.fixture(scope="module")
def library(build: Build) -> Library:
    accesses = [access(op, space, w) for op in ("load", "store") for space in ("global", "shared") for w in WIDTHS]
    helpers = (Path(__file__).parent / "cuda" / "async.cuh").read_text()
    bulk = nvrtc_ptx(helpers + BULK, "compute_90a", "bulk.cu")
    return build([nvrtc_ptx(KERNELS, name="some/kernel.cu"), HEADER + "".join(accesses) + ATOMICS, bulk])


def last_line(counters: Counters) -> tuple[BufferCounters, SharedCounters]:
    """Traffic of the last line that has any."""
    line = [line for line in counters.lines if line.per_buffer or line.shared.requests][-1]
    return line.traffic, line.shared


# ---------------------------------------------------------------- models
def sectors(starts: Iterable[int], width: int) -> tuple[int, int]:
    """(32-byte sectors of a request, the fewest its bytes could fill)."""
    touched = {b for start in starts for b in range(start, start + width)}
    return len({b // 32 for b in touched}), -(-len(touched) // 32)


def wavefronts(offsets: Sequence[int], width: int, *, atomic: bool = False) -> tuple[int, int, int]:
    """(wavefronts, phases, the most of one phase); lanes whose offset is negative do nothing."""
    group = {8: 16, 16: 8}.get(width, 32)
    ways = []
    for first in range(0, 32, group):
        words = [
            (lane, w)
            for lane, o in enumerate(offsets)
            if o >= 0 and first <= lane < first + group
            for w in range(o // 4, (o + width - 1) // 4 + 1)
        ]
        served = words if atomic else {(0, w) for _, w in words}
        if words:
            ways.append(max(Counter(w % 32 for _, w in served).values()))
    return sum(ways), len(ways), max(ways, default=0)


def warps(offsets: np.ndarray) -> list[list[int]]:
    return [[int(o) for o in warp] for warp in offsets.reshape(-1, 32)]


def loads(width: int) -> np.ndarray:
    """Offsets of four warps: in a row from the middle of a sector, strided, scattered with repeats, with lanes left out."""
    rng, lanes = np.random.default_rng(width), np.arange(32)
    scattered = rng.integers(0, 8192 // width, (2, 32)) * width
    scattered[0, 5:9] = scattered[0, 4]
    scattered[1, rng.random(32) < 0.4] = -1
    return np.stack([(lanes + 1) * width, lanes[::-1] * (128 + width), *scattered]).astype(np.int32).reshape(-1)


def stores(width: int) -> np.ndarray:
    """Offsets of four warps, all different, some lanes left out."""
    rng = np.random.default_rng(width)
    offsets = rng.permutation(8192 // width)[:128] * width
    offsets[:32].sort()
    offsets[rng.random(128) < 0.2] = -1
    return offsets.astype(np.int32)


PATTERNS = {"load": loads, "store": stores}


# ---------------------------------------------------------------- memory
@each_case("schedule", SCHEDULES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("op", PATTERNS)
def test_sectors(op: str, width: int, schedule: str | int, library: Library) -> None:
    offsets, data = PATTERNS[op](width), aligned(8192 + 64)
    counters = run(library, f"{op}_global_{width}", offsets, data, block=128, schedule=schedule)
    base = data.ctypes.data
    models = [sectors([base + o for o in warp if o >= 0], width) for warp in warps(offsets)]
    got = counters.per_buffer["arg1"]
    assert (got.sectors, got.ideal_sectors) == tuple(map(sum, zip(*models, strict=True)))
    assert (got.requests, got.bytes) == (4, width * int((offsets >= 0).sum()))
    assert (got.load_sectors, got.store_sectors) == ((got.sectors, 0) if op == "load" else (0, got.sectors))
    assert got.coalescing == got.sectors / got.ideal_sectors > 1
    assert last_line(counters)[0] == got


@each_case("schedule", SCHEDULES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("op", PATTERNS)
def test_wavefronts(op: str, width: int, schedule: str | int, library: Library) -> None:
    offsets = PATTERNS[op](width)
    counters = run(library, f"{op}_shared_{width}", offsets, aligned(64), block=128, schedule=schedule)
    models = [wavefronts(warp, width) for warp in warps(offsets)]
    got = last_line(counters)[1]
    assert got == SharedCounters(
        requests=4,
        bytes=width * int((offsets >= 0).sum()),
        wavefronts=sum(w for w, _, _ in models),
        ideal_wavefronts=sum(p for _, p, _ in models),
        worst_ways=max(m for _, _, m in models),
    )
    assert got.ways > 1
    fill = SharedCounters(requests=16, bytes=8192, wavefronts=64, ideal_wavefronts=64, worst_ways=1)
    assert counters.shared == got + fill


@pytest.mark.parametrize(
    ("step", "width", "ways"), [(0, 4, 32), (128, 4, 32), (4, 4, 1), (8, 4, 2), (0, 2, 32), (2, 2, 2), (4, 2, 1)]
)
def test_atomics_on_one_word_take_turns(step: int, width: int, ways: int, library: Library) -> None:
    offsets = step * np.arange(32)
    counters = run(library, f"atomics_{width}", np.tile(offsets, 4).astype(np.int32), block=128)
    assert last_line(counters)[1] == SharedCounters(4, 128 * width, 4 * ways, 4, ways)
    assert wavefronts(offsets.tolist(), width, atomic=True)[0] == ways


@pytest.mark.parametrize(
    ("stride", "count", "ways"),
    [(16, 4, 1), (128, 4, 8), (144, 4, 1), (80, 4, 1), (256, 4, 8), (32, 4, 2), (128, 1, 8)],
)
@each_case("schedule", SCHEDULES)
def test_a_matrix_is_a_phase(stride: int, count: int, ways: int, schedule: str | int, library: Library) -> None:
    counters = run(library, "matrices", np.zeros(32, np.int32), stride, count, block=32, schedule=schedule)
    (got,) = [line.shared for line in counters.lines if line.classes.get("tensor") and line.shared.requests]
    assert got == SharedCounters(1, 128 * count, ways * count, count, ways)


# ---------------------------------------------------------------- what belongs together
@each_case("schedule", SCHEDULES)
@pytest.mark.parametrize("workers", [1, 3])
def test_lanes_far_apart_still_make_one_request(schedule: str | int, workers: int, library: Library) -> None:
    """Nothing holds these threads together: one may end before its neighbours begin."""
    data, out = np.zeros(4096, np.int32), np.zeros(640, np.int32)
    counters = run(library, "alone", data, out, 300, grid=(5, 1, 1), block=128, schedule=schedule, workers=workers)
    got = counters.per_buffer["arg0"]
    assert (got.load_requests, got.load_bytes) == (300 * 20, 300 * 640 * 4)
    assert counters == run(library, "alone", data, out, 300, grid=(5, 1, 1), block=128, workers=2)


@each_case("schedule", SCHEDULES)
def test_lanes_that_leave_a_loop_early(schedule: str | int, library: Library) -> None:
    data = aligned(64 * 32).view(np.int32)
    counters = run(library, "ragged", data, aligned(256).view(np.int32), block=64, schedule=schedule)
    got = counters.per_buffer["arg0"]
    assert (got.load_requests, got.load_sectors, got.load_bytes) == (32 + 64, 32 + 64, 4 * 64 * 65 // 2)


@each_case("schedule", SCHEDULES)
def test_lines_and_what_is_inlined_there(schedule: str | int, library: Library) -> None:
    data, out = aligned(512).view(np.int32), aligned(128).view(np.int32)
    counters = run(library, "lines", data, out, block=32, schedule=schedule)
    (inlined,) = [line for line in counters.lines if "arg0" in line.per_buffer]
    assert inlined.source == "some/kernel.cu:3"
    # Two loads of one line and one basic block are two requests.
    assert inlined.per_buffer == {"arg0": BufferCounters(2, 256, 8, 8)}
    (stored,) = [line for line in counters.lines if "arg1" in line.per_buffer]
    assert stored.source == "some/kernel.cu:8"
    assert stored.traffic == BufferCounters(store_requests=1, store_bytes=128, store_sectors=4, store_ideal_sectors=4)
    assert sum(line.warp_instructions for line in counters.lines) == counters.warp_instructions
    assert sum(line.thread_instructions for line in counters.lines) == counters.thread_instructions


@each_case("schedule", SCHEDULES)
def test_a_function_called_twice(schedule: str | int, library: Library) -> None:
    data, out = aligned(1024).view(np.int32), aligned(128).view(np.int32)
    got = run(library, "calls", data, out, block=32, schedule=schedule).per_buffer["arg0"]
    assert (got.load_requests, got.load_sectors, got.load_ideal_sectors) == (2, 4 + 32, 4 + 4)


@each_case("schedule", SCHEDULES)
def test_a_function_that_calls_itself(schedule: str | int, library: Library) -> None:
    counters = run(
        library, "recursive", aligned(512).view(np.int32), np.zeros(32, np.int32), block=32, schedule=schedule
    )
    got = counters.per_buffer["arg0"]
    assert (got.load_requests, got.load_sectors) == (3, 3 * 4)


@each_case("schedule", SCHEDULES)
def test_many_requests_at_once(schedule: str | int, library: Library) -> None:
    data, out = aligned(24 * 4096).view(np.int32), np.zeros(1024, np.int32)
    got = run(library, "side_by_side", data, out, block=1024, schedule=schedule).per_buffer["arg0"]
    assert (got.load_requests, got.load_sectors) == (24 * 32, 24 * 128)


# ---------------------------------------------------------------- instructions
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("add.s32", "integer"), ("mad.wide.u32", "integer"), ("lop3.b32", "integer"), ("setp.lt.and.u32", "integer"),
        ("fma.rn.ftz.f32", "float"), ("setp.gt.f32", "float"), ("set.lt.u32.f32", "float"), ("ex2.approx.f32", "float"),
        ("fma.rn.bf16x2", "half"), ("add.f16", "half"), ("cvt.rn.bf16.f32", "conversion"), ("ld.global.nc.v4.u32", "global"),
        ("st.global.f32", "global"), ("ld.shared.f32", "shared"), ("st.shared::cluster.u32", "shared"), ("ld.local.u32", "local"),
        ("ld.u32", "generic"), ("ld.param.u64", "other"), ("ld.const.u32", "other"), ("atom.global.add.f32", "atomic"),
        ("red.shared.add.u32", "atomic"), ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "tensor"),
        ("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16", "tensor"), ("ldmatrix.sync.aligned.m8n8.x4.b16", "tensor"),
        ("cp.async.cg.shared.global", "async"), ("cp.async.wait_group", "async"), ("bra", "control"), ("call.uni", "control"),
        ("bar.sync", "sync"), ("shfl.sync.bfly.b32", "sync"), ("mbarrier.try_wait.parity.shared::cta.b64", "sync"),
        ("mov.u32", "other"), ("cvta.to.global.u64", "other"), ("selp.b32", "integer"), ("prefetch.global.L2", "other"),
    ],
)  # fmt: skip
def test_classes(text: str, expected: str) -> None:
    assert instruction_class(text) == expected
    assert expected in CLASSES


def test_instructions_by_class_and_line(build: Build) -> None:
    body = """mov.u32 %r1, %tid.x; mad.wide.u32 %rd1, %r1, 4, %rd0; setp.ge.u32 %p1, %r1, 8; @%p1 bra SKIP;
  cvt.rn.f32.u32 %f1, %r1; add.f32 %f1, %f1, %f1;
  fma.rn.f16x2 %r2, %r1, %r1, %r1; st.global.f32 [%rd1], %f1;
SKIP: bar.sync 0; @%p1 add.u32 %r3, %r1, 1;"""
    text = HEADER + entry("k", body)
    found = {}
    for mode in ("check", "fast"):
        counters = run(build([text], mode), "k", np.zeros(8, np.float32), block=64)
        first, *lines = counters.lines[1:]  # the first loads the parameter
        assert [(line.warp_instructions, line.thread_instructions) for line in (first, *lines)] == [
            (8, 256), (2, 16), (2, 16), (4, 128), (2, 64),
        ]  # fmt: skip
        assert first.classes == {"other": 2, "integer": 4, "control": 2}
        assert [line.thread_classes for line in lines] == [
            {"conversion": 8, "float": 8}, {"half": 8, "global": 8}, {"sync": 64, "integer": 64}, {"control": 64},
        ]  # fmt: skip
        found[mode] = (
            counters.classes,
            counters.thread_classes,
            counters.warp_instructions,
            counters.thread_instructions,
        )
        assert set(counters.classes) == set(CLASSES)
        assert counters.classes["integer"] == 4 + 2
        empty = mode == "fast"
        assert (counters.per_buffer["arg0"] == BufferCounters()) is empty
    assert found["check"] == found["fast"]


# ---------------------------------------------------------------- copies
@each_case("schedule", SCHEDULES)
def test_bytes_in_flight(schedule: str | int, library: Library) -> None:
    data, out = aligned(1024).view(np.uint32), np.zeros(128, np.int32)
    for stages, most in ((1, 1), (2, 1), (3, 2), (4, 3)):  # the first is waited for at once, the others at the end
        counters = run(library, "pipeline", data, out, stages, block=64, schedule=schedule, grid=(2, 1, 1), workers=1)
        # Half of the threads, others in each block, read 4 bytes where a neighbour reads 16, and fill up with zeros.
        assert counters.peak_in_flight == most * 32 * (16 + 4)
        got = counters.per_buffer["arg0"]
        assert (got.load_requests, got.load_bytes) == (4 * stages, 2 * stages * 32 * (16 + 4))
        assert (got.load_sectors, got.load_ideal_sectors) == (4 * stages * 8, 4 * stages * 8)
        copied = [line for line in counters.lines if line.classes.get("async") and line.shared.requests]
        assert sum((line.shared for line in copied), SharedCounters()) == SharedCounters(
            2 * 2 * stages, 2 * 1024 * stages, 2 * 8 * stages, 2 * 8 * stages, 1
        )


@pytest.mark.parametrize(("pitch", "sectors"), [(16, 4), (48, 8)])
@each_case("schedule", SCHEDULES)
def test_a_bulk_copy_is_one_request(pitch: int, sectors: int, schedule: str | int, library: Library) -> None:
    """2048 bytes from the middle of a sector, 1024 from the beginning of one, 8 rows of 16 bytes each `pitch` bytes."""
    data = aligned(8192)
    tile = TensorMap("uint32", data.ctypes.data, (4, 8), (pitch,), (4, 8))
    counters = run(library, "bulk", tile.encode(), data, np.zeros(1, np.int32), block=32, schedule=schedule)
    assert counters.per_buffer["arg1"] == BufferCounters(3, 3200, 65 + 32 + sectors, 64 + 32 + 4)
    assert counters.peak_in_flight == 3200


def test_several_launches_together(library: Library) -> None:
    data, out = aligned(512).view(np.int32), aligned(128).view(np.int32)
    one = run(library, "lines", data, out, block=32)
    other = run(library, "pipeline", aligned(1024).view(np.uint32), np.zeros(64, np.int32), 2, block=64)
    both = Counters.sum([one, other, other])
    assert both.warp_instructions == one.warp_instructions + 2 * other.warp_instructions
    assert both.classes["async"] == 2 * other.classes["async"] > 0
    assert both.per_buffer["arg0"] == one.per_buffer["arg0"] + other.per_buffer["arg0"] + other.per_buffer["arg0"]
    assert (both.peak_in_flight, both.shared.worst_ways) == (other.peak_in_flight, other.shared.worst_ways)
    assert len(both.lines) == len(one.lines) + len(other.lines)
    assert (
        both.barriers == 2 * other.barriers and both.warp_operations == one.warp_operations + 2 * other.warp_operations
    )
    assert Counters.sum([]).lines == () and Counters.sum([]).warp_instructions == 0
