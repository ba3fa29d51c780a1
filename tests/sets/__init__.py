"""Sets that show a reader nothing that a set of generated/ does not: rendered, compiled and recorded, and not checked in as text.

A file here is a spec like those of specs/. `record.txt` has a line a kernel and architecture: the digests of its code and of its
machine code, and what the kernel occupies; and a line a call and architecture that several kernels fit, with the cycles of each.
A pull request shows which lines changed. `python -m tests.sets --record` writes it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvgen.codegen.emit import File, kernel_files, render_all, units_of
from kvgen.compile import Unit, code_digest
from kvgen.schema.loader import LoadedSet, load_folder

FOLDER: Final = Path(__file__).resolve().parent
ROOT: Final = FOLDER.parents[1]
RECORD: Final = FOLDER / "record.txt"
OUT: Final = "generated"  # the folder that texts name
_CANDIDATES: Final = "candidates"
DIGITS: Final = 16  # of the digest of a kernel's code

Facts = dict[str, int]


@functools.cache
def loaded() -> tuple[LoadedSet, ...]:
    """The sets of this folder, by name."""
    return tuple(load_folder(FOLDER, ROOT))


@functools.cache
def checked_in() -> tuple[LoadedSet, ...]:
    """The sets of specs/, by name."""
    return tuple(load_folder(ROOT / "specs", ROOT))


def every() -> tuple[LoadedSet, ...]:
    """All sets of the repository, by name: those of specs/ and these."""
    return tuple(sorted((*checked_in(), *loaded()), key=lambda item: item.kernels.name))


def spec_path(stem: str) -> Path:
    """The spec file of this name, of specs/ or of this folder."""
    own = FOLDER / f"{stem}.py"
    return own if own.is_file() else ROOT / "specs" / f"{stem}.py"


@functools.cache
def files() -> dict[str, File]:
    """The generated files of the sets, with the headers that they include, by path below an output folder."""
    return render_all(list(loaded()))


def units() -> Iterator[tuple[LoadedSet, Unit, tuple[str, ...]]]:
    """Every kernel of the sets, flattened, and its architectures."""
    for item in loaded():
        for unit, (_, archs) in zip(units_of(item, files(), OUT), kernel_files(item), strict=True):
            yield item, unit, archs


def digests() -> dict[str, str]:
    """The digest of each kernel's code, by "set/kernel architecture", as `record.txt` has it."""
    return {f"{unit.name} {arch}": code_digest(unit.text)[:DIGITS] for _, unit, archs in units() for arch in archs}


def line(key: str, digest: str, facts: Facts) -> str:
    """A line of the record: "set/kernel architecture digest machine_code", then each fact's name and number."""
    code = f"{facts['machine_code']:08x}"
    return " ".join((key, digest, code, *(f"{name} {n}" for name, n in facts.items() if name != "machine_code")))


def candidates_line(key: str, cycles: Facts) -> str:
    """A line of the record: "set/operation architecture candidates", then each kernel's cycles, the chosen one's first."""
    return " ".join((key, _CANDIDATES, *(f"{name} {n}" for name, n in cycles.items())))


def recorded() -> dict[str, tuple[str, Facts]]:
    """The kernels of `record.txt`: the digest and the facts, by "set/kernel architecture"."""
    found = {}
    for kernel, arch, digest, *rest in _lines():
        if digest != _CANDIDATES:
            found[f"{kernel} {arch}"] = digest, {**_numbers(rest[1:]), "machine_code": int(rest[0], 16)}
    return found


def candidates() -> dict[str, Facts]:
    """The calls of `record.txt` that several kernels fit: thousandths of a cycle a token and query column by the kernels' names,
    the chosen one first, by "set/operation architecture"."""
    return {f"{op} {arch}": _numbers(rest) for op, arch, word, *rest in _lines() if word == _CANDIDATES}


def recorded_under() -> str:
    """The NVRTC that `record.txt` names."""
    return RECORD.read_text(encoding="utf-8").partition("\n")[0].rpartition(" ")[2]


def _lines() -> Iterator[list[str]]:
    for text in RECORD.read_text(encoding="utf-8").splitlines():
        if not text.startswith("#"):
            yield text.split(" ")


def _numbers(words: list[str]) -> Facts:
    return {name: int(n) for name, n in zip(words[::2], words[1::2], strict=True)}


def write_project(folder: Path) -> None:
    """A project of these sets: its specs are this folder's, and it is built."""
    (folder / "pyproject.toml").write_text("[tool.kvgen]\n", encoding="utf-8")
    (folder / "specs").mkdir()
    for path in FOLDER.glob("[!_]*.py"):
        (folder / "specs" / path.name).write_bytes(path.read_bytes())
    for place, file in files().items():
        (folder / OUT / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / OUT / place).write_text(file.text, encoding="utf-8", newline="\n")
