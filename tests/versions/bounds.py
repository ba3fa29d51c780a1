"""The ranges of pyproject.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).resolve().parents[2]
BASE, BUILD_SYSTEM = "kvgen", "build-system"


@dataclass(frozen=True)
class Range:
    """What pyproject.toml says of a package: `where` is an extra, BASE or BUILD_SYSTEM; `name` has no extras of the package."""

    where: str
    name: str
    allowed: SpecifierSet

    @property
    def least(self) -> str:
        """The version behind `>=`."""
        (found,) = (s.version for s in self.allowed if s.operator == ">=")
        return found


def ranges(python: str) -> tuple[Range, ...]:
    """Every range that holds for a Python ("3.11") on this system, in the order of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = {
        BASE: project["project"]["dependencies"],
        **project["project"]["optional-dependencies"],
        BUILD_SYSTEM: project["build-system"]["requires"],
    }
    parsed = ((where, Requirement(text)) for where, texts in groups.items() for text in texts)
    return tuple(
        Range(where, canonicalize_name(r.name), r.specifier)
        for where, r in parsed
        if r.marker is None or r.marker.evaluate({"python_version": python})
    )
