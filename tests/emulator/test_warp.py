"""Warp operations, matrix fragments, barriers with results, against NumPy on the same lanes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kvgen.emulator import Library
from tests.emulator.conftest import Build
from tests.emulator.programs import HEADER, entry, run

LANES = np.arange(32)
FULL = 0xFFFFFFFF


def lane_kernel(name: str, code: str, out: str = "%r1") -> str:
    """Loads in[tid] into %r0, stores `out` (32 bits) to out[tid]; %r40 is the thread."""
    return entry(
        name,
        f"""
  ld.param.u64 %rd1, [p1]; mov.u32 %r40, %tid.x; and.b32 %r41, %r40, 31;
  mad.wide.u32 %rd2, %r40, 4, %rd0; mad.wide.u32 %rd3, %r40, 4, %rd1; ld.global.u32 %r0, [%rd3];
  {code}
  st.global.b32 [%rd2], {out};""",
        ".param .u64 p0, .param .u64 p1",
    )


def shuffle(mode: str, b: str, c: int) -> str:
    return f"shfl.sync.{mode}.b32 %r1|%p1, %r0, {b}, {c}, 0xffffffff; @!%p1 add.u32 %r1, %r1, 1000000;"


SHUFFLES = {
    "xor3": (shuffle("bfly", "3", 31), LANES ^ 3, LANES >= 0),
    "down5": (shuffle("down", "5", 31), np.where(LANES + 5 < 32, LANES + 5, LANES), LANES + 5 < 32),
    "up4": (shuffle("up", "4", 0), np.where(LANES >= 4, LANES - 4, LANES), LANES >= 4),
    "idx": (shuffle("idx", "9", 31), LANES * 0 + 9, LANES >= 0),
    "idx_width8": (shuffle("idx", "%r41", 0x181F), LANES, LANES >= 0),
    "down_width8": (shuffle("down", "2", 0x181F), np.where(LANES % 8 < 6, LANES + 2, LANES), LANES % 8 < 6),
    "up_width8": (shuffle("up", "2", 0x1800), np.where(LANES % 8 >= 2, LANES - 2, LANES), LANES % 8 >= 2),
}
VOTES = {
    "ballot": ("vote.sync.ballot.b32 %r1, %p1, -1;", lambda p: sum(1 << i for i in range(32) if p[i])),
    "any": ("vote.sync.any.pred %p2, %p1, -1; selp.b32 %r1, 1, 0, %p2;", lambda p: int(p.any())),
    "all": ("vote.sync.all.pred %p2, !%p1, -1; selp.b32 %r1, 1, 0, %p2;", lambda p: int((~p).all())),
    "uni": ("vote.sync.uni.pred %p2, %p1, -1; selp.b32 %r1, 1, 0, %p2;", lambda p: int(p.all() or not p.any())),
}
REDUCTIONS = {
    "add.u32": lambda v: int(v.astype(np.uint64).sum()) & FULL,
    "min.s32": lambda v: int(v.view(np.int32).min()) & FULL,
    "max.u32": lambda v: int(v.max()),
    "and.b32": lambda v: int(np.bitwise_and.reduce(v)),
    "or.b32": lambda v: int(np.bitwise_or.reduce(v)),
    "xor.b32": lambda v: int(np.bitwise_xor.reduce(v)),
}
BARRIERS = {
    "popc.u32": ("bar.red.popc.u32 %r1, 0, %p1;", lambda p: int(p.sum())),
    "and.pred": ("bar.red.and.pred %p2, 0, %p1; selp.b32 %r1, 1, 0, %p2;", lambda p: int(p.all())),
    "or.pred": ("barrier.cta.red.or.pred %p2, 0, %p1; selp.b32 %r1, 1, 0, %p2;", lambda p: int(p.any())),
}


def fragment_kernel(name: str, code: str, loads: int, stores: int, kind: str = "u32") -> str:
    """Lane i loads `loads` words from in[i*loads] into %r0.., runs code, stores %r20.. to out."""
    return entry(
        name,
        f"""
  .shared .align 16 .b8 tile_{name}[2048];
  ld.param.u64 %rd1, [p1]; mov.u32 %r40, %tid.x;
  mad.wide.u32 %rd2, %r40, {4 * stores}, %rd0; mad.wide.u32 %rd3, %r40, {4 * loads}, %rd1;
  {"".join(f"ld.global.u32 %r{i}, [%rd3+{4 * i}]; " for i in range(loads))}
  {code}
  {"".join(f"st.global.u32 [%rd2+{4 * i}], %r{20 + i}; " for i in range(stores))}""",
        ".param .u64 p0, .param .u64 p1",
    )


def mma(shape: str, kind: str) -> str:
    a = "%r0, %r1, %r2, %r3" if shape == "m16n8k16" else "%r0, %r1"
    b = "%r4, %r5" if shape == "m16n8k16" else "%r4"
    return (
        f"mma.sync.aligned.{shape}.row.col.f32.{kind}.{kind}.f32 {{%r20, %r21, %r22, %r23}}, {{{a}}}, {{{b}}}, "
        "{%r6, %r7, %r8, %r9};"
    )


def ldmatrix(count: int, trans: bool) -> str:
    outs = ", ".join(f"%r{20 + i}" for i in range(count))
    return (
        f"mov.u32 %r41, tile_ldm{count}{'t' * trans}; mad.lo.u32 %r42, %r40, 64, %r41; "
        + "".join(
            f"st.shared.v4.b32 [%r42+{16 * i}], {{%r{4 * i}, %r{4 * i + 1}, %r{4 * i + 2}, %r{4 * i + 3}}}; "
            for i in range(4)
        )
        + "bar.sync 0; mad.lo.u32 %r42, %r40, 16, %r41; "
        + f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' * trans}.shared.b16 {{{outs}}}, [%r42];"
    )


@pytest.fixture(scope="module")
def library(build: Build) -> Library:
    parts = [lane_kernel(f"shfl_{n}", c) for n, (c, _, _) in SHUFFLES.items()]
    parts += [lane_kernel(f"vote_{n}", f"setp.lt.s32 %p1, %r0, 0; {c}") for n, (c, _) in VOTES.items()]
    parts += [lane_kernel("redux_" + n.replace(".", "_"), f"redux.sync.{n} %r1, %r0, 0xffffffff;") for n in REDUCTIONS]
    parts += [
        lane_kernel("bar_" + n.replace(".", "_"), f"setp.lt.s32 %p1, %r0, 0; {c}") for n, (c, _) in BARRIERS.items()
    ]
    parts.append(lane_kernel("match_any", "and.b32 %r0, %r0, 3; match.any.sync.b32 %r1, %r0, -1;"))
    parts.append(lane_kernel("match_all", "shr.u32 %r0, %r40, 5; match.all.sync.b32 %r1|%p1, %r0, -1;"))
    parts.append(lane_kernel("elect", "elect.sync %r1|%p1, -1; @%p1 add.u32 %r1, %r1, 77;"))
    parts.append(lane_kernel("activemask", "activemask.b32 %r2; shr.u32 %r3, %r2, %r41; and.b32 %r1, %r3, 1;"))
    parts += [
        fragment_kernel(f"mma_{s}_{k}", mma(s, k), 10, 4) for s in ("m16n8k16", "m16n8k8") for k in ("f16", "bf16")
    ]
    parts += [fragment_kernel(f"ldm{c}{'t' * t}", ldmatrix(c, t), 16, c) for c in (1, 2, 4) for t in (False, True)]
    return build([HEADER + "".join(parts)])


def words(seed: int, n: int = 64) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.random.default_rng(seed).integers(0, 2**32, n, np.uint32)


def lanes(library: Library, name: str, values: np.ndarray) -> np.ndarray:
    out = np.zeros(len(values), np.uint32)
    run(library, name, out, values, block=len(values))
    return out


@pytest.mark.parametrize("name", SHUFFLES)
def test_shuffle(name: str, library: Library) -> None:
    _, source, inside = SHUFFLES[name]
    v = words(1) >> 8
    expected = np.concatenate([v[:32][source], v[32:][source]]) + np.where(np.tile(inside, 2), 0, 1000000)
    np.testing.assert_array_equal(lanes(library, f"shfl_{name}", v), expected)


@pytest.mark.parametrize("name", VOTES)
@pytest.mark.parametrize("fill", ["mixed", "none", "every"])
def test_vote(name: str, fill: str, library: Library) -> None:
    v = {"mixed": words(2), "none": words(2) >> 1, "every": words(2) | np.uint32(2**31)}[fill]
    p = v >= 2**31
    got = lanes(library, f"vote_{name}", v)
    for w in range(2):
        assert set(got[32 * w : 32 * w + 32]) == {VOTES[name][1](p[32 * w : 32 * w + 32])}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_redux(name: str, library: Library) -> None:
    v = words(3)
    got = lanes(library, "redux_" + name.replace(".", "_"), v)
    for w in range(2):
        assert set(got[32 * w : 32 * w + 32]) == {REDUCTIONS[name](v[32 * w : 32 * w + 32])}


@pytest.mark.parametrize("name", BARRIERS)
@pytest.mark.parametrize("seed", [4, 5])
def test_barrier_reduction(name: str, seed: int, library: Library) -> None:
    v = words(seed, 96) | np.uint32(2**31 if seed == 5 else 0)
    assert set(lanes(library, "bar_" + name.replace(".", "_"), v)) == {BARRIERS[name][1](v >= 2**31)}


def test_match(library: Library) -> None:
    v = words(6, 32)
    expected = [sum(1 << j for j in range(32) if v[j] & 3 == v[i] & 3) for i in range(32)]
    np.testing.assert_array_equal(lanes(library, "match_any", v), np.array(expected, np.uint32))
    assert set(lanes(library, "match_all", words(7))) == {FULL}


def test_partial_warp(library: Library) -> None:
    """Lanes the block does not have may be named in a mask; they take no part."""
    v = words(12, 40) | np.uint32(2**31)
    got = lanes(library, "vote_ballot", v)
    assert set(got[:32]) == {FULL} and set(got[32:]) == {0xFF}
    assert set(lanes(library, "vote_all", v >> 1)) == {1}
    assert set(lanes(library, "bar_popc_u32", v)) == {40}


def test_elect_picks_one_lane(library: Library) -> None:
    got = lanes(library, "elect", words(8, 32))
    assert sorted(got) == [0] * 31 + [77]


def test_activemask_contains_the_lane(library: Library) -> None:
    assert set(lanes(library, "activemask", words(9))) == {1}


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("shape", ["m16n8k16", "m16n8k8"])
def test_mma(shape: str, kind: str, library: Library) -> None:
    k = int(shape.split("k")[1])
    dtype = np.float16 if kind == "f16" else ml_dtypes.bfloat16
    rng = np.random.default_rng(10)
    a, b = (rng.standard_normal(s).astype(dtype) for s in ((16, k), (k, 8)))
    c = rng.standard_normal((16, 8)).astype(np.float32)
    # PTX ISA, "Matrix Fragments for mma.m16n8k16": group = lane / 4, pair = lane % 4.
    fragments = np.zeros((32, 10), np.uint32)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for i in range(k // 4):
            row, col = g + 8 * (i % 2), 2 * t + 8 * (i // 2)
            fragments[lane, i] = np.ascontiguousarray(a[row, col : col + 2]).view(np.uint32)[0]
        for i in range(k // 8):
            fragments[lane, 4 + i] = np.ascontiguousarray(b[2 * t + 8 * i : 2 * t + 8 * i + 2, g]).view(np.uint32)[0]
        for i in range(4):
            fragments[lane, 6 + i] = c[g + 8 * (i // 2), 2 * t + i % 2].view(np.uint32)
    out = np.zeros((32, 4), np.float32)
    run(library, f"mma_{shape}_{kind}", out, fragments, block=32)
    expected = a.astype(np.float64) @ b.astype(np.float64) + c
    for lane in range(32):
        for i in range(4):
            assert out[lane, i] == pytest.approx(expected[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2], abs=1e-4)


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count: int, trans: bool, library: Library) -> None:
    memory = np.random.default_rng(11).integers(0, 2**32, 512, np.uint32)
    out = np.zeros((32, count), np.uint32)
    run(library, f"ldm{count}{'t' * trans}", out, memory, block=32)
    rows = memory.view(np.uint16).reshape(-1, 8)[: 8 * count].reshape(count, 8, 8)
    for m in range(count):
        matrix = rows[m].T if trans else rows[m]
        np.testing.assert_array_equal(out[:, m], np.ascontiguousarray(matrix).reshape(-1).view(np.uint32))
