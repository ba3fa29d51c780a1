"""A project as the verbs see it: its settings, its sets, and every file they give."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvgen.compile import Unit
from kvgen.config import Config, find_config
from kvgen.emit import File, render_all, units_of
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


def open_sets(start: Path | None = None) -> tuple[Config, list[LoadedSet]]:
    """The nearest project's settings and sets; nothing is rendered."""
    config = find_config(start)
    return config, load_folder(config.specs, config.root)


def open_project(start: Path | None = None) -> Project:
    """The nearest project with all its files rendered."""
    config, sets = open_sets(start)
    return Project(config, sets, render_all(sets))
