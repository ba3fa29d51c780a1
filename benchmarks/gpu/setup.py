"""The facts that every child process of a run is started with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setup:
    """Folders: `kernels` is unpacked, `parts` takes files that are too large for an answer. `specs` has the spec file of each
    set, relative to the project. Seconds as in benchmarks.gpu.plan.Patience."""

    project: str
    kernels: str
    parts: str
    device: str
    ordinal: int
    specs: dict[str, str]
    patience: dict[str, float]
    buffer_mib: int
