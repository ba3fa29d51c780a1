"""Headers of the user's own for their kernels: found in the folders that a spec lists, copied below the set's `include/`.

A generated package is complete without the folders that its spec was written in. Each header that a kernel includes, or that
such a header includes, becomes a generated file; the #include lines then name the copies, so that they mean the same to every
compiler without an option. Which copy a line names:

- "cache.cuh" and "../device/..." are the set's, in headers too;
- "x.cuh" in a header: the file beside that header, if there is one;
- then, and for <x.cuh> alone, the first folder of `include_dirs` that has it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvgen.plan.kernel import Header, Source
from kvgen.schema.sources import Folder, find_folder

_INCLUDE: Final = re.compile(r'(\s*#\s*include\s*)(?:"([^"\n]*)"|<([^>\n]*)>)(.*)')
_NAME: Final = re.compile(r"[\w.+-]+(?:/[\w.+-]+)*", re.ASCII)
_DIRECTIVE: Final = re.compile(r"\s*#\s*(\w+)\s*(\w*)")
_COMMENT: Final = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)  # and string
_DEVICE: Final = "../device/"
_SET: Final = "/out/set"  # any set's folder, for paths between files of the output folder
_FOLDER: Final = "include"  # below the set's folder


class _Placed(ValueError):
    """A mistake whose message already names the line with the #include."""


@dataclass(frozen=True)
class _File:
    """A text being read: where its copy lies below the set's folder, its name for messages, the folder it was found in."""

    place: str
    source: Source
    folder: Folder | None = None
    name: str = ""


@dataclass
class _Walk:
    """The headers found so far: their copies' places by file, and the texts with #include lines that name copies."""

    folders: Sequence[Folder]
    places: dict[Path, str] = field(default_factory=dict)
    headers: list[Header] = field(default_factory=list)

    def rewritten(self, file: _File) -> str:
        """The file's text; what it includes is read on the way."""
        shown, out = file.source.path, []
        for number, (line, code, depth) in enumerate(
            _lines(file.source.text, guarded=file.folder is not None), start=1
        ):
            match = _INCLUDE.fullmatch(line)
            if match is None:
                out.append(line)
                continue
            try:
                place = self._place(file, match[2], match[3])
                if place is not None and (file.folder or place.startswith(f"{_FOLDER}/")):
                    _check_spot(code, depth)
            except _Placed:
                raise
            except ValueError as error:
                said = str(error).removeprefix("include_dirs: ")
                raise _Placed(f"include_dirs: {shown}:{number}: #include {match[2] or match[3]!r}: {said}") from None
            here = posixpath.join(_SET, posixpath.dirname(file.place))
            named = place and posixpath.relpath(posixpath.normpath(f"{_SET}/{place}"), here)
            out.append(f'{match[1]}"{named}"{match[4]}' if named else line)
        return "\n".join(out)

    def _place(self, file: _File, quoted: str | None, angled: str | None) -> str | None:
        """Where what a line includes lies from the set's folder; None for what only the compiler can know."""
        name = quoted if quoted is not None else angled or ""
        if quoted == "cache.cuh" or name.startswith(_DEVICE):
            return name
        if not _NAME.fullmatch(name):
            if quoted is None:
                return None
            raise ValueError("a header's path has letters, digits and _ . + - only, and is relative; rename it")
        beside = posixpath.normpath(posixpath.join(posixpath.dirname(file.name), name))
        searched = [(file.folder, beside)] if file.folder and quoted is not None else []
        searched += [(folder, posixpath.normpath(name)) for folder in self.folders]
        for folder, path in searched:
            found = None if path.startswith("..") else folder.read(path)
            if found is not None:
                return self._copy(folder, path, *found)
        if quoted is None:
            return None
        where = ", ".join(folder.shown for folder in self.folders)
        raise ValueError(
            f'no such file in {where}; add its folder to include_dirs; the set itself has "cache.cuh" and '
            f'"{_DEVICE}<folder>/<name>.cuh"'
        )

    def _copy(self, folder: Folder, name: str, path: Path, source: Source) -> str:
        """The place of a header's copy; read with all that it includes the first time."""
        if path in self.places:
            return self.places[path]
        place = f"{_FOLDER}/{name}" + (
            "" if name.endswith(".cuh") else ".cuh"
        )  # what package data and wheels take along
        if place in self.places.values():
            raise ValueError(f"{source.path} and another header would both be {place} beside the kernel; rename one")
        _check_once(source)
        self.places[path] = place
        text = self.rewritten(_File(place, source, folder, name))
        self.headers.append(Header(place, source.path, text))
        return place


def with_headers(source: Source, include_dirs: Sequence[str]) -> Source:
    """A kernel with the headers that it takes from these folders; raises ValueError where one cannot be read or copied."""
    walk = _Walk([find_folder(given) for given in include_dirs])
    text = walk.rewritten(_File("", source))
    return Source(source.path, text, tuple(walk.headers))


def _code(text: str) -> str:
    """The text without its comments, line by line; strings stay."""
    return _COMMENT.sub(lambda m: m[0] if m[0][0] == '"' else re.sub(r"[^\n]", " ", m[0]), text)


def _guard(code: str) -> bool:
    """Whether a header begins with #ifndef X, #define X."""
    found = [match for line in code.split("\n") if (match := _DIRECTIVE.match(line))][:2]
    return [m[1] for m in found] == ["ifndef", "define"] and found[0][2] == found[1][2] != ""


def _lines(text: str, *, guarded: bool) -> Iterator[tuple[str, str, int]]:
    """(line, the line without comments, how many #if it is in), but for the include guard that a header may begin with."""
    code = _code(text)
    depth = -1 if guarded and _guard(code) else 0
    for line, bare in zip(text.split("\n"), code.split("\n"), strict=True):
        match = _DIRECTIVE.match(bare)
        word = match[1] if match else ""
        depth += word in ("if", "ifdef", "ifndef")
        depth -= word == "endif"
        yield line, bare, depth


def _check_spot(code: str, depth: int) -> None:
    """Raise ValueError for a header in a comment or an #if: copies are joined into one text without looking at either."""
    if not code.strip():
        raise ValueError("it stands in a /* comment */, where kvgen would still copy it in; write // before it")
    if depth > 0:
        raise ValueError(
            "it stands inside an #if, and kvgen copies it in once, whatever the condition; include it outside"
        )


def _check_once(source: Source) -> None:
    """Raise ValueError for a header that may be meant to be included more than once."""
    code = _code(source.text)
    if not _guard(code) and not re.search(r"^\s*#\s*pragma\s+once\b", code, re.M):
        raise ValueError(
            f"{source.path} has no #pragma once; kvgen copies each header in once; write that line at its top"
        )
