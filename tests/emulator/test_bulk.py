"""Bulk reductions and masks, copies within and between shared memories, and the forms of the instructions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvgen.emulator import KernelFault, Library, TranslateError
from kvgen.emulator.parser import parse
from kvgen.emulator.writer import translate
from tests.emulator.conftest import Build
from tests.emulator.programs import HEADER as PTX
from tests.emulator.programs import aligned, entry, nvrtc_ptx, run
from tests.support.each_case import each_case

HEADER = (Path(__file__).parent / "cuda" / "async.cuh").read_text()
SCHEDULES = ["ascending", "descending", 1, 2]


# ---------------------------------------------------------------- reductions and masks
def reduce_kernel(name: str, op: str, hint: str = "") -> str:
    body = f"cp.reduce.async.bulk.global.shared::cta.bulk_group{hint}.{op} [%0], [%1], 128{', %2' if hint else ''};"
    operands = ':: "l"(out), "r"(shared(s)), "l"(0ull)' if hint else ':: "l"(out), "r"(shared(s))'
    return f"""extern "C" __global__ void {name}(int* out, const int* in) {{
  __shared__ __align__(16) int s[32]; int t = threadIdx.x; s[t] = in[t]; fence_shared(); __syncthreads();
  if (t == 0) {{ asm volatile("{body}" {operands} : "memory"); commit(); wait_group<0>(); }} }}
"""


def wrapping(op: str, o: int, b: int, kind: str) -> int:
    bits = int(kind[1:])
    if op == "add":
        value = o + b
    elif op in ("min", "max"):
        value = {"min": min, "max": max}[op](o, b)
    elif op == "inc":
        value = 0 if o >= b else o + 1
    elif op == "dec":
        value = b if o == 0 or o > b else o - 1
    else:
        value = {"and": o & b, "or": o | b, "xor": o ^ b}[op]
    return value & (2**bits - 1)


INTEGERS = {"add": "u32 s32 u64", "min": "u32 s32 u64 s64", "max": "u32 s32 u64 s64", "inc": "u32", "dec": "u32",
            "and": "b32 b64", "or": "b32 b64", "xor": "b32 b64"}  # fmt: skip
FLOATS = {"add.f32": np.float32, "add.f64": np.float64, "add.noftz.f16": np.float16,
          "add.noftz.bf16": ml_dtypes.bfloat16, "min.f16": np.float16, "max.bf16": ml_dtypes.bfloat16}  # fmt: skip
MASKED = """extern "C" __global__ void masked(int* out, const int* in) {
  __shared__ __align__(16) int s[32]; int t = threadIdx.x; s[t] = in[t]; fence_shared(); __syncthreads();
  if (t == 0) { asm volatile("cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%0], [%1], 128, %2;"
    :: "l"(out), "r"(shared(s)), "h"((short)0x8421) : "memory"); commit(); wait_group<0>(); } }
"""
BETWEEN = """extern "C" __global__ void between(int* out, const int* in) {
  __shared__ __align__(16) int s[32]; __shared__ __align__(16) int r[32]; __shared__ u64 bar; int t = threadIdx.x;
  if (t == 0) { init(&bar, 1); fence_init(); }
  s[t] = in[t]; r[t] = out[t]; fence_shared(); __syncthreads();
  if (t == 0) { expect(&bar, 128 + 8 + 4);
    send_max(shared(r), s, 64, shared(&bar)); send(shared(r + 16), s, 64, shared(&bar));
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];"
      :: "r"(shared(s + 16)), "r"(77), "r"(78), "r"(shared(&bar)) : "memory");
    asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%0], %1, [%2];"
      :: "r"(shared(s + 18)), "r"(1000), "r"(shared(&bar)) : "memory"); }
  wait(&bar, 0); out[t] = r[t]; out[32 + t] = s[t]; }
"""


@pytest.fixture(scope="module")
def reductions(build: Build) -> Library:
    parts = [reduce_kernel(f"{op}_{k}", f"{op}.{k}") for op, kinds in INTEGERS.items() for k in kinds.split()]
    parts += [reduce_kernel(op.replace(".", "_"), op, ".L2::cache_hint") for op in FLOATS]
    masked = nvrtc_ptx(HEADER + MASKED, arch="compute_100a")
    return build([nvrtc_ptx(HEADER + "".join(parts) + BETWEEN, arch="compute_90a"), masked])


@pytest.mark.parametrize("op", INTEGERS)
def test_integer_reductions(op: str, reductions: Library) -> None:
    rng = np.random.default_rng(5)
    for kind in INTEGERS[op].split():
        dtype = np.dtype(("i" if kind[0] == "s" else "u") + str(int(kind[1:]) // 8))
        info = np.iinfo(dtype)
        n = 128 // dtype.itemsize
        values = [aligned(128).view(dtype) for _ in range(2)]
        for v in values:
            v[:] = rng.integers(info.min, info.max, n, dtype, endpoint=True)
        values[0][:4], values[1][:4] = [0, info.max, info.min, 5], [info.max, 1, info.min, 5]
        expected = [wrapping(op, int(o), int(b), kind) for o, b in zip(*values, strict=True)]
        counters = run(reductions, f"{op}_{kind}", *values, block=32, read_only=(1,))
        np.testing.assert_array_equal(values[0].view(f"u{dtype.itemsize}"), np.array(expected, f"u{dtype.itemsize}"))
        counts = counters.per_buffer["arg0"]
        assert (counts.atomic_requests, counts.atomic_bytes, counts.atomic_sectors) == (1, 128, 4)


@pytest.mark.parametrize("op", FLOATS)
def test_float_reductions(op: str, reductions: Library) -> None:
    dtype = np.dtype(FLOATS[op])
    out, data = aligned(128).view(dtype), aligned(128).view(dtype)
    rng = np.random.default_rng(6)
    out[:], data[:] = rng.standard_normal(len(out)), rng.standard_normal(len(out))
    tiny = ml_dtypes.finfo(dtype).smallest_subnormal
    out[:3], data[:3] = [tiny, -tiny, np.inf], [tiny, 1, 1]
    wide = np.float64 if dtype.itemsize == 2 else dtype
    a, b = out.astype(wide), data.astype(wide)
    if op == "add.f32":  # flushes subnormals
        a, b = (np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x) for x in (a, b))
    expected = {"add": np.add, "min": np.minimum, "max": np.maximum}[op[:3]](a, b).astype(dtype)
    run(reductions, op.replace(".", "_"), out, data, block=32, read_only=(1,))
    np.testing.assert_array_equal(out.view(f"u{dtype.itemsize}"), expected.view(f"u{dtype.itemsize}"))


def test_byte_masks(reductions: Library) -> None:
    out, data = aligned(128), aligned(128)
    out[:], data[:] = 7, np.random.default_rng(8).integers(10, 256, 128)
    run(reductions, "masked", out, data, block=32, read_only=(1,))
    kept = [0x8421 >> (i % 16) & 1 for i in range(128)]
    np.testing.assert_array_equal(out, np.where(kept, data, 7))


@each_case("schedule", SCHEDULES)
def test_within_shared_memory(schedule: str | int, reductions: Library) -> None:
    out, data = aligned(256).view(np.int32), aligned(128).view(np.int32)
    rng = np.random.default_rng(9)
    out[:32], data[:] = rng.integers(-99, 99, 32), rng.integers(-99, 99, 32)
    expected = np.concatenate([np.maximum(out[:16], data[:16]), data[:16], data])
    expected[48:51] = [77, 78, data[18] + 1000]
    run(reductions, "between", out, data, block=32, read_only=(1,), schedule=schedule)
    np.testing.assert_array_equal(out, expected)


# ---------------------------------------------------------------- two blocks of a cluster
# `n` is the rank of the other block, `r` this one's; `s` is 128 ints, as in CASES.
CLUSTER_CASES = {
    "remote_arrivals": ("put(at(s + t, n), 10 * t + r); arrive_remote(at(all, n)); wait(all, 0); v = s[t ^ 3];", ""),
    "remote_relaxed": ("put(at(s + t, n), t); arrive_loosely(at(all, n)); wait(all, 0); v = s[t ^ 3];", "race"),
    "remote_relaxed_fenced": (
        "put(at(s + t, n), 10 * t + r); fence_cluster(); arrive_loosely(at(all, n)); wait(all, 0); v = s[t ^ 3]; SYNC;", ""),
    "remote_relaxed_fenced_for_the_block": (
        "put(at(s + t, n), t); fence_threads(); arrive_loosely(at(all, n)); wait(all, 0); v = s[t ^ 3]; SYNC;", "race"),
    "init_and_relaxed_arrival": (
        "__shared__ u64 late; if (!t) { init(&late, 128); fence_init(); } RELAXED_SYNC;"
        " arrive_remote(at(&late, n)); wait(&late, 0); SYNC;", ""),
    "init_unfenced_and_relaxed_arrival": (
        "__shared__ u64 late; if (!t) init(&late, 128); RELAXED_SYNC;"
        " arrive_remote(at(&late, n)); wait(&late, 0); SYNC;", "race"),
    "arrival_not_waited_for": ("if (r && !t) arrive_remote(at(one, 0));", "exited_block"),
    "arrival_waited_for": ("if (r && !t) arrive_remote(at(one, 0)); if (!r && t == 40) wait(one, 0);", ""),
    "source_leaves": (
        "__shared__ __align__(16) int mine[128]; mine[t] = t; fence_shared(); if (!t && r) expect(one, 512); SYNC;"
        " if (!t && !r) send(at(s, 1), mine, 512, at(one, 1)); if (r) wait(one, 0);", "exited_block in_flight"),
    "fenced_by_one_of_the_writers": (
        "put(at(s + t, n), 7 * t + r); __syncthreads(); if (!t) fence_async(); SYNC;"
        " if (!t) { store(out + 128 * r, s, 512); commit(); wait_group<0>(); } return;", ""),
    "fenced_by_one_too_early": (
        "put(at(s + t, n), 7 * t + r); if (!t) fence_async(); SYNC;"
        " if (!t) { store(out + 128 * r, s, 512); commit(); wait_group<0>(); } return;", "proxy_fence"),
    "multicast": ("if (!t) expect(one, 512); SYNC; if (!t && !r) multicast(s, in, 512, one, 3); wait(one, 0); v = s[t];", ""),
    "multicast_to_none": ("if (!t && !r) multicast(s, in, 512, one, 4);", "bad_copy"),
    "multicast_not_waited": (
        "if (!t) expect(one, 512); SYNC; if (!t && !r) multicast(s, in, 512, one, 3); if (!r) wait(one, 0); v = s[t];",
        "in_flight race uninitialised"),
    "sent": (
        "__shared__ __align__(16) int mine[128]; mine[t] = 7 * t + r; fence_shared(); SYNC;"
        " if (!t) { expect(one, 512); send(at(s, n), mine, 512, at(one, n)); } wait(one, 0); v = s[t ^ 1]; SYNC;", ""),
    "sent_unfenced": (
        "__shared__ __align__(16) int mine[128]; mine[t] = 7 * t + r; SYNC;"
        " if (!t) { expect(one, 512); send(at(s, n), mine, 512, at(one, n)); } wait(one, 0); v = s[t ^ 1]; SYNC;",
        "proxy_fence"),
    "source_spoilt": (
        "__shared__ __align__(16) int mine[128]; mine[t] = 7 * t + r; fence_shared(); SYNC;"
        " if (!t) { expect_remote(at(one, n), 512); send(at(s, n), mine, 512, at(one, n)); } __syncthreads();"
        " mine[t ^ 2] = 0; wait(one, 0); SYNC;", "in_flight race"),
    "values_sent": (
        "if (!t) expect(one, 512); SYNC; send_value(at(s + t, n), 5 * t + r, at(one, n)); wait(one, 0); v = s[t ^ 9];"
        " SYNC;", ""),
    "wait_remote": ("if (!t) try_remote(at(one, n));", "bad_mbarrier"),
}  # fmt: skip
CLUSTER_RESULTS = {
    **dict.fromkeys(("remote_arrivals", "remote_relaxed_fenced"), lambda r, t: 10 * (t ^ 3) + 1 - r),
    **dict.fromkeys(("init_and_relaxed_arrival", "arrival_waited_for"), lambda r, t: 0 * t),
    "fenced_by_one_of_the_writers": lambda r, t: 7 * t + 1 - r,
    "multicast": lambda r, t: 1000 + t + 0 * r,
    "sent": lambda r, t: 7 * (t ^ 1) + 1 - r,
    "values_sent": lambda r, t: 5 * (t ^ 9) + 1 - r,
}


@pytest.fixture(scope="module")
def clusters(build: Build) -> Library:
    parts = []
    for name, (code, _) in CLUSTER_CASES.items():
        parts.append(f"""extern "C" __global__ void {name}(const int* in, int* out) {{
  __shared__ __align__(128) int s[128]; __shared__ u64 bars[2];
  u64 *one = bars, *all = bars + 1; int t = threadIdx.x, v = 0, r = rank(), n = 1 - r;
  if (t == 0) {{ init(one, 1); init(all, 128); fence_init(); }} SYNC;
  {code}
  out[128 * r + t] = v; }}
""")
    return build([nvrtc_ptx(HEADER + "".join(parts), arch="compute_90a", name="pair.cu")])


@each_case("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CLUSTER_CASES)
def test_in_a_cluster(name: str, schedule: str | int, clusters: Library) -> None:
    data, out = aligned(512).view(np.int32), aligned(1024).view(np.int32)
    data[:] = 1000 + np.arange(128)
    shape: dict[str, Any] = {"grid": (2, 1, 1), "cluster": (2, 1, 1), "read_only": (0,), "schedule": schedule}
    if not CLUSTER_CASES[name][1]:
        run(clusters, name, data, out, **shape)
        r, t = np.indices((2, 128))
        np.testing.assert_array_equal(out.reshape(2, 128), CLUSTER_RESULTS[name](r, t))
        return
    with pytest.raises(KernelFault) as caught:
        run(clusters, name, data, out, **shape)
    assert caught.value.kind in CLUSTER_CASES[name][1].split(), str(caught.value)


FORMS = """
  fence.sc.gpu; fence.acq_rel.cta; fence.acquire.cta; fence.release.gpu; membar.cta; membar.gl;
  fence.acquire.sync_restrict::shared::cluster.cluster; fence.release.sync_restrict::shared::cta.cluster;
  fence.proxy.alias; fence.proxy.async; fence.proxy.async.global; fence.proxy.async.shared::cta;
  fence.proxy.async.shared::cluster; fence.proxy.tensormap::generic.release.gpu; membar.proxy.alias;
  fence.proxy.tensormap::generic.acquire.gpu [%rd0], 128; fence.mbarrier_init.release.cluster;
  fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster;
  fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster;
  cp.async.bulk.prefetch.L2.global.L2::cache_hint [%rd0], 64, %rd1; cp.async.bulk.wait_group 0;
  mov.u32 %r1, 1; st.global.u32 [%rd0], %r1;
"""
REFUSED = {
    "mbarrier.arrive.expect_tx.noComplete.shared.b64 _, [%r1], 1;": "exclude each other",
    "mbarrier.arrive.shared::cluster.b64 %rd1, [%r1];": "needs the sink _",
    "mbarrier.test_wait.parity.suspend.shared.b64 %p1, [%r1], 0;": "unknown modifier .suspend",
    "mbarrier.try_wait.shared::cluster.b64 %p1, [%rd0], %rd1;": "unknown modifier .shared::cluster",
    "cp.async.bulk.global.global.bulk_group [%rd1], [%rd2], 16;": "does not exist",
    "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.ignore_oob [%r1], [%rd1], 16, 0, 0, [%r2];": "6 operands",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f16 [%rd1], [%r1], 16;": "needs .noftz",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.inc.s32 [%rd1], [%r1], 16;": "is not one of u32",
    "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1}], [%r2];": "1 coordinates, expected 2",
    "cp.async.bulk.tensor.3d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r1, %r1, %r1}],"
    " [%r2];": "gather4 and scatter4 are 2d",
    "fence.proxy.async::generic.acquire.sync_restrict::shared::cta.cluster;": "needs one of",
    "fence.proxy.tensormap::generic.acquire.gpu [%rd1], 64;": "128 bytes",
    "tensormap.replace.tile.rank.global.b1024.b32 [%rd1], %r1;": "unknown opcode 'tensormap'",
    "st.async.weak.global.mbarrier::complete_tx::bytes.b32 [%rd1], %r1, [%r2];": "needs one of .shared::cluster",
}


def test_accepted_forms(build: Build) -> None:
    out = aligned(128).view(np.uint32)
    run(build([PTX + entry("forms", FORMS)]), "forms", out, block=1)
    assert out[0] == 1


@pytest.mark.parametrize("code", REFUSED)
def test_refused_forms(code: str) -> None:
    with pytest.raises(TranslateError, match=re.escape(REFUSED[code])):
        translate([parse(PTX + entry("k", code))])
