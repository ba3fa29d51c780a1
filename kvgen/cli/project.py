"""A project as the verbs see it: its settings, its sets, and every file they give."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from kvgen.cli.console import note
from kvgen.cli.ondisk import names_on_disk
from kvgen.cli.progress import progress
from kvgen.cli.selection import Chosen, Selection, load_selected
from kvgen.cli.settings import settings
from kvgen.codegen.emit import File, device_headers, render_page, render_set, units_of
from kvgen.codegen.sets_page import PATH as PAGE
from kvgen.config import Config, find_config
from kvgen.errors import SpecError, ToolError
from kvgen.files import kind_of, named, read_text
from kvgen.schema.loader import BrokenSpec, LoadedSet, spec_files

if TYPE_CHECKING:
    from kvgen.compile import Unit

RESOURCES = "resources.json"


@dataclass(frozen=True)
class Project:
    """Settings, the sets that a command is about, and their files and the headers that they include by path below `config.out`.

    `broken` are spec files that the command is about as well, and that do not load: it goes on without them.
    """

    config: Config
    chosen: list[Chosen]
    files: dict[str, File]
    broken: list[BrokenSpec]

    @property
    def sets(self) -> list[LoadedSet]:
        """The sets that the command is about."""
        return [item.loaded for item in self.chosen]

    @property
    def names(self) -> set[str]:
        """Their names."""
        return {item.name for item in self.chosen}

    def end(self, folder: str = "") -> None:
        """Raise SpecError where specs do not load: the last thing that a verb does, when the other sets are done. `folder`: the
        one that it wrote; "" stands for the project's generated code."""
        end(self.config, self.broken, folder)

    def shown(self, path: str) -> str:
        """A generated file's path from the project's root, as messages name it."""
        return (self.config.out.relative_to(self.config.root) / path).as_posix()

    @cached_property
    def units(self) -> dict[str, list[Unit]]:
        """The flattened kernels of every set, by the set's name."""
        return {s.kernels.name: units_of(s, self.files, self.config.out.name) for s in self.sets}

    @cached_property
    def digests(self) -> dict[str, dict[str, str]]:
        """The `code_digest` of every kernel by its set's and its own name: records count for code, whatever its comments."""
        from kvgen.compile import code_digest

        return {
            name: {unit.name.partition("/")[2]: code_digest(unit.text) for unit in units}
            for name, units in self.units.items()
        }

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
        raise ToolError(f"{named(path)}: not there; build it with `kvgen build`")
    module = importlib.util.module_from_spec(spec)
    sys.modules[title] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        for name in (title, f"{title}._table"):
            sys.modules.pop(name, None)


def end(config: Config, broken: Sequence[BrokenSpec], folder: str = "") -> None:
    """Raise SpecError for spec files that do not load, where a command has done all it could for the others."""
    if broken:
        files = "1 spec file does" if len(broken) == 1 else f"{len(broken)} spec files do"
        place = folder or config.out.relative_to(config.root).as_posix()
        raise SpecError(
            "\n".join(item.message for item in broken)
            + f"\n{files} not load; all other sets are done, and {place}/ keeps what it has of the sets in it"
        )


def open_sets(start: Path | None = None, selectors: Sequence[str] | None = None) -> tuple[Config, Selection]:
    """The nearest project's settings and what the selectors name; nothing is rendered. Warns of files nobody can judge."""
    config = find_config(start or settings().project)
    note(f"project {named(config.root)}, specs in {named(config.specs)}, generated code in {named(config.out)}")
    selection = load_selected(spec_files(config.specs, config.root), config.root, selectors)
    for item in selection.chosen:
        note(f"{item.loaded.source}: {item.name}, {len(item.ops)} operations")
    for spec in selection.doubtful:
        warnings.warn(
            f"{spec.message}\nsets of this file, if you meant one, are left out", RuntimeWarning, stacklevel=2
        )
    return config, selection


def open_project(start: Path | None = None, selectors: Sequence[str] | None = None, *, device: bool = True) -> Project:
    """The nearest project, with the files of the sets that the selectors name rendered; of all sets without selectors.

    `device` says whether the device library's headers are wanted as well: those that the sets include; with selectors, or where a
    spec does not load, also those that lie in the output folder, for the other sets.

    A set that loads and cannot be rendered is as broken as one that does not load. Raises SpecError where nothing is left.
    """
    config, selection = open_sets(start, selectors)
    files, broken = dict[str, File](), list(selection.broken)
    chosen: list[Chosen] = []
    with progress("rendering", len(selection.chosen)) as done:
        for item in selection.chosen:
            try:
                files |= render_set(item.loaded)
                chosen.append(item)
            except SpecError as error:
                broken.append(BrokenSpec(item.loaded.source, (item.name,), str(error)))
            done()
    if broken and not chosen:
        raise SpecError("\n".join(item.message for item in broken))
    if device and chosen:
        partial = bool(
            selectors or broken
        )  # rows of the sets that are not at hand stay, and headers that they may include
        files |= device_headers(files, _headers_on_disk(config) if partial else ())
        files |= render_page([item.loaded for item in chosen], _page_on_disk(config) if partial else "")
    return Project(config, chosen, dict(sorted(files.items())), broken)


def _headers_on_disk(config: Config) -> list[str]:
    """The headers in the device library's folder, by path below the output folder."""
    folder = config.out / "device"
    if kind_of(folder) != "folder":
        return []
    return [path for path, kind in names_on_disk(config.out, "device") if kind == "file" and path.endswith(".cuh")]


def _page_on_disk(config: Config) -> str:
    try:
        return read_text(config.out / PAGE, limit=1 << 22)
    except ToolError:  # none yet, or what `check` and `build` find themselves
        return ""
