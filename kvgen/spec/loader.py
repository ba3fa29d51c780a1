"""Spec files -> kernel sets, with every mistake placed at its line of the user's file."""

from __future__ import annotations

import ast
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from kvgen.errors import KvgenError, SpecError, ToolError
from kvgen.files import kind_of, named, names_in, read_text
from kvgen.spec.base import located
from kvgen.spec.kernel_set import KernelSet
from kvgen.spec.sources import loading_from

_SIZE_LIMIT: Final = 1 << 22  # bytes; a spec has a few KiB


@dataclass(frozen=True)
class LoadedSet:
    """A kernel set, the spec file it came from (relative, forward slashes) and that file's docstring."""

    kernels: KernelSet
    source: str
    doc: str


def _mistakes(error: BaseException, path: Path, source: str) -> str:
    """`specs/x.py:9: field: got ...` for whatever went wrong while the file ran."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{source}:{error.lineno}: {error.msg}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    frame = frames[-1] if frames else None
    if isinstance(error, ValidationError):
        lines = located(error)
    elif isinstance(error, KvgenError):
        lines = [(str(error).split(":")[0], str(error))]
    else:
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, TypeError) and "positional argument" in text:
            text += "; specs take their fields by keyword, as in Paged(dtype=...)"
        lines = [("", text)]
    return "\n".join(
        f"{source}{f':{_line(path, frame, argument)}' if frame else ''}: {line}" for argument, line in lines
    )


def _line(path: Path, frame: traceback.FrameSummary, argument: str) -> int | None:
    """The line of a call's keyword argument, for the call that `frame` stands in; else the frame's own line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and (node.lineno, node.col_offset) == (frame.lineno, frame.colno):
            for keyword in node.keywords:
                if keyword.arg == argument:
                    return keyword.lineno
    return frame.lineno


def load_file(path: Path, source: str, root: Path | None = None) -> list[LoadedSet]:
    """The kernel sets of one spec file: its variable `kernels`, one set or a list; raises SpecError.

    Files that the spec names lie in the project `root`, by default the spec's own folder.
    """
    scope: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    try:
        text = read_text(path, limit=_SIZE_LIMIT, name=named(source))
    except ToolError as error:
        raise SpecError(str(error)) from error
    try:
        doc = ast.get_docstring(ast.parse(text, str(path))) or ""
        if any(c not in "\n\t" and (ord(c) < 32 or 0xD800 <= ord(c) < 0xE000) for c in doc + source):
            raise SpecError(
                "docstring: got a control or surrogate character; it is copied into generated files; remove it"
            )
        with loading_from(path.parent, root or path.parent):
            exec(compile(text, str(path), "exec"), scope)
        found = scope.get("kernels")
        sets = [found] if isinstance(found, KernelSet) else found
        if not isinstance(sets, (list, tuple)) or not sets or not all(isinstance(s, KernelSet) for s in sets):
            raise SpecError(
                f"kernels: got {type(found).__name__}; a spec file assigns a KernelSet, or a list of them, to `kernels`"
            )
        if len(sets) > 1 and not all(s.name for s in sets):
            raise SpecError("kernels: a list of sets needs name='...' in each; the file's name serves one set only")
        return [LoadedSet(s.named(path.stem), source, doc) for s in sets]
    except (Exception, SystemExit) as error:  # a spec that leaves is as wrong as one that fails
        raise SpecError(_mistakes(error, path, source)) from error


def load_folder(folder: Path, root: Path) -> list[LoadedSet]:
    """Every set of every `*.py` in `folder`, by name; all files' mistakes in one SpecError."""
    if kind_of(folder) != "folder":
        raise SpecError(f"specs: {named(folder)} is no folder; create it, or set [tool.kvgen] specs")
    loaded: list[LoadedSet] = []
    mistakes: list[str] = []
    for name in names_in(folder):  # not a glob, to which an unreadable folder is an empty one
        if not name.endswith(".py") or name.startswith("_"):
            continue
        path = folder / name
        try:
            loaded += load_file(path, path.relative_to(root).as_posix(), root)
        except SpecError as error:
            mistakes.append(str(error))
    names = [s.kernels.name for s in loaded]
    for item in loaded:
        others = [o.source for o in loaded if o.kernels.name == item.kernels.name and o is not item]
        if others and names.index(item.kernels.name) == loaded.index(item):
            mistakes.append(
                f"{item.source}: name: got {item.kernels.name!r}, which {others[0]} has too; set names are unique"
            )
    if mistakes:
        raise SpecError("\n".join(mistakes))
    return sorted(loaded, key=lambda s: s.kernels.name)
