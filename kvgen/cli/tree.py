"""The output folder against what the specs give: the comparison behind `build` and `check`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvgen.cli.project import RESOURCES, Project
from kvgen.cli.recorded import is_recorded, problem
from kvgen.emit import banner_digest, body_digest, body_of

State = Literal["missing", "extra", "stale", "edited"]


@dataclass(frozen=True)
class Finding:
    """One file that is not what the specs give: its path below the output folder; `ours` where kvgen wrote it."""

    path: str
    state: State
    note: str
    ours: bool = True


def files_on_disk(out: Path) -> Iterator[str]:
    """Every file below the output folder, in order, but Python's caches and hidden files; links are not followed."""
    for folder, folders, names in os.walk(out):
        folders[:] = sorted(f for f in folders if f != "__pycache__" and not f.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield (Path(folder) / name).relative_to(out).as_posix()


def read_text(path: Path) -> str | None:
    """A file's text with its own line endings; None where it is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None


def written_by_kvgen(path: Path) -> bool:
    """Whether a file carries kvgen's banner, or is one of its resources.json."""
    text = read_text(path)
    if text is None:
        return False
    return is_recorded(text) if path.name == RESOURCES else banner_digest(text) is not None


def _makes_package(path: str) -> bool:
    # A user may turn the output folder into a regular package; those files are none of kvgen's business.
    return path in ("__init__.py", "py.typed")


def _compare(path: Path, expected: str) -> tuple[State, str] | None:
    if not path.is_file():
        return "missing", "the specs give it, the folder lacks it"
    text = read_text(path)
    if text == expected:
        return None
    if text is not None and text.replace("\r\n", "\n") == expected:
        return "edited", "its lines end in CRLF; put `* text eol=lf` for this folder into .gitattributes"
    digest = banner_digest(text) if text is not None else None
    if text is None or digest is None:
        return "edited", "its banner is gone"
    if digest != body_digest(body_of(text)):
        return "edited", "its text does not match the digest in its banner"
    return "stale", "intact, but the specs or templates now give something else"


def findings(project: Project, sets: set[str] | None = None) -> list[Finding]:
    """Every difference, by path; with `sets`, only those of these sets and of the device library."""

    def wanted(path: str) -> bool:
        top = path.split("/", 1)[0]
        return sets is None or top in sets or (top == "device" and path in project.files)

    out, found = project.config.out, []
    for path, file in project.files.items():
        result = _compare(out / path, file.text) if wanted(path) else None
        if result:
            found.append(Finding(path, *result))
    records = {f"{s.kernels.name}/{RESOURCES}": s.kernels.name for s in project.sets}
    for path, name in records.items():
        trouble = problem(project, name) if wanted(path) else None
        if trouble:
            found.append(Finding(path, *trouble))
    for path in files_on_disk(out):
        if path in project.files or path in records or _makes_package(path) or not wanted(path):
            continue
        if written_by_kvgen(out / path):
            found.append(Finding(path, "extra", "no spec gives it any more"))
        else:
            found.append(Finding(path, "extra", "not written by kvgen; move it out of this folder", ours=False))
    return sorted(found, key=lambda f: f.path)
