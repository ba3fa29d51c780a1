"""How long a kernel takes to compile when nothing is cached: median, 95th percentile and worst, per target.

    python benchmarks/compile_time.py                          every generated kernel, every target of its set
    python benchmarks/compile_time.py --arch sm_90a --repeat 3

Each kernel is compiled alone, one after another, so the times are those a first launch waits. NVRTC's library is
loaded by one compile beforehand, whose time is reported apart. No GPU or driver is needed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvgen.compile import Image, Unit, compile_unit, nvrtc_version, supported_archs

Units = Sequence[tuple[Unit, tuple[str, ...]]]  # each with its targets
_WARM_UP = Unit(name="warm/up", entry="warm_up", text='extern "C" __global__ void warm_up(int* p) { *p = 1; }\n')


@dataclass(frozen=True)
class Summary:
    """Seconds over `count` compiles for one target; `slowest` names the unit behind `worst`."""

    arch: str
    count: int
    median: float
    p95: float
    worst: float
    slowest: str


def measure(units: Units, archs: Sequence[str], repeat: int) -> list[Image]:
    """Compile every unit for each of its targets `repeat` times, cache off; the median run of each."""
    images = []
    for arch in archs:
        for unit in (unit for unit, own in units if arch in own):
            runs = sorted((compile_unit(unit, arch, cache=None) for _ in range(repeat)), key=lambda i: i.seconds)
            images.append(runs[len(runs) // 2])
    return images


def summarize(arch: str, images: Sequence[Image]) -> Summary:
    """Summary of at least one image."""
    seconds = [image.seconds for image in images]
    p95 = statistics.quantiles(seconds, n=20, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]
    slowest = max(images, key=lambda image: image.seconds)
    return Summary(arch, len(seconds), statistics.median(seconds), p95, slowest.seconds, slowest.unit_name)


def run(units_of: Callable[[Sequence[str]], Units], archs: Sequence[str], repeat: int) -> int:
    """Measure and print a table; the process's exit status."""
    units = units_of(archs)
    if not units:
        print("no units to compile")
        return 1
    first = compile_unit(_WARM_UP, archs[0], cache=None).seconds
    images = measure(units, archs, repeat)
    print(
        f"NVRTC {'.'.join(map(str, nvrtc_version()))}; {len(units)} units; first compile of the process {first:.3f} s"
    )
    print(f"{'target':<8} {'count':>5} {'median s':>9} {'p95 s':>9} {'worst s':>9}  slowest")
    groups = [(arch, [image for image in images if image.arch == arch]) for arch in archs]
    for arch, group in [*((arch, group) for arch, group in groups if group), ("all", images)]:
        s = summarize(arch, group)
        print(f"{s.arch:<8} {s.count:>5} {s.median:>9.3f} {s.p95:>9.3f} {s.worst:>9.3f}  {s.slowest}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Cold compile time of the generated kernels.")
    parser.add_argument("--arch", action="append", help="a target, may be repeated; default: all")
    parser.add_argument("--repeat", type=int, default=1, help="compiles of each kernel; the median one counts")
    options = parser.parse_args()
    if options.repeat < 1:
        parser.error(f"--repeat: got {options.repeat}; it must be at least 1")

    from kvgen.codegen.emit import units

    def asked(archs: Sequence[str]) -> Units:
        return [(unit, tuple(a for a in own if a in archs)) for unit, own in units() if not set(archs).isdisjoint(own)]

    return run(asked, options.arch or supported_archs(), options.repeat)


if __name__ == "__main__":
    raise SystemExit(main())
