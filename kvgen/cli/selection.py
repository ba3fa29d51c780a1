"""Selectors: `set` and `set/op`, with globs; which spec files run for them, and which sets they name."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from kvgen.cli.progress import progress
from kvgen.config import Config
from kvgen.errors import SpecError, ToolError
from kvgen.schema.loader import BrokenSpec, LoadedSet, LoadedSpecs, SpecFile, load_files, spec_files


@dataclass(frozen=True)
class Chosen:
    """A set and which of its operations a command is about; `whole` where all of the set was asked for."""

    loaded: LoadedSet
    ops: tuple[str, ...]
    whole: bool

    @property
    def name(self) -> str:
        """The set's name."""
        return self.loaded.kernels.name


def op_names(loaded: LoadedSet) -> tuple[str, ...]:
    """The names of a set's operations, in the order of the spec."""
    return tuple(op.name for op in loaded.kernels.ops)


def names_of(sets: Sequence[LoadedSet]) -> list[str]:
    """Everything a selector can name: each set, and each operation as set/op."""
    names = []
    for loaded in sets:
        names.append(loaded.kernels.name)
        names += [f"{loaded.kernels.name}/{op}" for op in op_names(loaded)]
    return names


@dataclass(frozen=True)
class Selection:
    """What selectors name: sets with operations, and spec files that would give some and do not load.

    `doubtful` are broken files of which nobody can tell whether a pattern means a set of theirs.
    """

    chosen: list[Chosen]
    broken: list[BrokenSpec]
    doubtful: list[BrokenSpec]


def load_selected(files: Sequence[SpecFile], root: Path, selectors: Sequence[str] | None) -> Selection:
    """Run the spec files that the selectors name, or all of them without selectors, and choose from their sets.

    A file whose text does not tell its sets' names runs where a pattern, or a name that no text tells, may mean one of them.
    Raises ToolError for a selector that matches nothing, with the nearest names, and SpecError where all that is named is
    broken.
    """
    if not selectors:
        specs = _load(files, root)
        selection = Selection([Chosen(s, op_names(s), True) for s in specs.sets], specs.broken, [])
    else:
        selection = _named(files, root, selectors)
    if selection.broken and not selection.chosen:
        raise SpecError("\n".join(item.message for item in selection.broken))
    return selection


def _named(files: Sequence[SpecFile], root: Path, selectors: Sequence[str]) -> Selection:
    globs = [selector.partition("/")[0] for selector in selectors]
    fitting = [f for f in files if f.path.stem in globs and f.path.stem in f.expected]
    if any(glob not in [f.path.stem for f in fitting] for glob in globs):  # a pattern, or another name than the file's
        fitting = [f for f in files if _any_fits(f.expected, globs)]
        promised = {name for f in fitting for name in f.expected}
        if any(glob not in promised for glob in globs):  # a pattern, or a name that no text tells
            fitting = [f for f in files if f in fitting or f.names is None]
    specs = _load(fitting, root)
    broken = [b for b in specs.broken if _any_fits(b.names, globs)]
    chosen, unmatched = select(specs.sets, selectors)
    unmatched = [s for s in unmatched if not any(_any_fits(b.names, [s.partition("/")[0]]) for b in broken)]
    if unmatched:
        specs = _load(files, root)  # for a set under another name than its file promised, and for the nearest names
        chosen, missing = select(specs.sets, selectors)
        for selector in unmatched:
            if selector in missing:
                raise ToolError(_unmatched(selector, specs.sets, specs.broken))
    return Selection(chosen, broken, [b for b in specs.broken if b not in broken] if not unmatched else [])


def complete(config: Config, incomplete: str) -> list[str]:
    """What a selector may be that begins with `incomplete`; operations of a set where no other is meant.

    Files run where their text does not tell their sets' names.
    """
    files = spec_files(config.specs, config.root)
    name, slash, _ = incomplete.partition("/")
    if slash:
        found = names_of([c.loaded for c in load_selected(files, config.root, [name]).chosen])
    else:
        found = [n for file in files for n in file.names or ()]
        found += [s.kernels.name for s in _load([f for f in files if f.names is None], config.root).sets]
    found = sorted(n for n in found if n.startswith(incomplete))
    return found + complete(config, f"{found[0]}/") if len(found) == 1 and not slash else found


def _load(files: Sequence[SpecFile], root: Path) -> LoadedSpecs:
    """The sets of spec files; with a progress bar, for a project of many."""
    with progress("reading specs", len(files)) as done:

        def each() -> Iterator[SpecFile]:
            for file in files:
                yield file
                done()

        return load_files(each(), root)


def _any_fits(names: Sequence[str], globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for name in names for glob in globs)


def select(sets: Sequence[LoadedSet], selectors: Sequence[str]) -> tuple[list[Chosen], list[str]]:
    """The sets and operations that the selectors name, in the order of `sets`, and the selectors that match nothing."""
    wanted: dict[str, set[str]] = {}
    whole: set[str] = set()
    unmatched = []
    for selector in selectors:
        set_glob, slash, op_glob = selector.partition("/")
        hit = False
        for loaded in sets:
            name = loaded.kernels.name
            if not fnmatchcase(name, set_glob):
                continue
            ops = [op for op in op_names(loaded) if not slash or fnmatchcase(op, op_glob)]
            if ops:
                hit = True
                wanted.setdefault(name, set()).update(ops)
                whole |= {name} if not slash else set()
        if not hit:
            unmatched.append(selector)
    chosen = []
    for loaded in sets:
        name = loaded.kernels.name
        if name in wanted:
            chosen.append(Chosen(loaded, tuple(op for op in op_names(loaded) if op in wanted[name]), name in whole))
    return chosen, unmatched


def _unmatched(selector: str, sets: Sequence[LoadedSet], broken: Sequence[BrokenSpec]) -> str:
    said = f"selector: got {selector!r}; "
    if not sets and not broken:
        return f"{said}the project has no sets; `kvgen init` makes one"
    names = names_of(sets)
    pool = [n for n in names if ("/" in n) == ("/" in selector)]
    near = difflib.get_close_matches(selector, pool, n=3)
    sample = pool[:8]
    more = f" and {len(pool) - len(sample)} more" if len(pool) > len(sample) else ""
    said += "no set or operation is called so; "
    said += f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(sample)}{more}"
    if broken:
        said += f"\n{len(broken)} spec file(s) do not load, and may have it:\n"
        said += "\n".join(item.message for item in broken)
    return said
