"""The generated packages of this checkout, or of another project."""

from __future__ import annotations

import importlib.util
import sys
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
_project = [ROOT]


def use(folder: Path) -> None:
    """Take specs/ and generated/ from another project's folder from now on."""
    _project[0] = folder.resolve()


def project() -> Path:
    """The folder with specs/ and generated/."""
    return _project[0]


def set_names(pattern: str) -> list[str]:
    """The sets under generated/ that a glob names; SystemExit where none does."""
    names = sorted(p.parent.name for p in (project() / "generated").glob("*/__init__.py"))
    found = [n for n in names if fnmatchcase(n, pattern)]
    if not found:
        raise SystemExit(f"--only: got {pattern!r}; it must name some of {', '.join(names)}")
    return found


def generated(name: str) -> ModuleType:
    """A set's package."""
    return _loaded(project() / "generated" / name / "__init__.py")


def package_in(folder: Path, name: str) -> ModuleType:
    """A package below another folder of generated code."""
    return _loaded(folder / name / "__init__.py")


@cache
def _loaded(path: Path) -> ModuleType:
    # By its file: a package called "generated" of another project may have been imported already.
    spec = importlib.util.spec_from_file_location(f"kvgen_gpu_{path.parent.name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.modules.pop(f"{spec.name}._table", None)  # of a package of the same name in another folder
    spec.loader.exec_module(module)
    return module
