"""A set's package whose kernel lacks one synchronisation, which the CPU machine has to find."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from kvgen import KernelSet
from kvgen.codegen.emit import render_device, render_set
from kvgen.schema.loader import LoadedSet
from tests.support import harness


@dataclass(frozen=True)
class MissingSync:
    """In line number `which` of those of file `path` that have `part`: what stands in its place (None: the line is left out),
    and the kinds of fault that say so."""

    part: str
    faults: str
    instead: str | None = None
    which: int = 0
    path: str = "/extend.cu"

    def write(self, kernels: KernelSet, folder: Path) -> None:
        """The generated package without it, to a folder."""
        files = render_device() | render_set(LoadedSet(kernels, "tests/support/missing_sync.py", ""))
        found = 0
        for path, file in files.items():
            text = file.text
            if path.endswith(self.path):
                lines = text.splitlines(keepends=True)
                at = [n for n, line in enumerate(lines) if self.part in line][self.which]
                lines[at] = "" if self.instead is None else lines[at].replace(self.part, self.instead)
                text, found = "".join(lines), found + 1
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        assert found == 1, self.path

    def package(self, kernels: KernelSet, name: str, folder: Path) -> ModuleType:
        """The generated package without it, in a folder that is on the path."""
        self.write(kernels, folder / name)
        (folder / name / "__init__.py").touch()
        return importlib.import_module(f"{name}.{kernels.name}")

    def put(self, kernels: KernelSet, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let tests run this set from the package without it."""
        monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
        module = self.package(kernels, "without_" + name.replace(" ", "_"), folder)
        monkeypatch.setitem(harness._packages, kernels.name, (kernels, module))

    def told(self, message: str) -> bool:
        """True: an error of the CPU machine is of one of these kinds."""
        return message.partition("on the CPU machine: ")[2].partition(":")[0] in self.faults.split()
