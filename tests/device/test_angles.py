"""sincos_f32 on the CPU machine against float64: drawn angles, those of real positions, and those next to its edges."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from kvgen.compile import compile_unit, default_cache
from kvgen.compile.sass import count, histogram, sass
from kvgen.emulator import Library, build
from tests.compile.test_sass import needs_tool
from tests.emulator.programs import run
from tests.quant.kernels import memory, unit

Singles = NDArray[np.float32]
TARGETS = ("sm_90a",)
LIMIT = 2.0**24

SOURCE = """\
#include "../device/base/types.cuh"
#include "../device/rows/angles.cuh"

extern "C" __global__ void angles(float* sine, float* cosine, const float* angle, uint32_t count) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) sincos_f32(angle[i], sine[i], cosine[i]);
}
"""


@pytest.fixture(scope="module", params=TARGETS)
def library(request: pytest.FixtureRequest) -> Library:
    ptx = compile_unit(unit(SOURCE, "angles"), request.param, "ptx", cache=default_cache()).data.decode()
    return build([ptx], mode="check")


def sincos(library: Library, angles: Singles) -> tuple[Singles, Singles]:
    count = len(angles)
    sine, cosine = memory(count, np.float32), memory(count, np.float32)
    given = memory(count, np.float32, angles)
    run(library, "angles", sine, cosine, given, count, grid=(-(-count // 128), 1, 1), read_only=(2,))
    return sine, cosine


def ulps(found: Singles, wanted: NDArray[np.float64]) -> float:
    """The largest error, in units of the last place of an f32 of the exact number's size."""
    _, exponent = np.frexp(wanted)
    worst: float = np.max(np.abs(found - wanted) / np.exp2(np.maximum(exponent, -125) - 24.0))
    return worst


@cache
def near_quarter_turns() -> Singles:
    """The f32 that lie nearest to multiples of pi / 2, of those up to 2^24, and the neighbours of each."""
    k = np.arange(1, int(LIMIT / (np.pi / 2)), dtype=np.float64)
    x = (k * (np.pi / 2)).astype(np.float32)
    off = np.abs(np.sin(2 * x.astype(np.float64)))
    least = (np.argpartition(score, 2048)[:2048] for score in (off, off / x))
    nearest = np.concatenate([*(x[rows] for rows in least), x[:2048]])
    zero, most = np.float32(0), np.float32(LIMIT)
    return np.minimum(np.concatenate([nearest, np.nextafter(nearest, zero), np.nextafter(nearest, most)]), most)


def of_positions() -> Singles:
    """f32(position) * f32(frequency), as RoPE has them: theta 500000 over 128 elements."""
    rng = np.random.default_rng(3)
    frequencies = (500_000.0 ** -(np.arange(64) / 64)).astype(np.float32)
    positions = np.concatenate([np.arange(64), rng.integers(0, 1 << 24, 512)]).astype(np.float32)
    return (positions[:, None] * frequencies).reshape(-1).astype(np.float32)


def drawn() -> Singles:
    rng = np.random.default_rng(5)
    scattered = np.exp2(rng.uniform(-30, 24, 40_000)) * rng.choice([-1, 1], 40_000)
    return np.concatenate([scattered, rng.uniform(-LIMIT, LIMIT, 40_000), rng.uniform(-8, 8, 20_000)]).astype(
        np.float32
    )


@pytest.mark.parametrize("angles", [drawn, of_positions, near_quarter_turns])
def test_within_one_ulp(library: Library, angles: object) -> None:
    assert callable(angles)
    x: Singles = angles()
    assert np.abs(x).max() <= LIMIT
    sine, cosine = sincos(library, x)
    exact = x.astype(np.float64)
    assert ulps(sine, np.sin(exact)) <= 0.85 and ulps(cosine, np.cos(exact)) <= 0.85
    np.testing.assert_array_equal(sincos(library, -x[::5]), (-sine[::5], cosine[::5]))


def test_edges(library: Library) -> None:
    """Exact where it can be; tiny angles are their own sine."""
    least, tiny = np.float32(2**-149), np.float32(1.5e-39)
    small = np.array([0.0, -0.0, least, -least, tiny, 2**-126, 1e-20, -1e-20, 1e-5], np.float32)
    sine, cosine = sincos(library, small)
    np.testing.assert_array_equal(sine, small)
    np.testing.assert_array_equal(cosine, np.ones(len(small), np.float32))


def test_what_is_too_large_counts_as_nothing(library: Library) -> None:
    above = np.nextafter(np.float32(LIMIT), np.float32(np.inf))
    large = np.array([above, 3e7, 2.0**31, 1e10, 2.0**63, 1e20, np.finfo(np.float32).max], np.float32)
    found = sincos(library, np.concatenate([large, -large]))
    np.testing.assert_array_equal(found, [[0] * 14, [1] * 14])


def test_no_number(library: Library) -> None:
    none = np.array([np.inf, -np.inf, np.nan, -np.nan], np.float32)
    assert np.isnan(sincos(library, none)).all()


@needs_tool
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100f", "sm_120f"])
def test_machine_code(arch: str) -> None:
    """A straight line of arithmetic: no local memory, no conversion at a fraction of the rate, no branch around a slow path."""
    found = histogram(
        sass(compile_unit(unit(SOURCE, "angles"), arch, cache=default_cache()).data, cache=default_cache())
    )
    print(arch, found)
    for slow in ("LDL", "STL", "F2I", "I2F", "FRND", "MUFU", "CALL", "DMUL", "BSSY"):
        assert not count(found, slow), slow
    assert sum(count(found, name) for name in ("FADD", "FMUL", "FFMA")) <= 40
