"""Device functions that were not inlined: parameters, results, recursion, function pointers, stack, local memory."""

from __future__ import annotations

import numpy as np
import pytest

from kvgen.emulator import KernelFault, Library
from tests.emulator.conftest import Build
from tests.emulator.programs import HEADER, aligned, entry, nvrtc_ptx, run
from tests.support.each_case import each_case

CUDA = r"""
struct Six { int v[6]; };
struct Mixed { char c; double d; short s; };
__device__ int bias = 7;
__device__ __noinline__ int factorial(int n) { return n <= 1 ? 1 : n * factorial(n - 1) + bias; }
__device__ int is_even(unsigned n);
__device__ __noinline__ int is_odd(unsigned n) { return n == 0 ? 0 : is_even(n - 1) + 0 * bias; }
__device__ __noinline__ int is_even(unsigned n) { return n == 0 ? 1 : is_odd(n - 1) + 0 * bias; }
__device__ __noinline__ Six rotate(Six a, int k) { Six r; for (int i = 0; i < 6; i++) r.v[i] = a.v[(i + k) % 6] + k; return r; }
__device__ __noinline__ double mixed(Mixed m, char c, unsigned short u, float f) { return m.c + m.d * m.s + c + u + f; }
__device__ __noinline__ void scatter(int* to, int n) { for (int i = 0; i < n; i++) to[i] = 10 * i + n; }
__device__ __noinline__ int add(int a, int b) { return a + b; }
__device__ __noinline__ int sub(int a, int b) { return a - b; }
__device__ __noinline__ int mul(int a, int b) { return a * b; }
__device__ int (*operations[3])(int, int) = {add, sub, mul};
struct Shape { __device__ virtual int area(int k) const = 0; };
struct Square : Shape { int s; __device__ Square(int s) : s(s) {} __device__ int area(int k) const override { return s * s + k; } };
struct Oblong : Shape { int a, b; __device__ Oblong(int a, int b) : a(a), b(b) {} __device__ int area(int k) const override { return a * b - k; } };
__device__ __noinline__ int reversed(int v) {
  __shared__ int turn[64]; int t = threadIdx.x; turn[63 - t] = v; __syncthreads(); v = turn[t]; __syncthreads(); return v;
}
extern __shared__ int dynamic[];
__device__ __noinline__ int neighbour(int v) { int t = threadIdx.x; dynamic[t] = v; __syncthreads(); return dynamic[t ^ 1]; }
__device__ __noinline__ int warp_sum(int v) { for (int i = 16; i; i >>= 1) v += __shfl_xor_sync(~0u, v, i); return v; }
__device__ __noinline__ void leave_early(int t) { if (t & 1) asm volatile("exit;"); }
__device__ __noinline__ float deep(const float* p, int n, int stride) { float s = 0; for (int i = 0; i < n; i++) s += p[i * stride]; return s; }

extern "C" __global__ void recursion(int* out) { int t = threadIdx.x; out[t] = factorial(t & 7) * 2 + is_even(t); }
extern "C" __global__ void structs(int* out, double* wide, Six a) {
  int t = threadIdx.x; Six r = rotate(a, t % 5); int s = 0; for (int i = 0; i < 6; i++) s = s * 3 + r.v[i]; out[t] = s;
  Mixed m = {(char)-t, t * 0.5, (short)(t - 9)}; wide[t] = mixed(m, (char)(t + 120), (unsigned short)(65530 + t), 0.25f);
}
extern "C" __global__ void locals(int* out, int n) { int a[16]; int t = threadIdx.x; scatter(a, n); out[t] = a[t % n]; }
extern "C" __global__ void pointers(int* out, int which) {
  int t = threadIdx.x; Square q(t); Oblong o(t, 3); Shape* s = t & 1 ? (Shape*)&q : (Shape*)&o;
  out[t] = operations[(t + which) % 3](t, 5) * 1000 + s->area(t);
}
extern "C" __global__ void shared_a(int* out) { int t = threadIdx.x; int n = neighbour(t * 100); out[t] = reversed(t * 3) + n + warp_sum(t) + dynamic[t]; }
extern "C" __global__ void shared_b(int* out) {
  __shared__ int own[64]; int t = threadIdx.x; own[t] = t; __syncthreads(); out[t] = reversed(own[t ^ 3]) + neighbour(t * 100);
}
extern "C" __global__ void exits(int* out) { int t = threadIdx.x; leave_early(t); out[t] = 1; }
extern "C" __global__ void plain(int* out) { out[threadIdx.x] = 3; }
extern "C" __global__ void strided(float* out, const float* in) { out[threadIdx.x] = deep(in + threadIdx.x, 4, 32); }
"""  # noqa: E501
T = np.arange(64)


@pytest.fixture(scope="module")
def library(build: Build) -> Library:
    return build([nvrtc_ptx(CUDA)])


@pytest.fixture(scope="module", params=["ascending", "descending", 5])
def schedule(request: pytest.FixtureRequest) -> str | int:
    found: str | int = request.param
    return found


def results(
    library: Library, name: str, *more: object, schedule: str | int = "ascending", shared: int = 0
) -> np.ndarray:
    out = aligned(64 * 4).view(np.int32)
    run(library, name, out, *more, block=64, schedule=schedule, dynamic_shared=shared)
    return out


def test_recursion(library: Library, schedule: str | int) -> None:
    def factorial(n: int) -> int:
        return 1 if n <= 1 else n * factorial(n - 1) + 7

    expected = [factorial(t & 7) * 2 + (t % 2 == 0) for t in range(64)]
    np.testing.assert_array_equal(results(library, "recursion", schedule=schedule), expected)


def test_structs_by_value(library: Library) -> None:
    a = np.array([3, -1, 4, 1, -5, 9], np.int32)
    wide = np.zeros(64, np.float64)
    out = results(library, "structs", wide, a.tobytes())
    for t in range(64):
        k, s = t % 5, 0
        for i in range(6):
            s = s * 3 + int(a[(i + k) % 6]) + k
        assert out[t] == s
        c, u = (t + 120 + 128) % 256 - 128, (65530 + t) % 65536
        assert wide[t] == -t + t * 0.5 * (t - 9) + c + u + 0.25


def test_local_array_of_the_caller(library: Library) -> None:
    np.testing.assert_array_equal(results(library, "locals", 7), 10 * (T % 7) + 7)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_function_pointers_and_virtual_functions(which: int, library: Library) -> None:
    picked = np.choose((T + which) % 3, [T + 5, T - 5, T * 5])
    np.testing.assert_array_equal(
        results(library, "pointers", which), picked * 1000 + np.where(T & 1, T * T + T, T * 3 - T)
    )


def test_shared_memory_of_functions(library: Library, schedule: str | int) -> None:
    """One function's arrays lie at one place for kernels whose own shared memory differs."""
    sums = np.repeat(T.reshape(2, 32).sum(1), 32)
    got = results(library, "shared_a", schedule=schedule, shared=256)
    np.testing.assert_array_equal(got, (63 - T) * 3 + (T ^ 1) * 100 + sums + T * 100)
    got = results(library, "shared_b", schedule=schedule, shared=256)
    np.testing.assert_array_equal(got, ((63 - T) ^ 3) + (T ^ 1) * 100)
    assert library.kernels["shared_a"].static_shared == 256
    assert library.kernels["shared_b"].static_shared == 512
    assert library.kernels["plain"].static_shared == 0


def test_exit_inside_a_function(library: Library, schedule: str | int) -> None:
    np.testing.assert_array_equal(results(library, "exits", schedule=schedule), 1 - T % 2)


def test_requests_of_a_function_are_grouped(library: Library, schedule: str | int) -> None:
    data, out = aligned(512).view(np.float32), aligned(128).view(np.float32)
    data[:] = np.arange(128)
    counters = run(library, "strided", out, data, block=32, schedule=schedule, read_only=(1,))
    np.testing.assert_array_equal(out, data.reshape(4, 32).sum(0))
    loads = counters.per_buffer["arg1"]
    assert (loads.load_requests, loads.load_bytes, loads.load_sectors) == (4, 512, 16)


HAND = (
    HEADER
    + """
.visible .func (.param .b32 r) later(.param .b32 a);
.func (.reg .b32 sum, .reg .f32 twice) both(.reg .b32 a, .reg .b32 b, .reg .f32 f)
{
  add.s32 sum, a, b; add.f32 twice, f, f; ret;
}
.func nothing { .reg .b32 %x; mov.u32 %x, 5; ret; }
.func (.param .align 16 .b8 r[16]) vectors(.param .align 16 .b8 a[16], .param .b32 k)
{
  .reg .b32 %x<5>; ld.param.v4.u32 {%x0, %x1, %x2, %x3}, [a]; ld.param.u32 %x4, [k];
  add.u32 %x0, %x0, %x4; st.param.v2.b32 [r+8], {%x0, %x1}; st.param.v2.b32 [r], {%x2, %x3}; ret;
}
.func (.param .b32 r) five(.param .b32 a) { st.param.b32 [r], 5; ret; }
"""
    + entry(
        "hand",
        """
  .param .b32 top; .reg .b32 got;
  mov.u32 %r30, %tid.x; mul.wide.u32 %rd2, %r30, 40; add.u64 %rd2, %rd0, %rd2;
  call (%r1, %f1), both, (%r30, 100, 0f3FC00000);
  st.global.u32 [%rd2], %r1; st.global.f32 [%rd2+4], %f1;
  call nothing; call.uni nothing;
  { .param .align 16 .b8 in[16]; .param .align 16 .b8 back[16];
    st.param.v4.b32 [in], {%r30, 1, 2, 3}; call (back), vectors, (in, 7);
    ld.param.v4.b32 {%r1, %r2, %r3, %r4}, [back]; st.global.v2.u32 [%rd2+8], {%r1, %r2};
    st.global.v2.u32 [%rd2+16], {%r3, %r4}; }
  st.param.b32 [top], %r30; call (got), later, (top); st.global.u32 [%rd2+24], got;
  call (_), five, (1);
  and.b32 %r5, %r30, 1; setp.eq.u32 %p1, %r5, 1; mov.u32 %r6, 9;
  @%p1 call (%r6), five, (1);
  st.global.u32 [%rd2+28], %r6;
  mov.u64 %rd3, five; mov.u64 %rd4, later; selp.b64 %rd5, %rd3, %rd4, %p1;
  call (%r7), %rd5, (%r30), Either;
  Either: .calltargets five, later;
  st.global.u32 [%rd2+32], %r7;
  call (%r8), %rd5, (%r30), Shape;
  Shape: .callprototype (.param .b32 _) _ (.param .b32 _);
  st.global.u32 [%rd2+36], %r8;""",
    )
    + """
.visible .func (.param .b32 r) later(.param .b32 a)
{ .reg .b32 %x; ld.param.b32 %x, [a]; mul.lo.u32 %x, %x, 11; st.param.b32 [r], %x; ret; }
"""
)


@each_case("schedule", ["ascending", 3])
def test_every_form_of_call(schedule: str | int, build: Build) -> None:
    out = aligned(64 * 40).view(np.int32).reshape(64, 10)
    run(build([HAND]), "hand", out, block=64, schedule=schedule)
    np.testing.assert_array_equal(out[:, 0], T + 100)
    assert set(out[:, 1].copy().view(np.float32)) == {3.0}
    np.testing.assert_array_equal(out[:, 2:6], np.stack([T * 0 + 2, T * 0 + 3, T + 7, T * 0 + 1], 1))
    np.testing.assert_array_equal(out[:, 6], T * 11)
    np.testing.assert_array_equal(out[:, 7], np.where(T & 1, 5, 9))
    np.testing.assert_array_equal(out[:, 8], np.where(T & 1, 5, T * 11))
    np.testing.assert_array_equal(out[:, 9], out[:, 8])


def test_instructions_of_functions_count_for_their_callers(build: Build) -> None:
    text = (
        HEADER
        + ".func leaf { .reg .b32 %x<3>; mov.u32 %x0, 1; mov.u32 %x1, 1; ret; }\n"
        + ".func branch { .reg .pred %p; .reg .b32 %x; mov.u32 %x, %tid.x; setp.lt.u32 %p, %x, 32; @%p call leaf; ret; }\n"
        + entry("calls", "call leaf; call branch;")
        + entry("none", "mov.u32 %r1, 1;")
    )
    library = build([text])
    counters = run(library, "calls", np.zeros(1, np.int32), block=64)
    # ld.param, call, call, ret; leaf once for all and once more for warp 0, which has 3; branch has 4.
    assert counters.thread_instructions == 64 * (4 + 3 + 4) + 32 * 3
    assert counters.warp_instructions == 2 * (4 + 3 + 4) + 3
    assert run(library, "none", np.zeros(1, np.int32), block=64).thread_instructions == 64 * 3


# ---------------------------------------------------------------- what goes wrong
FAULTS = r"""
__device__ int bias = 1;
__device__ __noinline__ int endless(int n) { return n == -1 ? 0 : endless(n + 1) * n + bias; }
__device__ __noinline__ int one(int a) { return a + bias; }
__device__ __noinline__ int two(int a, int b) { return a + b + bias; }
__device__ __noinline__ void fill(int* p, int n) { for (int i = 0; i < n; i++) asm volatile("st.local.u32 [%0], %1;" :: "l"(__cvta_generic_to_local(p + i)), "r"(i)); }
__device__ __noinline__ int* dangling(int n) { int a[8]; for (int i = 0; i < 8; i++) ((volatile int*)a)[i] = n; return (int*)(unsigned long long)(a + n); }
extern "C" __global__ void recurse(int* out, int k) { out[threadIdx.x] = endless(k); }
extern "C" __global__ void stray(int* out, unsigned long long f) { out[threadIdx.x] = f ? ((int (*)(int))f)(1) : one(2); }
extern "C" __global__ void wrong(int* out, int k) {
  unsigned long long f = k ? (unsigned long long)(void*)two : (unsigned long long)(void*)one; out[threadIdx.x] = ((int (*)(int))f)(1);
}
extern "C" __global__ void shifted(int* out, int k) { out[threadIdx.x] = ((int (*)(int))((unsigned long long)(void*)one + k))(1); }
extern "C" __global__ void overrun(int* out, int n) { int a[8]; fill(a, n); out[threadIdx.x] = a[3]; }
extern "C" __global__ void allocation(int* out, int n) {
  int* a; asm volatile("{ .reg .b64 p; alloca.u64 p, %1, 32; cvta.local.u64 %0, p; }" : "=l"(a) : "l"(n * 4ull));
  fill(a, 4); out[threadIdx.x] = a[2] + (int)((unsigned long long)a & 31);
}
__device__ __noinline__ void generic_fill(int* p, int n) { for (int i = 0; i < n; i++) ((volatile int*)p)[i] = i + (bias & 2); }
extern "C" __global__ void generic_overrun(int* out, int n) { int a[8]; generic_fill(n < 0 ? out : a, n); out[threadIdx.x] = ((volatile int*)a)[3]; }
extern "C" __global__ void returned(int* out, int n) { int a[2]; a[0] = 1; fill(a, 2); int* p = n ? dangling(n) : a; fill(p, 1); out[threadIdx.x] = *p; }
"""  # noqa: E501


@pytest.fixture(scope="module")
def faulty(build: Build) -> Library:
    return build([nvrtc_ptx(FAULTS)])


@pytest.mark.parametrize(
    ("kernel", "good", "bad", "kind"),
    [
        ("recurse", -1000, 0, "stack_overflow"),
        ("stray", bytes(8), (0x123456789).to_bytes(8, "little"), "bad_call"),
        ("stray", bytes(8), (8).to_bytes(8, "little"), "bad_call"),
        ("wrong", 0, 1, "bad_call"),
        ("shifted", 0, 8, "bad_call"),
        ("shifted", 0, 1600, "bad_call"),
        ("overrun", 8, 9, "local_out_of_bounds"),
        ("generic_overrun", 8, 9, "local_out_of_bounds"),
        ("allocation", 4, 3, "local_out_of_bounds"),
        ("allocation", 5, 1 << 20, "stack_overflow"),
        ("returned", 0, 1, "local_out_of_bounds"),
    ],
)
@each_case("schedule", ["ascending", "descending", 2])
def test_faults(kernel: str, good: object, bad: object, kind: str, schedule: str | int, faulty: Library) -> None:
    results(faulty, kernel, good, schedule=schedule)
    with pytest.raises(KernelFault) as caught:
        results(faulty, kernel, bad, schedule=schedule)
    assert caught.value.kind == kind, str(caught.value)
    if kernel in ("stray", "shifted"):
        assert "none of the functions" in caught.value.detail
    assert caught.value.source is not None and "kernel.cu" in caught.value.source


def test_targets_of_an_indirect_call(build: Build) -> None:
    text = HEADER + "".join(f".func (.param .b32 r) f{n}() {{ st.param.b32 [r], {n}; ret; }}\n" for n in (1, 2))
    body = "mov.u64 %rd1, f{}; T: .calltargets f1; call (%r1), %rd1, (), T; st.global.u32 [%rd0], %r1;"
    library = build([text + entry("good", body.format(1)) + entry("bad", body.format(2))])
    out = np.zeros(1, np.uint32)
    run(library, "good", out, block=1)
    assert out[0] == 1
    with pytest.raises(KernelFault, match="none of the functions it may reach") as caught:
        run(library, "bad", out, block=1)
    assert caught.value.kind == "bad_call"


def test_parameters_by_address(build: Build) -> None:
    body = "mov.b64 %rd1, p0; add.u64 %rd1, %rd1, {}; ld.param.u32 %r1, [%rd1+4]; st.global.u32 [%rd0], %r1;"
    params = ".param .u64 p0, .param .align 4 .b8 p1[8]"
    library = build([HEADER + "".join(entry(f"at{n}", body.format(n), params) for n in (8, 12, 6))])
    out = np.zeros(1, np.int32)
    run(library, "at8", out, np.array([5, 6], np.int32).tobytes(), block=1)
    assert out[0] == 6
    for name, kind in (("at12", "param_out_of_bounds"), ("at6", "misaligned")):
        with pytest.raises(KernelFault) as caught:
            run(library, name, out, bytes(8), block=1)
        assert caught.value.kind == kind


def test_fast_mode_runs_functions_too(build: Build) -> None:
    np.testing.assert_array_equal(results(build([nvrtc_ptx(CUDA)], mode="fast"), "locals", 7), 10 * (T % 7) + 7)
    fast = build([nvrtc_ptx(FAULTS)], mode="fast")
    for kernel, bad, kind in (("recurse", 0, "stack_overflow"), ("wrong", 1, "bad_call"), ("shifted", 8, "bad_call")):
        with pytest.raises(KernelFault) as caught:
            results(fast, kernel, bad)
        assert caught.value.kind == kind
