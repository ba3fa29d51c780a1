"""Files and folders that specs name: read relative to the spec's folder, from inside the project only."""

from __future__ import annotations

import os
import posixpath
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from kvgen.errors import ToolError
from kvgen.files import is_folder, kind_of, read_bytes
from kvgen.plan.kernel import Source

_SIZE_LIMIT: Final = 1 << 24  # bytes; a kernel has a few KiB


@dataclass(frozen=True)
class Place:
    """Where the spec file that is being loaded lies, and the project around it."""

    folder: Path
    root: Path


_loading: ContextVar[Place | None] = ContextVar("kvgen_spec_place", default=None)


@contextmanager
def loading_from(folder: Path, root: Path) -> Iterator[None]:
    """Specs made inside are those of a file in `folder` of the project `root`."""
    token = _loading.set(Place(folder.resolve(), root.resolve()))
    try:
        yield
    finally:
        _loading.reset(token)


def shown_path(file: str) -> str:
    """How messages name a file: inside the project whose specs are being loaded, relative to it."""
    place, path = _loading.get(), Path(file)
    inside = place is not None and path.is_absolute() and path.resolve().is_relative_to(place.root)
    return path.resolve().relative_to(place.root).as_posix() if place is not None and inside else path.as_posix()


@dataclass(frozen=True)
class Folder:
    """A folder that a spec lists: as the spec calls it, where it is, and how messages name it; files lie below `fence`."""

    given: str
    path: Path
    shown: str
    fence: Path

    def read(self, name: str) -> tuple[Path, Source] | None:
        """(the file itself, its text) of `name` in this folder, None where there is none; ValueError where it may not be read."""
        if not os.path.lexists(self.path / name):
            return None
        path = Path(os.path.realpath(self.path / name))
        inside = path.relative_to(self.fence).as_posix() if path.is_relative_to(self.fence) else None
        if inside is None:
            raise ValueError(
                f"include_dirs: got {self.given!r}, whose {name} is a link to {path}; it must lie inside {self.fence}; copy it "
                "there"
            )
        shown = inside if self.fence != self.path else posixpath.normpath(f"{self.shown}/{name}")
        _check_name(shown, name, "include_dirs")
        return path, Source(shown, checked_text(_read(path, shown, "include_dirs"), "include_dirs", shown))


def find_folder(given: str) -> Folder:
    """The folder that a spec calls `given` in include_dirs; raises ValueError where it may not be read, or is none."""
    place, field = _loading.get(), "include_dirs"
    _check_name(given, given, field)
    if place is None:
        path = Path(os.path.realpath((_folder_of_caller() or Path("/")) / given))
        found = Folder(given, path, Path(given).as_posix(), path)
        if not Path(given).is_absolute() and _folder_of_caller() is None:
            raise ValueError(
                f"{field}: got {given!r}; it is relative to the file that makes the spec, and there is none; make it absolute"
            )
    else:
        if Path(given).is_absolute():
            raise ValueError(
                f"{field}: got {given!r}; a spec names folders relative to its own folder{_relative(given, place, 'include')}"
            )
        path = Path(os.path.realpath(place.folder / given))
        if not path.is_relative_to(place.root):
            raise ValueError(
                f"{field}: got {given!r}, which is {path}; it must lie inside the project {place.root}; copy the headers there"
            )
        found = Folder(given, path, path.relative_to(place.root).as_posix(), place.root)
    try:
        there, kind = is_folder(found.path), kind_of(found.path)
    except ToolError as error:
        raise ValueError(f"{field}: got {given!r}; {error}; give a folder of headers") from None
    if not there:
        what = "is no folder" if kind != "missing" else "does not exist"
        raise ValueError(f"{field}: got {given!r}; {found.shown} {what}; give a folder of headers")
    return found


def read_source(given: str) -> Source:
    """The file that a spec calls `given`; raises ValueError where it may not or cannot be read."""
    place = _loading.get()
    _check_name(given, given)
    if place is None:
        folder = _folder_of_caller()
        if folder is None and not Path(given).is_absolute():
            raise ValueError(
                f"source: got {given!r}; it is relative to the file that makes the spec, and there is none; give an absolute "
                "path, or text="
            )
        path, shown = Path(folder or "/") / given, Path(given).as_posix()
    else:
        if Path(given).is_absolute():
            raise ValueError(
                f"source: got {given!r}; a spec names files relative to its own folder{_relative(given, place)}"
            )
        path = Path(os.path.realpath(place.folder / given))
        if not path.is_relative_to(place.root):
            raise ValueError(
                f"source: got {given!r}, which is {path}; it must lie inside the project {place.root}; move or copy it there"
            )
        shown = path.relative_to(place.root).as_posix()
    _check_name(shown, given)
    return Source(shown, checked_text(_read(path, given), "source", shown))


def _relative(given: str, place: Place, example: str = "kernels/dump.cu") -> str:
    """How a spec would name the file or folder, for one inside the project."""
    path = os.path.realpath(given)
    if not Path(path).is_relative_to(place.root):
        return f", as {example!r}, and from inside the project; copy it there"
    return f": write {Path(os.path.relpath(path, place.folder)).as_posix()!r}"


def _folder_of_caller() -> Path | None:
    """The folder of the file that makes the spec where kvgen does not load it: of a spec that is imported, of a test."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name, file = frame.f_globals.get("__name__", ""), frame.f_globals.get("__file__")
        if file and str(name).partition(".")[0] not in ("kvgen", "pydantic", "pydantic_core"):
            return Path(str(file)).absolute().parent
        frame = frame.f_back
    return None


def _check_name(name: str, given: str, field: str = "source") -> None:
    if '"' in name or not name.isprintable():
        raise ValueError(
            f"{field}: got {given!r}; generated text names the file; rename it without quotes and control characters"
        )


def _read(path: Path, given: str, field: str = "source") -> str:
    try:
        data = read_bytes(path, limit=_SIZE_LIMIT)
    except ToolError as error:
        raise ValueError(f"{field}: got {given!r}; {error}; give an existing file") from None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{field}: got {given!r}, which is no UTF-8 (byte {error.start}); save it as UTF-8") from None


def checked_text(text: str, field: str, shown: str) -> str:
    """`text` with lines that end in a line feed, as it will be in the generated file; raises ValueError for what cannot be."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    for number, line in enumerate(text.split("\n"), start=1):
        # Whatever else ends a line for Python would move the lines below it.
        if line.splitlines() not in ([line], []) or any(
            (ord(c) < 32 and c != "\t") or 0xD800 <= ord(c) < 0xE000 for c in line
        ):
            raise ValueError(f"{field}: got a control or surrogate character in {shown}:{number}; remove it")
    return text if text.endswith("\n") else text + "\n"
