"""Spec files -> kernel sets, with every mistake placed at its line of the user's file."""

from __future__ import annotations

import ast
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import CodeType
from typing import Any, Final

from pydantic import ValidationError

from kvgen.errors import FieldError, KvgenError, SpecError, ToolError
from kvgen.files import kind_of, named, names_in, read_text
from kvgen.schema.base import located
from kvgen.schema.kernel_set import KernelSet
from kvgen.schema.raised import worded
from kvgen.schema.set_names import set_names
from kvgen.schema.sources import loading_from

_SIZE_LIMIT: Final = 1 << 22  # bytes; a spec has a few KiB


@dataclass(frozen=True)
class LoadedSet:
    """A kernel set, the spec file it came from (relative, forward slashes) and that file's docstring."""

    kernels: KernelSet
    source: str
    doc: str


def _mistakes(error: BaseException, path: Path, source: str, text: str) -> str:
    """`specs/x.py:9: field: got ...` for whatever went wrong while the file, which has this text, ran."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{source}:{error.lineno}: {error.msg}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    frame = frames[-1] if frames else None
    if isinstance(error, FieldError):
        lines = list(error.located)
    elif isinstance(error, ValidationError):
        lines = located(error)
    elif isinstance(error, KvgenError):
        lines = [(str(error).split(":")[0], str(error))]
    else:
        lines = [worded(error)]
    return "\n".join(
        f"{source}{f':{_line(text, frame, argument)}' if frame else ''}: {line}" for argument, line in lines
    )


def _line(text: str, frame: traceback.FrameSummary, argument: str) -> int | None:
    """The line of a call's keyword argument, for the call that `frame` stands in; else the frame's own line."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and (node.lineno, node.col_offset) == (frame.lineno, frame.colno):
            for keyword in node.keywords:
                if keyword.arg == argument:
                    return keyword.lineno
    return frame.lineno


def load_file(path: Path, source: str, root: Path | None = None) -> list[LoadedSet]:
    """The kernel sets of one spec file: its variable `kernels`, one set or a list; raises SpecError.

    Files that the spec names lie in the project `root`, by default the spec's own folder.
    """
    try:
        text = read_text(path, limit=_SIZE_LIMIT, name=named(source))
    except ToolError as error:
        raise SpecError(str(error)) from error
    return load_text(text, path, source, root)


def load_text(text: str, path: Path, source: str, root: Path | None = None) -> list[LoadedSet]:
    """The kernel sets of a text, as `load_file` gives them of a file that has it; `path` need not be there."""
    scope: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    try:
        doc, code = _compiled(text, path)
        if any(c not in "\n\t" and (ord(c) < 32 or 0xD800 <= ord(c) < 0xE000) for c in doc + source):
            raise SpecError(
                "docstring: got a control or surrogate character; it is copied into generated files; remove it"
            )
        with loading_from(path.parent, root or path.parent):
            exec(code, scope)
        found = scope.get("kernels")
        listed = isinstance(found, list | tuple) and len(found) > 0
        sets: list[Any] = list(found) if listed else [found]  # type: ignore[arg-type]
        for i, one in enumerate(sets):
            if not isinstance(one, KernelSet):
                raise SpecError(
                    f"kernels{f'[{i}]' if listed else ''}: got {type(one).__name__}; a spec file assigns a KernelSet, or a list "
                    "of them, to `kernels`"
                )
        if len(sets) > 1 and not all(s.name for s in sets):
            raise SpecError("kernels: a list of sets needs name='...' in each; the file's name serves one set only")
        return [LoadedSet(s.named(path.stem), source, doc) for s in sets]
    except (Exception, SystemExit) as error:  # a spec that leaves is as wrong as one that fails
        raise SpecError(_mistakes(error, path, source, text)) from error


def _compiled(text: str, path: Path) -> tuple[str, CodeType]:
    """The docstring and the code of a spec file; raises SpecError for what Python's parser has no stack for."""
    try:
        return ast.get_docstring(ast.parse(text, str(path))) or "", compile(text, str(path), "exec")
    except (MemoryError, RecursionError):
        raise SpecError(
            "an expression is nested deeper, or has more terms in a row, than Python reads; make several statements of it, or "
            "build it in a loop"
        ) from None


@dataclass(frozen=True)
class SpecFile:
    """A spec file that has not run: its path, also relative with forward slashes."""

    path: Path
    source: str

    @cached_property
    def names(self) -> tuple[str, ...] | None:
        """The sets that it gives, as far as its text tells; None where it has to run to tell."""
        try:
            return set_names(read_text(self.path, limit=_SIZE_LIMIT), self.path.stem)
        except ToolError:
            return None  # loading it says what is wrong

    @property
    def expected(self) -> tuple[str, ...]:
        """The sets to look for in this file: those its text names, else one with the file's name."""
        return (self.path.stem,) if self.names is None else self.names


@dataclass(frozen=True)
class BrokenSpec:
    """A spec file whose sets cannot be had: what is wrong, `file:line: field: ...` a line; `names` as SpecFile.expected."""

    source: str
    names: tuple[str, ...]
    message: str


@dataclass(frozen=True)
class LoadedSpecs:
    """The sets of spec files, by name, and the files that do not load, by path."""

    sets: list[LoadedSet]
    broken: list[BrokenSpec]


def spec_files(folder: Path, root: Path) -> list[SpecFile]:
    """Every `*.py` in `folder`, by name, but those that begin with `_`; none of them runs. Raises SpecError."""
    if kind_of(folder) != "folder":
        raise SpecError(
            f"specs: {named(folder)} is no folder; the specs must lie in it; create it, or name another one in pyproject.toml, "
            '[tool.kvgen] specs = "..."'
        )
    # Not a glob, to which an unreadable folder is an empty one.
    names = filter(is_spec, names_in(folder))
    return [SpecFile(folder / name, (folder / name).relative_to(root).as_posix()) for name in names]


def is_spec(name: str) -> bool:
    """Whether a file of the specs' folder, by its path below that folder, is a spec."""
    return "/" not in name and name.endswith(".py") and not name.startswith("_")


def load_files(files: Iterable[SpecFile], root: Path) -> LoadedSpecs:
    """The sets of spec files. One that does not load, and those that give a set of the same name, stop no other."""
    loaded: list[LoadedSet] = []
    broken: list[BrokenSpec] = []
    for file in files:
        try:
            loaded += load_file(file.path, file.source, root)
        except SpecError as error:
            broken.append(BrokenSpec(file.source, file.expected, str(error)))
    sources: dict[str, list[str]] = {}
    for item in loaded:
        sources.setdefault(item.kernels.name, []).append(item.source)
    for name, given in sources.items():
        if len(given) > 1:
            message = f"{given[0]}: name: got {name!r}, which {given[1]} has too; each set needs a name of its own; rename one"
            broken.append(BrokenSpec(given[0], (name,), message))
    sets = [item for item in loaded if len(sources[item.kernels.name]) == 1]
    return LoadedSpecs(sorted(sets, key=lambda s: s.kernels.name), sorted(broken, key=lambda b: b.source))


def load_folder(folder: Path, root: Path) -> list[LoadedSet]:
    """Every set of every `*.py` in `folder`, by name; all files' mistakes in one SpecError."""
    specs = load_files(spec_files(folder, root), root)
    if specs.broken:
        raise SpecError("\n".join(item.message for item in specs.broken))
    return specs.sets
