"""Calibration: every figure of a GPU that kvgen.cycles counts with, measured by kernels of its own in less than a minute."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvgen.compile import Unit, compile_unit, default_cache
from kvgen.errors import DeviceError
from kvgen.verify.probe import Machine, Measured, Sizes
from kvgen.verify.probes import PROBES, Bench

NAME: Final = "calibrate"


@dataclass(frozen=True)
class Calibration:
    """What was measured, what was wrong (a kernel left other sums than its steps give), and the seconds it took."""

    figures: tuple[Measured, ...]
    wrong: tuple[str, ...]
    seconds: float

    def values(self) -> dict[str, float]:
        """The figures by name."""
        return {f.name: f.value for f in self.figures}


def calibrate_unit() -> Unit:
    """The kernels, in one unit."""
    text = (Path(__file__).parent / "calibrate.cu").read_text(encoding="utf-8")
    return Unit(f"{NAME}/{NAME}", "calibrate_fill", text)


def calibrate_cubin(arch: str) -> bytes:
    """The cubin of the kernels, by NVRTC. Raises CompileError and ToolError."""
    return compile_unit(calibrate_unit(), arch, "cubin", cache=default_cache()).data


def calibrate(machine: Machine, sizes: Sizes | None = None) -> Calibration:
    """Run all probes; one whose kernel does something wrong gives no figures, and the others go on."""
    begin, bench = time.monotonic(), Bench(machine, sizes or Sizes())
    figures, wrong = list[Measured](), list[str]()
    for name in PROBES:
        found, why = probed(bench, name)
        figures += found
        wrong += [why] if why else []
    return Calibration(tuple(figures), tuple(wrong), round(time.monotonic() - begin, 2))


def probed(bench: Bench, name: str) -> tuple[list[Measured], str]:
    """The figures of one probe, and what was wrong with it, "" where nothing was. Later probes use what `bench` found before."""
    try:
        return list(PROBES[name](bench)), ""
    except DeviceError as error:
        return [], f"{name}: {error}"
