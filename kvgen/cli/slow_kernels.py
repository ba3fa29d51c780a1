"""Decodes and extends that stay on CUDA cores: why, and what share of a GPU's bandwidth their recorded trips come to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvgen.ops.decode import Decode
from kvgen.ops.extend import Extend

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgen.cli.project import Project
    from kvgen.lowering.attention.choose import Choice


@dataclass(frozen=True)
class OnCudaCores:
    """A kernel, why it is not on tensor cores, and of a GPU's reachable bandwidth the least and the most percent, by the model of
    docs/cycles.md; no GPU where nothing is recorded of the kernel as it is now, or of an extend, which has no such share."""

    kernel: str
    why: str
    device: str | None
    percent: tuple[float, float] | None
    extends: bool = False

    @property
    def text(self) -> str:
        """A line for a reader."""
        said = f"{self.kernel} is on CUDA cores: {self.why}"
        if self.extends:
            return said
        if self.percent is None:
            return f"{said}; `kvgen compile --record` reckons its share of the bandwidth"
        least, most = self.percent
        return f"{said}; by the model {least:.0f} to {most:.0f} % of what an {self.device} can read"

    @property
    def as_json(self) -> dict[str, Any]:
        """The fields of `kvgen build --json`."""
        return {"kernel": self.kernel, "why": self.why, "device": self.device, "percent_of_reachable": self.percent}


def on_cuda_cores(project: Project) -> list[OnCudaCores]:
    """The slow kernels among the operations that the command is about."""
    found = []
    for item in project.chosen:
        kernels = item.loaded.kernels
        stays = {
            op.name: why
            for op in kernels.ops
            if isinstance(op, Decode | Extend) and op.name in item.ops and (why := _why_slow(op.choices(kernels)))
        }
        facts = _recorded(project, item.name) if stays else {}
        for op in (op for op in kernels.ops if op.name in stays):
            kernel, why = f"{item.name}/{op.name}", stays[op.name]
            if isinstance(op, Extend):
                found.append(OnCudaCores(kernel, why, None, None, extends=True))
            else:
                found.append(_examined(kernel, why, facts.get(op.name, {})))
    return found


def _why_slow(choices: Mapping[str, Choice]) -> str:
    """Why no architecture has tensor cores for the call, by its last candidate with them; "" where one has, or where the first
    candidate of an architecture is on CUDA cores."""
    if not all(choice.fit.division.lanes and choice.why_not for choice in choices.values()):
        return ""
    return next(iter(choices.values())).why_not[-1][1]


def _recorded(project: Project, name: str) -> Mapping[str, Mapping[str, Mapping[str, int]]]:
    """The facts that resources.json has of a set's kernels whose code is still what was recorded."""
    from kvgen.cli.ondisk import read_generated
    from kvgen.cli.project import RESOURCES
    from kvgen.cli.resources_json import read
    from kvgen.files import kind_of

    path = project.config.out / name / RESOURCES
    text = read_generated(path) if kind_of(path) == "file" else None
    now = project.digests[name]
    kernels = (read(text) if text else None) or {}
    return {kernel: entry.facts for kernel, entry in kernels.items() if entry.digest == now.get(kernel)}


def _examined(kernel: str, why: str, facts: Mapping[str, Mapping[str, int]]) -> OnCudaCores:
    """With the trips of the last architecture that has a reference table."""
    from kvgen.cycles.kernel import reference

    for arch, own in list(facts.items())[::-1]:
        device = reference(arch)
        if device is None or not own.get("trip_cycles") or not own.get("trip_bytes"):
            continue
        fastest = own["trip_bytes"] / device.budget_rate
        least, most = (min(100.0, 100 * fastest / own[name]) for name in ("trip_cycles_loaded", "trip_cycles"))
        return OnCudaCores(kernel, why, device.name, (least, most))
    return OnCudaCores(kernel, why, None, None)
