"""wgmma on every type, layout, major and swizzle, against NumPy on canonical layouts built here chunk by chunk."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np
import pytest

from kvgen.emulator import Library, TensorMap
from tests.emulator.conftest import Build
from tests.emulator.fragments import BITS, FLOATS, A, Array, numbers, packed, raw
from tests.emulator.programs import HEADER, aligned, entry, nvrtc_ptx, run

MODES = {0: 0, 128: 1, 64: 2, 32: 3}  # swizzle in bytes -> descriptor field


@dataclass(frozen=True)
class Form:
    n: int
    a: str
    b: str
    d: str
    trans: str  # of A and B: k or m each, r for A in registers
    signs: tuple[int, int] = (1, 1)
    saturate: bool = False

    @property
    def name(self) -> str:
        signs = "".join("m" if s < 0 else "p" for s in self.signs)
        return f"n{self.n}_{self.a}_{self.b}_{self.d}_{self.trans}_{signs}{'_sat' * self.saturate}"

    @property
    def k(self) -> int:
        return 256 // BITS[self.a]

    @property
    def count(self) -> int:
        return self.n // 4 if self.d == "f16" else self.n // 2


FP8, S8 = ("e4m3", "e5m2"), ("s8", "u8")
TRANS = ["kk", "km", "mk", "mm", "rk", "rm"]
FORMS = [
    *(Form(n, "bf16", "bf16", "f32", t) for n, t in zip((8, 16, 24, 40, 64, 72), TRANS, strict=True)),
    *(Form(n, "f16", "f16", "f32", t) for n, t in zip((16, 88, 8, 32, 48, 24), TRANS, strict=True)),
    *(Form(16, "f16", "f16", "f16", t) for t in ("kk", "rm")),
    *(Form(256, "bf16", "bf16", "f32", t) for t in ("kk", "mm")),
    *(Form(24, "bf16", "bf16", "f32", "km", signs) for signs in ((1, -1), (-1, 1), (-1, -1))),
    *(Form(16, "tf32", "tf32", "f32", t) for t in ("kk", "rk")),
    *(Form(8, a, b, "f32", t) for a in FP8 for b in FP8 for t in ("kk", "rk")),
    *(Form(16, "e4m3", "e5m2", "f16", t) for t in ("kk", "rk")),
    *(Form(16, a, b, "s32", t, saturate=a == "u8") for a in S8 for b in S8 for t in ("kk", "rk")),
    Form(224, "s8", "s8", "s32", "kk"),
]


def kernel(f: Form) -> str:
    """out[thread][count]; p1 what lies in shared memory, p2 what in registers; descriptors relative to dynamic shared."""
    sums = ", ".join(f"%d{i}" for i in range(f.count))
    first = "{%a0, %a1, %a2, %a3}" if f.trans[0] == "r" else "%rd4"
    more = "" if BITS[f.a] == 8 and f.a[0] in "su" else f", {f.signs[0]}, {f.signs[1]}"
    if BITS[f.a] == 16:
        more += "".join(f", {int(t == 'm')}" for t in f.trans if t != "r")
    op = f"wgmma.mma_async.sync.aligned.m64n{f.n}k{f.k}{'.satfinite' * f.saturate}.{f.d}.{f.a}.{f.b}"
    return entry(
        f"wgmma_{f.name}",
        f"""
  .reg .b32 %a<4>; .reg .{"f32" if f.d == "f32" else "b32"} %d<{f.count}>;
  ld.param.u64 %rd1, [p1]; ld.param.u64 %rd2, [p2]; ld.param.u32 %r50, [p3]; ld.param.u32 %r51, [p4];
  ld.param.u64 %rd4, [p5]; ld.param.u64 %rd5, [p6];
  mov.u32 %r40, %tid.x; mov.u32 %r41, dynamic; mul.lo.u32 %r42, %r40, 16;
COPY: setp.ge.u32 %p1, %r42, %r50; @%p1 bra COPIED;
  cvt.u64.u32 %rd6, %r42; add.u64 %rd6, %rd6, %rd1; ld.global.v4.u32 {{%r0, %r1, %r2, %r3}}, [%rd6];
  add.u32 %r43, %r41, %r42; st.shared.v4.u32 [%r43], {{%r0, %r1, %r2, %r3}}; add.u32 %r42, %r42, 2048; bra COPY;
COPIED: fence.proxy.async; bar.sync 0;
  shr.u32 %r44, %r41, 4; cvt.u64.u32 %rd7, %r44; add.u64 %rd4, %rd4, %rd7; add.u64 %rd5, %rd5, %rd7;
  mad.wide.u32 %rd2, %r40, {4 * (4 + f.count)}, %rd2; mad.wide.u32 %rd0, %r40, {4 * f.count}, %rd0;
  {"".join(f"ld.global.b32 %a{i}, [%rd2+{4 * i}]; " for i in range(4))}
  {"".join(f"ld.global.b32 %d{i}, [%rd2+{4 * (4 + i)}]; " for i in range(f.count))}
  setp.ne.u32 %p2, %r51, 0;
  wgmma.fence.sync.aligned;
  {op} {{{sums}}}, {first}, %rd5, %p2{more};
  wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
  {"".join(f"st.global.b32 [%rd0+{4 * i}], %d{i}; " for i in range(f.count))}""",
        ".param .u64 p0, .param .u64 p1, .param .u64 p2, .param .u32 p3, .param .u32 p4, .param .u64 p5, .param .u64 p6",
    )


@pytest.fixture(scope="module")
def library(build: Build) -> Library:
    return build([HEADER + ".extern .shared .align 1024 .b8 dynamic[];\n" + "".join(kernel(f) for f in FORMS)])


# ---------------------------------------------------------------- canonical layouts
@dataclass(frozen=True)
class Operand:
    image: Array  # bytes
    descriptor: int  # but for where the image starts


def chunk_place(row: int, chunk: int, swizzle: int) -> int:
    """Where a 16-byte chunk of a row of a swizzle atom lies in that row."""
    return chunk ^ {0: 0, 32: row // 4, 64: row // 2, 128: row}[swizzle]


def place(matrix: Array, kind: str, major: str, swizzle: int, spare: int, step: int) -> Operand:
    """matrix[mn, k] in the canonical layout, other bytes are noise.

    An atom is 8 rows of 1 (no swizzle), 2, 4 or 8 chunks of 16 bytes; a row runs along k or along mn. Atoms lie `spare`
    atoms further apart than they need. Where rows run along k, the matrix begins `step` times 32 bytes into the atom.
    """
    bits = raw(matrix if major == "k" else matrix.T, kind).astype(f"<u{BITS[kind] // 8}")
    rows = np.ascontiguousarray(bits).view(np.uint8)
    first = 2 * step if major == "k" and swizzle else 0
    chunks, across = rows.shape[1] // 16, max(swizzle // 16, 1)
    atom = 128 * across
    beside = atom * (1 + spare)
    below = beside * -(-(first + chunks) // across)
    image = np.random.default_rng(9).integers(0, 256, below * len(rows) // 8, np.uint8)
    for r in range(len(rows)):
        for c in range(chunks):
            at = r // 8 * below + (first + c) // across * beside
            at += 16 * (r % 8 * across + chunk_place(r % 8, (first + c) % across, swizzle))
            image[at : at + 16] = rows[r, 16 * c : 16 * c + 16]
    if swizzle:  # leading is not looked at where rows run along k
        leading, stride = 16 if major == "k" else beside, below
    else:  # leading is along k
        leading, stride = (beside, below) if major == "k" else (below, beside)
    return Operand(image, first | leading >> 4 << 16 | stride >> 4 << 32 | MODES[swizzle] << 62)


def sums(f: Form, words: Array) -> Array:
    """[64, n] of what the lanes' accumulators hold; "Register fragments for wgmma.mma_async", matrix D."""
    held = np.ascontiguousarray(words).view(np.int32 if f.d == "s32" else FLOATS[f.d])
    out = np.zeros((64, f.n), held.dtype)
    for thread in range(128):
        for i in range(held.shape[1]):
            row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i // 2 % 2)
            out[row, i // 4 * 8 + thread % 4 * 2 + i % 2] = held[thread, i]
    return out


A_SHAPES = {16: "m16n8k16", 32: "m16n8k8", 8: "m16n8k32"}  # each warp holds 16 rows as mma does


def launch(
    library: Library, f: Form, rng: np.random.Generator, swizzles: tuple[int, int], spread: str, keep: bool
) -> tuple[Array, Array, Array, Array]:
    """D, A, B and C as matrices."""
    a, b = numbers(rng, f.a, (64, f.k), spread), numbers(rng, f.b, (f.k, f.n), spread)
    spare, step = rng.integers(2, size=2).tolist(), [int(rng.integers(max(s // 32, 1))) for s in swizzles]
    held = np.zeros((128, 4 + f.count), np.uint32)
    c = rng.integers(-9, 9, 128 * f.n // 2).astype(np.int32 if f.d == "s32" else FLOATS[f.d])
    held[:, 4:] = c.view(np.uint32).reshape(128, f.count)
    first = Operand(np.zeros(0, np.uint8), 0)
    if f.trans[0] != "r":
        first = place(a, f.a, f.trans[0], swizzles[0], spare[0], step[0])
    else:
        warps = [packed(rows, A[A_SHAPES[BITS[f.a]], BITS[f.a]], f.a) for rows in np.split(a, 4)]
        held[:, :4] = np.concatenate(warps)
    second = place(b.T, f.b, f.trans[1], swizzles[1], spare[1], step[1])
    gap = -len(first.image) % 1024
    image = aligned(len(first.image) + gap + len(second.image))
    image[: len(first.image)], image[len(first.image) + gap :] = first.image, second.image
    out = np.zeros((128, f.count), np.uint32)
    descriptors = [struct.pack("<Q", d) for d in (first.descriptor, second.descriptor + (len(first.image) + gap >> 4))]
    arguments = out, image, held, len(image), int(keep), *descriptors
    run(library, f"wgmma_{f.name}", *arguments, dynamic_shared=len(image), read_only=(1, 2))
    return sums(f, out), a, b, sums(f, held[:, 4:]) * keep


def swizzles_of(f: Form) -> list[tuple[int, int]]:
    """All four, of A and of B; a matrix along mn must have whole atoms."""
    out = []
    for s, t in zip((0, 32, 64, 128), (64, 128, 0, 32), strict=True):
        out += [(s, t), (s, s)]
    fits = [(s, t) for s, t in out if f.trans[1] == "k" or f.n * BITS[f.b] // 8 % max(t, 16) == 0]
    return fits or [(0, 0)]


@pytest.mark.parametrize("f", FORMS, ids=lambda f: f.name)
def test_product(f: Form, library: Library) -> None:
    rng = np.random.default_rng(sum(f.name.encode()))
    for i, swizzles in enumerate(swizzles_of(f)):
        spread = "random" if i % 3 == 2 else "exact"
        got, a, b, c = launch(library, f, rng, swizzles, spread, keep=i % 2 == 0)
        wanted = a @ b * f.signs[0] * f.signs[1] + c
        if f.d == "s32":
            np.testing.assert_array_equal(got, wanted.astype(np.int64), f"{swizzles}")
        elif spread == "exact":
            np.testing.assert_array_equal(got, wanted.astype(FLOATS[f.d]), f"{swizzles}")
        else:
            ulp = {"f16": 2.0**-10, "f32": 2.0**-23}[f.d]
            np.testing.assert_allclose(got.astype(np.float64), wanted, rtol=ulp, atol=ulp, err_msg=f"{swizzles}")


# ---------------------------------------------------------------- loaded by TMA
TMA = r"""
typedef unsigned u32;
typedef unsigned long long u64;
struct alignas(64) TensorMap { unsigned char bytes[128]; };
static __device__ __forceinline__ u32 load(u32 to, const TensorMap* map, int count, int step, u32 bytes, u32 barrier) {
  for (int i = 0; i < count; ++i)
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
      :: "r"(to + i * bytes), "l"(map), "r"(i * step), "r"(0), "r"(barrier) : "memory");
  return count * bytes;
}
#define KERNEL(name, trans) extern "C" __global__ void name(const __grid_constant__ TensorMap map_a, \
    const __grid_constant__ TensorMap map_b, float* out, u64 a, u64 b, int loads_a, int loads_b, int step, u32 bytes_a, \
    u32 bytes_b) { \
  extern __shared__ __align__(1024) unsigned char memory[]; __shared__ __align__(8) u64 full; float d[4]; \
  const u32 base = (u32)__cvta_generic_to_shared(memory), barrier = (u32)__cvta_generic_to_shared(&full); \
  if (threadIdx.x == 0) { \
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; fence.mbarrier_init.release.cluster; fence.proxy.async; " \
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" \
      :: "r"(barrier), "r"(loads_a * bytes_a + loads_b * bytes_b) : "memory"); \
    load(base, &map_a, loads_a, step, bytes_a, barrier); load(base + 8192, &map_b, loads_b, step, bytes_b, barrier); } \
  __syncthreads(); \
  asm volatile("{ .reg .pred p; L: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @!p bra L; }" \
    :: "r"(barrier) : "memory"); \
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); \
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 0, 1, 1, " trans ";" \
    : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) : "l"(a + (base >> 4)), "l"(b + (base >> 4) + 512) : "memory"); \
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" \
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) :: "memory"); \
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = d[i]; \
}
KERNEL(along_k, "0, 0")
KERNEL(along_mn, "1, 1")
"""


@pytest.fixture(scope="module")
def tma(build: Build) -> Library:
    return build([nvrtc_ptx(TMA, arch="compute_90a")])


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("major", ["along_k", "along_mn"])
def test_operands_from_tma(major: str, swizzle: Literal[0, 32, 64, 128], tma: Library) -> None:
    """TMA boxes of one swizzled row across, side by side: what a tensor map swizzles, the descriptor of that mode reads."""
    rng = np.random.default_rng(swizzle)
    width = max(swizzle, 16)  # bytes of a row of the box
    across = width // 2
    extent = {"along_k": 16 if swizzle < 32 else across, "along_mn": max(64, across)}[major]
    matrices, maps, descriptors, loads, sizes = [], [], [], [], []
    for mn in (64, 8 if major == "along_k" else across):
        down, right = (mn, extent) if major == "along_k" else (16, mn)
        m = aligned(down * right * 2).view(ml_dtypes.bfloat16).reshape(down, right)
        m[:] = rng.integers(-6, 7, m.shape)
        matrices.append(m)
        box = (across, down)
        maps.append(TensorMap("bfloat16", m.ctypes.data, (right, down), (right * 2,), box, swizzle=swizzle).encode())
        beside, below = down * width, 8 * width
        leading, stride = (below, beside) if major == "along_mn" and not swizzle else (beside, below)
        descriptors.append(struct.pack("<Q", leading >> 4 << 16 | stride >> 4 << 32 | MODES[swizzle] << 62))
        loads.append(right // across)
        sizes.append(down * width)
    out = np.zeros((128, 4), np.float32)
    run(tma, major, *maps, out, *descriptors, *loads, across, *sizes, dynamic_shared=16384, memory=matrices)
    first, second = (m.astype(np.float64) for m in matrices)
    if major == "along_k":
        wanted = first[:, :16] @ second[:, :16].T
    else:
        wanted = first.T[:64] @ second[:, :8]
    np.testing.assert_array_equal(sums(Form(8, "bf16", "bf16", "f32", "kk"), out.view(np.uint32)), wanted)
