"""Contents of the output folder: every name in it, its text, and bytecode that Python would run instead of a source."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvgen.files import FileKind, kind_of, names_in, read_bytes, target_of

CRLF: Final = "its lines end in CRLF; put `* text eol=lf` for this folder into .gitattributes"
LIMIT: Final = 1 << 24  # bytes; generated files have a few hundred KiB
_PYC: Final = re.compile(r"(\w+)\.[\w-]+(?:\.opt-\w+)?\.pyc")
_PYC_BEFORE: Final = re.compile(r"\w+\.[\w-]+(?:\.opt-\w+)?\.pyc\.\d+")  # until Python has written it; never run
_UNCHECKED: Final = 0b01  # the second word of a .pyc: made from a hash of the source that Python is told not to compare


def names_on_disk(out: Path, path: str = "") -> Iterator[tuple[str, FileKind]]:
    """Every name below the output folder, in order, with what it is: files, links, which are not followed, empty folders.

    Left out are files that Python renames to bytecode, or did not live to rename.
    """
    for name in names_in(out / path) if path or kind_of(out) != "missing" else ():
        inner = f"{path}/{name}" if path else name
        kind = kind_of(out / inner)
        if kind == "folder" and names_in(out / inner):
            yield from names_on_disk(out, inner)
        elif kind != "missing" and not (path.rpartition("/")[2] == "__pycache__" and _PYC_BEFORE.fullmatch(name)):
            yield inner, kind


def read_generated(path: Path) -> str | None:
    """A file's text with its own line endings; None where it is not UTF-8."""
    try:
        return read_bytes(path, limit=LIMIT).decode("utf-8")
    except UnicodeDecodeError:
        return None


def in_its_place(path: Path, kind: FileKind) -> str:
    """The note of a finding where a generated file is something else."""
    return f"a link to {target_of(path)} is in its place" if kind == "link" else f"a {kind} is in its place"


def source_of(path: str) -> str | None:
    """The path of the source that Python would have made this bytecode from; None where a path is no place of bytecode."""
    folder, _, name = path.rpartition("/")
    above, _, last = folder.rpartition("/")
    match = _PYC.fullmatch(name)
    if match is None or last != "__pycache__":
        return None
    return f"{above}/{match[1]}.py" if above else f"{match[1]}.py"


def distrusted(path: Path) -> str | None:
    """The fault of a .pyc that has its source; None where Python compares it with that before it runs it."""
    if kind_of(path) != "file":
        return "no bytecode of Python's but something else under its name"
    if int.from_bytes(read_bytes(path, limit=LIMIT)[4:8], "little") == _UNCHECKED:
        return "bytecode that Python runs without comparing it with the source"
    return None
