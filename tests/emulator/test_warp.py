"""Warp operations, and barriers with results, against NumPy on the same lanes."""

from __future__ import annotations

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
