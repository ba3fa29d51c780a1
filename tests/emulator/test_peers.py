"""Kernels in the styles of FlashAttention 3, Marlin, CUTLASS and DeepGEMM at level "hardware": right under every schedule,
and a planted bug is found. Triton's is tests/testing/row_sum.ptx."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvgen.emulator import KernelFault, Library
from tests.emulator.conftest import Build
from tests.emulator.programs import aligned, nvrtc_ptx, run
from tests.support.each_case import each_case

FOLDER = Path(__file__).parent / "cuda"
SCHEDULES = ["ascending", "descending", 3]


@pytest.fixture(scope="module")
def libraries(build: Build) -> dict[str, Library]:
    text = "".join((FOLDER / name).read_text() for name in ("async.cuh", "peers.cu"))
    ptx = nvrtc_ptx(text, arch="compute_90a", name="peers.cu")
    return {mode: build([ptx], mode=mode) for mode in ("hardware", "check")}  # one object


@pytest.fixture(scope="module")
def library(libraries: dict[str, Library]) -> Library:
    return libraries["hardware"]


def scheduler(library: Library, name: str, schedule: str | int) -> tuple[np.ndarray, np.ndarray]:
    out, rounds = np.zeros(128, np.uint32), 4
    run(library, name, out, rounds, block=256, schedule=schedule)
    sums = np.arange(128, dtype=np.uint32)
    for turn in range(2 * rounds):
        sums = sums[::-1] * np.uint32(3) + np.uint32(turn % 2)
    return out, sums


def locks(library: Library, name: str, schedule: str | int) -> tuple[np.ndarray, np.ndarray]:
    parts = np.random.default_rng(1).standard_normal((2, 3, 128)).astype(np.float32)
    out, held = np.zeros((2, 128), np.float32), np.zeros(2, np.int32)
    run(library, name, out, held, parts, 3, grid=(6, 1, 1), read_only=(2,), schedule=schedule)
    assert not held.any()
    return out, (parts[:, 0] + parts[:, 1]) + parts[:, 2]


def multicast(library: Library, name: str, schedule: str | int) -> tuple[np.ndarray, np.ndarray]:
    tiles = 5
    data, out = aligned(1024 * tiles).view(np.uint32), np.zeros((2, 128), np.uint32)
    data[:] = np.random.default_rng(2).integers(0, 1000, data.size)
    run(library, name, out, data, tiles, grid=(2, 1, 1), cluster=(2, 1, 1), read_only=(1,), schedule=schedule)
    total = np.zeros(128, np.uint32)
    for tile in data.reshape(tiles, 256):
        total = total * np.uint32(5) + tile[:128] + tile[:127:-1]
    return out, np.stack([total, total])


KERNELS = {
    "scheduler": (scheduler, "race"),
    "locks": (locks, "race"),
    "multicast": (multicast, "race in_flight"),
}


@each_case("schedule", SCHEDULES)
@pytest.mark.parametrize("name", KERNELS)
def test_right(name: str, schedule: str | int, library: Library) -> None:
    out, expected = KERNELS[name][0](library, f"{name}_right", schedule)
    np.testing.assert_array_equal(out, expected)


@each_case("schedule", SCHEDULES)
@pytest.mark.parametrize("name", KERNELS)
def test_wrong(name: str, schedule: str | int, library: Library) -> None:
    with pytest.raises(KernelFault) as caught:
        KERNELS[name][0](library, f"{name}_wrong", schedule)
    assert caught.value.kind in KERNELS[name][1].split(), str(caught.value)


@each_case("schedule", SCHEDULES)
def test_liberties_are_of_level_check(schedule: str | int, libraries: dict[str, Library]) -> None:
    for name in ("scheduler", "locks"):
        KERNELS[name][0](libraries["check"], f"{name}_right", schedule)
    out, expected = multicast(libraries["hardware"], "multicast_unfenced", schedule)
    np.testing.assert_array_equal(out, expected)
    for name, kind in (("multicast_unfenced", "proxy_fence"), ("multicast_right", "race")):
        with pytest.raises(KernelFault) as caught:
            multicast(libraries["check"], name, schedule)
        assert (caught.value.kind, caught.value.level) == (kind, "check"), str(caught.value)
