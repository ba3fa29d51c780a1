"""The calibration's kernels on the CPU machine in check mode: every sum and step as NumPy has them, and what is made of the
records; no time is one there."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvgen.cycles.device import DEVICES
from kvgen.emulator import KernelFault, Schedule
from kvgen.errors import ArgumentError
from kvgen.verify import probes
from kvgen.verify.calibrate import Calibration, calibrate, calibrate_unit
from kvgen.verify.pipes import PIPES, affine
from kvgen.verify.probe import RECORD, SMALL, CpuMachine, Measured, Sizes, Value, Wrong
from kvgen.verify.probes import PROBES, Bench, sub_cores

ARCHS = ("sm_80", "sm_90a")
# Figures that only Hopper has, or only sm_89 and newer.
HOPPER = {
    "mbarrier", "dsmem", "cluster_barrier", "pdl", "pack_fp8", "pack_fp8_interval",
    "tma", *(f"tma_{end}" for end in ("idle", "l2", "l2_loaded", "beside_1", "beside_2")),
    *(f"{name}_{n}" for name in ("box", "tile") for n in (1024, 4096)),
    "hgmma", "hgmma_rate", *(f"hgmma_{n}" for n in (8, 16, 32, 64, 128, 256)),
}  # fmt: skip
ALL = {
    *(f"{name}{end}" for name in ("fma", "half", "alu", "imad", "mufu", "pack_f16", "hmma") for end in ("", "_interval")),
    "convert", "floor_interval", "convert_interval",
    "constant", "barrier", "lds", "ldsm", "shfl", "shared_accept", "shfl_interval", "shared_bytes", "mio_interval",
    "sub_cores", *(f"sub_core_{w}" for w in range(SMALL.warps)),
    *(f"{name}{end}" for name in ("ldg", "ldgsts") for end in ("", "_idle", "_l2", "_l2_loaded", "_beside_1", "_beside_2")),
    "read_64", "read_1024", "reachable", "clock_memory", "l2_total", "l2_bytes", "multiprocessors", "atomic", "atomic_acq_rel",
    "membar", "membar_alone", "membar_landed", "node", "dependent",
}  # fmt: skip
NONE = {"sub_core_0", "hgmma"}  # may be 0
# What trips are counted with and nothing measures, as docs/verify.md says; and mio_queue, which is found only where time bends.
UNMEASURED = {"bandwidth", "clock_tensor", "operands", "branch", "uniform_interval", "mio_queue", "tma_box"}


@functools.cache
def machine(arch: str) -> CpuMachine:
    return CpuMachine(calibrate_unit(), arch)


@functools.cache
def found(arch: str) -> Calibration:
    return calibrate(machine(arch), SMALL)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_does_what_it_says(arch: str) -> None:
    result = found(arch)
    assert result.wrong == ()
    names = [f.name for f in result.figures]
    assert len(names) == len(set(names)) and set(names) == ALL | (HOPPER if arch == "sm_90a" else set())
    for figure in result.figures:
        assert figure.low <= figure.value <= figure.high and math.isfinite(figure.high), figure
        assert figure.low > 0 or figure.name.startswith("sub_core_") or figure.name in NONE, figure
        assert figure.unit in ("clk", "B/clk", "GB/s", "GHz", "us", "") and figure.what
    assert result.values()["multiprocessors"] == 2 and result.seconds < 60


def test_every_figure_that_trips_are_counted_with_is_measured() -> None:
    wanted = {name for name, _ in DEVICES["H200"].parameters()}
    assert wanted - ALL - HOPPER == UNMEASURED


@pytest.mark.parametrize(("arch", "schedule"), [("sm_90a", "descending"), ("sm_90a", 5), ("sm_80", 11)])
def test_in_any_order_of_threads(arch: str, schedule: Schedule) -> None:
    other = CpuMachine(calibrate_unit(), arch, schedule)
    result = calibrate(other, replace(SMALL, trips=3, chase=48, warps=5, blocks=1))
    assert result.wrong == () and len(result.figures) == len(found(arch).figures) + 1


# Probe -> a mistake in its kernels, and what is then said.
MISTAKES = {
    "instructions": ('"fma.rn.f32 %0, %0, %1, %2;"', '"fma.rn.f32 %0, %0, %1, %0;"', "calibrate_fma: sum"),
    "shared_memory": ("4 * ((i + 32) % 96)", "4 * ((i + 64) % 96)", "calibrate_lds: sum"),
    "products": ("0x4400420040003c00ull", "0x4400420040003e00ull", "calibrate_wgmma_8: sum"),
    "barriers": ("x - there) / 4", "x - there) / 2", "calibrate_cluster: word"),
    "bandwidth": ("(vector >> shift) * odd & (runs - 1)", "(vector >> shift) * odd & (runs - 2)", "calibrate_runs of 64: sum"),
    "l2_total": ("(vector >> shift) * odd & (runs - 1)", "(vector >> shift) * odd & (runs - 2)", "calibrate_runs of L2: sum"),
    "latency": ("steps += kSteps;", "steps += kSteps + 16;", "calibrate_ldg: line"),
    "boxes": ("i & (boxes - 1), bar", "i & (boxes - 2), bar", "calibrate_boxes of 1024: sum"),
    "fences": ("c < copies * flying; ++c", "c < (copies - 1) * flying; ++c", ""),
}  # fmt: skip


@pytest.fixture(scope="module")
def mistaken() -> CpuMachine:
    """All mistakes in one unit."""
    unit = calibrate_unit()
    for old, new, _ in MISTAKES.values():
        assert old in unit.text or new in unit.text, old  # two probes have a kernel
        unit = replace(unit, text=unit.text.replace(old, new))
    return CpuMachine(unit, "sm_90a")


@pytest.mark.parametrize("name", MISTAKES)
def test_a_kernel_that_does_something_else_is_seen(mistaken: CpuMachine, name: str) -> None:
    bench, said = Bench(mistaken, SMALL), MISTAKES[name][2]
    with pytest.raises((Wrong, KernelFault), match=said or "uninitialised"):  # fences: nobody has copied what is read
        list(PROBES[name](bench))


def test_what_is_wrong_is_told_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose launches do nothing has no sums."""

    class Idle(CpuMachine):
        def run(self, launch: Any) -> None:
            return None

    idle = Idle(calibrate_unit(), "sm_90a")
    result = calibrate(idle, SMALL)
    assert {w.partition(":")[0] for w in result.wrong} == set(PROBES) - {"nodes"}
    assert [f.name for f in result.figures] == ["node", "pdl"]
    assert result.wrong[0].startswith("instructions: calibrate_fma: steps: got 0 (")


class Told:
    """A machine whose records are given: kernels that take known times."""

    arch, multiprocessors, l2_bytes = "sm_80", 1, 1 << 12

    def __init__(self, records: Any) -> None:
        self.records = records

    def free_bytes(self) -> int:
        return 1 << 24

    def memory(self, nbytes: int) -> Any:
        told = self.records

        class Memory:
            pointer = 0

            def write(self, data: bytes) -> None:
                return None

            def read(self) -> Any:
                return np.frombuffer(told.tobytes(), np.uint8)

        Memory.nbytes = nbytes  # type: ignore[attr-defined]
        return Memory()

    def bind(self, entry: str, grid: int, block: int, *values: Value, shared: int = 0, pdl: bool = False) -> Any:
        return lambda stream: None

    def tensor_map(self, plan: Any) -> bytes:
        return bytes(128)

    def time(self, launches: Any) -> float:
        return 1.0

    def run(self, launch: Any) -> None:
        return None


def test_warps_of_a_sub_core_are_those_that_slow_each_other() -> None:
    """Eight warps on four sub-cores, in an order that is not the usual one."""
    cores, warps, trips = (0, 1, 2, 3, 1, 0, 3, 2), 8, 2
    records = np.zeros((warps, warps, 2), RECORD)
    for i in range(warps):
        for j in range(warps):
            took = 1000 if i == j or cores[i] != cores[j] else 1990
            for k in range(1 if i == j else 2):
                total = sum(lane + chain + trips * 16 for lane in range(32) for chain in range(8))
                records[i, j, k] = (5000 + 3 * k, 5000 + took, 9, trips * 128, total)
    bench = Bench(Told(records), replace(SMALL, warps=warps))
    figures = {f.name: f.value for f in sub_cores(bench)}
    assert figures["sub_cores"] == 4 and tuple(figures[f"sub_core_{w}"] for w in range(warps)) == cores


def test_latency_and_interval_of_known_records() -> None:
    """One warp: 33 clk a step; sixteen warps that end 640 clk after the first began."""
    steps, chains, lane = SMALL.trips * 16, np.arange(8)[None], np.arange(32)[:, None]
    value = PIPES["fma"].value
    sums = [int(value(lane, np.arange(c)[None], steps).sum()) for c in (1, 8)]
    one = np.array([[(100, 100 + 33 * steps, 1, steps, sums[0]), (0, 1, 1, steps * 8, sums[1])]], RECORD)
    assert probes._latency(Bench(Told(one), SMALL), "fma") == [33.0]
    begins = range(1000, 1016)
    many = np.array([[(1, 2, 1, steps, sums[0]), (b, 1640, 1, steps * 8, sums[1])] for b in begins], RECORD)
    assert probes._interval(Bench(Told(many), SMALL), "fma") == pytest.approx(640 / (16 * steps * chains.size))


@pytest.mark.parametrize(("depth", "issue", "memory"), [(5, 1, 4), (8, 2, 5), (4, 2, 8)])
def test_a_queue_shows_where_issue_bends(depth: int, issue: int, memory: int) -> None:
    """Loads issued into a queue of a known depth, of which the memory takes one at a time."""
    times, left, last = list[int](), list[int](), -issue
    for i in range(24):
        last = max(last + issue, left[i - depth] if i >= depth else 0)
        left.append(max(last, left[-1] if left else 0) + memory)
        times.append(last + 10)
    words = [32 * n for n in range(1, 25)]
    rows = [
        (0, t * SMALL.trips, 1, SMALL.trips, SMALL.trips * w * (w - 1) // 2) for t, w in zip(times, words, strict=True)
    ]
    (figure,) = probes.queue(Bench(Told(np.array(rows, RECORD)), SMALL))
    assert figure.value == pytest.approx(depth, abs=1)


def test_the_figure_under_load_is_where_bandwidth_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fewest streams within 5 % of the best rate, and their latency."""
    rates = {0: (0.0, 500), 1: (10.0, 510), 2: (96.0, 600), 4: (100.0, 900)}

    def chase(bench: Bench, entry: str, lines: int, blocks: int, streams: int, most: int) -> Any:
        rate, took = rates[streams]
        return np.array([(0, took * 16, 1, 16, 0)] * blocks, RECORD), rate

    monkeypatch.setattr(probes, "_chase", chase)
    bench = Bench(Told(np.zeros(4, RECORD)), replace(SMALL, loads=(1, 2, 4)))
    monkeypatch.setattr(Bench, "flush", lambda self: None)
    bench.found["lds"] = Measured("lds", 30.0, 30.0, 30.0, "clk", "")
    figures = {f.name: f.value for f in probes.latency(bench)}
    assert figures["ldg"] == 600 and figures["ldgsts"] == 570 and figures["ldg_idle"] == 500
    assert figures["ldg_beside_4"] == 900 and "tma" not in figures


def test_an_affine_step_repeated() -> None:
    x = 12345
    for n in range(40):
        factor, more = affine(n, 1664525, 1013904223)
        assert (12345 * factor + more) % 2**32 == x
        x = (x * 1664525 + 1013904223) % 2**32


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"trips": 0}, "trips: got 0; it must be at least 1"),
        ({"trips": 121}, "trips: got 121; it must be 1 to 120"),
        ({"lines": 1000}, "lines: got 1000; it must be a power of two"),
        ({"lines": 0}, "lines: got 0"),
        ({"near_bytes": 3 << 20}, "near_bytes: got 3145728"),
        ({"rounds": 24}, "rounds: got 24; it must be a multiple of 16"),
        ({"stream_bytes": 3 << 20}, "stream_bytes: got 3145728"),
        ({"runs": (96,)}, "runs: got 96; it must be a power of two from 16 to 65536"),
        ({"boxes": (512,)}, "boxes: got 512"),
        ({"boxes": ()}, "boxes: got none"),
        ({"loads": (0,)}, r"loads: got \(0,\); it must be numbers of warps from 1 to 31"),
        ({"loads": ()}, r"loads: got \(\)"),
        ({"warps": 17}, "warps: got 17; it must be 2 to 16"),
    ],
)  # fmt: skip
def test_sizes_that_no_kernel_takes(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        Sizes(**change)


def test_steps_of_a_gpu_stay_exact() -> None:
    """Sums of f16 below 2048, of f32 below 2^24, with the sizes that a GPU runs."""
    sizes = Sizes()
    assert sizes.trips * 16 <= 2048 and 16 * sizes.trips * 16 * 4 < 1 << 24
    assert sizes.trips * 8 * 16 * 2 * 4 < 1 << 24  # wgmma
