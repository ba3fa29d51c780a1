"""A project as the verbs see it: its settings, its sets, and every file they give."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType

from kvgen.codegen.emit import File, render_all, units_of
from kvgen.compile import Unit
from kvgen.config import Config, find_config
from kvgen.errors import ToolError
from kvgen.spec.loader import LoadedSet, load_folder

RESOURCES = "resources.json"


@dataclass(frozen=True)
class Project:
    """Settings, sets and their files by path below `config.out`."""

    config: Config
    sets: list[LoadedSet]
    files: dict[str, File]

    def shown(self, path: str) -> str:
        """A generated file's path from the project's root, as messages name it."""
        return (self.config.out.relative_to(self.config.root) / path).as_posix()

    @cached_property
    def units(self) -> dict[str, list[Unit]]:
        """The flattened kernels of every set, by the set's name."""
        return {s.kernels.name: units_of(s, self.files, self.config.out.name) for s in self.sets}

    def origin(self, file: str, line: int) -> str | None:
        """The template line behind a line of a flattened text's file."""
        found = self.files.get(file.removeprefix(f"{self.config.out.name}/"))
        if found is None or not 0 < line <= len(found.origins):
            return None
        return found.origins[line - 1] or None


@contextmanager
def generated(out: Path, name: str) -> Iterator[ModuleType]:
    """The generated package of a set below `out`, under a name that no other package of this process can have.

    Raises ToolError where it has not been built.
    """
    path = out / name / "__init__.py"
    title = f"_kvgen_generated_{name}"
    spec = importlib.util.spec_from_file_location(title, path, submodule_search_locations=[str(path.parent)])
    if spec is None or spec.loader is None or not path.is_file():
        raise ToolError(f"{path}: not there; build it with `kvgen build`")
    module = importlib.util.module_from_spec(spec)
    sys.modules[title] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[title]


def open_sets(start: Path | None = None) -> tuple[Config, list[LoadedSet]]:
    """The nearest project's settings and sets; nothing is rendered."""
    config = find_config(start)
    return config, load_folder(config.specs, config.root)


def open_project(start: Path | None = None) -> Project:
    """The nearest project with all its files rendered."""
    config, sets = open_sets(start)
    return Project(config, sets, render_all(sets))
