"""Sets built without a project, and the machine that their kernels run on."""

from __future__ import annotations

from pathlib import Path

from kvgen import KernelSet
from kvgen.codegen.emit import render_all, write_file
from kvgen.schema.loader import LoadedSet
from kvgen.testing import Check

CHECK = Check(schedules=("ascending", 3))


def build(folder: Path, kernels: KernelSet) -> None:
    """Write the set's package and the device library."""
    for file in render_all([LoadedSet(kernels, "tests/custom", "")]).values():
        write_file(folder, file)
