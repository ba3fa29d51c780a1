"""Generated packages with a bug planted in a kernel, or in the device functions that it includes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvgen import KernelSet
from kvgen.codegen.emit import render_device, render_set
from kvgen.schema.loader import LoadedSet


def planted(
    kernels: KernelSet, suffix: str, old: str, new: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    """The set's package below `folder`, where files whose path ends with `suffix` have `new` for every `old`; one has it."""
    files = render_device() | render_set(LoadedSet(kernels, "tests/support/planted.py", ""))
    package, changed = f"planted_in_{kernels.name}", 0
    for path, file in files.items():
        text = file.text.replace(old, new) if path.endswith(suffix) else file.text
        changed += text != file.text
        target = folder / package / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    assert changed, f"no file that ends with {suffix} has {old!r}"
    (folder / package / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    importlib.invalidate_caches()
    return importlib.import_module(f"{package}.{kernels.name}")
