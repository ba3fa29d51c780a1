"""The generated packages of this checkout."""

from __future__ import annotations

import importlib
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def set_names(pattern: str) -> list[str]:
    """The sets under generated/ that a glob names; SystemExit where none does."""
    folder = ROOT / "generated"
    names = sorted(p.parent.name for p in folder.glob("*/__init__.py"))
    found = [n for n in names if fnmatchcase(n, pattern)]
    if not found:
        raise SystemExit(f"--only: got {pattern!r}; it must name some of {', '.join(names)}")
    return found


def generated(name: str) -> ModuleType:
    """A set's package."""
    return importlib.import_module(f"generated.{name}")
