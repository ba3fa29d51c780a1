"""Files that specs name: read relative to the spec's folder, from inside the project only."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from kvgen.errors import ToolError
from kvgen.files import read_bytes
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


def _relative(given: str, place: Place) -> str:
    """How a spec would name the file, for one inside the project."""
    path = os.path.realpath(given)
    if not Path(path).is_relative_to(place.root):
        return ", as 'kernels/dump.cu', and from inside the project; copy it there"
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


def _check_name(name: str, given: str) -> None:
    if '"' in name or not name.isprintable():
        raise ValueError(
            f"source: got {given!r}; generated text names the file; rename it without quotes and control characters"
        )


def _read(path: Path, given: str) -> str:
    try:
        data = read_bytes(path, limit=_SIZE_LIMIT)
    except ToolError as error:
        raise ValueError(f"source: got {given!r}; {error}; give an existing file") from None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"source: got {given!r}, which is no UTF-8 (byte {error.start}); save it as UTF-8") from None


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
