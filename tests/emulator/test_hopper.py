"""A warp-specialised Hopper kernel - TMA ring, mbarriers, wgmma, setmaxnreg, TMA store - and each of its
synchronisations left out in turn."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kvgen.emulator import Counters, KernelFault, Library, TensorMap
from tests.emulator.conftest import Build
from tests.emulator.programs import aligned, nvrtc_ptx, run
from tests.support.each_case import each_case

SOURCE = Path(__file__).parent / "cuda" / "hopper.cu"
SHARED = 4 * 32768 + 2 * 16384
TILES = 11  # the ring of 4 goes round more than twice, and ends in its middle

# What is left out, and the kinds of fault that say so.
WITHOUT = {
    "INIT_FENCE": "proxy_fence",
    "INIT_BARRIER": "bad_mbarrier uninitialised race",
    "EMPTY_WAIT": "in_flight race bad_mbarrier",
    "EXPECT": "deadlock bad_mbarrier in_flight race",
    "FULL_WAIT": "in_flight uninitialised race",
    "WGMMA_FENCE": "missing_fence",
    "COMMIT": "in_flight",
    "WGMMA_WAIT": "in_flight",
    "PATIENCE": "in_flight race",
    "EMPTY_ARRIVE": "deadlock",
    "LAST_WAIT": "in_flight",
    "PROXY_FENCE": "proxy_fence",
    "RESULT_BARRIER": "uninitialised race proxy_fence",
    "STORE_WAIT": "in_flight",
}


def library_of(build: Build, *defines: str) -> Library:
    return build([nvrtc_ptx(SOURCE.read_text(), arch="compute_90a", name=SOURCE.name, defines=defines)])


@pytest.fixture(scope="module")
def operands() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    matrices = []
    for _ in range(2):
        m = aligned(128 * 64 * TILES * 2).view(ml_dtypes.bfloat16).reshape(128, 64 * TILES)
        m[:] = rng.standard_normal(m.shape)
        matrices.append(m)
    return matrices[0], matrices[1]


def tensor_map(m: np.ndarray, rows: int) -> bytes:
    return TensorMap(
        "bfloat16", m.ctypes.data, dims=(m.shape[1], m.shape[0]), strides=(2 * m.shape[1],), box=(64, rows),
        swizzle=128,
    ).encode()  # fmt: skip


def launch(
    library: Library, operands: tuple[np.ndarray, np.ndarray], schedule: str | int
) -> tuple[np.ndarray, Counters]:
    a, b = operands
    c = aligned(128 * 128 * 2).view(ml_dtypes.bfloat16).reshape(128, 128)
    c[:] = np.nan
    maps = [tensor_map(a, 128), tensor_map(b, 128), tensor_map(c, 64)]
    counters = run(
        library, "hopper", *maps, TILES, block=384, dynamic_shared=SHARED, schedule=schedule, memory=(a, b, c)
    )
    return c, counters


@each_case("schedule", ["ascending", "descending", 1, 2])
def test_hopper(schedule: str | int, build: Build, operands: tuple[np.ndarray, np.ndarray]) -> None:
    c, _ = launch(library_of(build), operands, schedule)
    a, b = (m.astype(np.float64) for m in operands)
    np.testing.assert_allclose(c.astype(np.float64), a @ b.T, rtol=2**-8, atol=0.02)


@pytest.mark.parametrize("name", WITHOUT)
def test_each_synchronisation_is_needed(name: str, build: Build, operands: tuple[np.ndarray, np.ndarray]) -> None:
    library = library_of(build, f"WITHOUT_{name}")
    for schedule in ("ascending", "descending", 1):
        with pytest.raises(KernelFault) as caught:
            launch(library, operands, schedule)
        assert caught.value.kind in WITHOUT[name].split(), f"{schedule}: {caught.value}"
