"""The ranges of pyproject.toml, and which versions of a package an interpreter can have."""

from __future__ import annotations

import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT: Final = Path(__file__).resolve().parents[2]
BASE, BUILD_SYSTEM = "kvgen", "build-system"


@dataclass(frozen=True)
class Range:
    """What pyproject.toml says of a package: `where` is an extra, BASE or BUILD_SYSTEM; `name` has no extras of the package."""

    where: str
    name: str
    allowed: SpecifierSet

    @property
    def least(self) -> Version:
        """The version behind `>=`."""
        (found,) = (Version(s.version) for s in self.allowed if s.operator == ">=")
        return found


def ranges() -> tuple[Range, ...]:
    """Every range of pyproject.toml, in its order."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = {
        BASE: project["project"]["dependencies"],
        **project["project"]["optional-dependencies"],
        BUILD_SYSTEM: project["build-system"]["requires"],
    }
    parsed = ((where, Requirement(text)) for where, texts in groups.items() for text in texts)
    return tuple(Range(where, canonicalize_name(r.name), r.specifier) for where, r in parsed)


def lowest(python: Path, wanted: Range) -> Version:
    """The lowest version in a range that has a wheel for this interpreter: newer ones of Python have none of the first versions.
    Raises LookupError where there is none."""
    done = subprocess.run(
        (str(python), "-m", "pip", "index", "versions", wanted.name, "--only-binary", ":all:"),
        capture_output=True,
        text=True,
    )
    line = re.search(r"^Available versions: (.*)$", done.stdout, re.M)
    found = [] if line is None else [Version(text) for text in line[1].split(", ")]
    inside = [version for version in found if version in wanted.allowed]
    if not inside:
        raise LookupError(f"{wanted.name}{wanted.allowed}: {done.stderr.strip() or 'no wheel for this interpreter'}")
    return min(inside)
