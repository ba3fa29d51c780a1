"""Selectors: `set` and `set/op`, with globs."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from kvgen.errors import ToolError
from kvgen.spec.loader import LoadedSet


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


def select(sets: Sequence[LoadedSet], selectors: Sequence[str] | None) -> list[Chosen]:
    """The sets and operations that the selectors name; all of them without selectors.

    Raises ToolError for a selector that matches nothing, with the nearest names.
    """
    if not selectors:
        return [Chosen(s, op_names(s), True) for s in sets]
    wanted: dict[str, set[str]] = {}
    whole: set[str] = set()
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
            raise ToolError(_unmatched(selector, sets))
    chosen = []
    for loaded in sets:
        name = loaded.kernels.name
        if name in wanted:
            chosen.append(Chosen(loaded, tuple(op for op in op_names(loaded) if op in wanted[name]), name in whole))
    return chosen


def _unmatched(selector: str, sets: Sequence[LoadedSet]) -> str:
    if not sets:
        return f"selector: got {selector!r}; the project has no sets; `kvgen init` makes one"
    names = names_of(sets)
    pool = [n for n in names if ("/" in n) == ("/" in selector)]
    near = difflib.get_close_matches(selector, pool, n=3)
    if near:
        return f"selector: got {selector!r}; no set or operation is called so; did you mean {', '.join(near)}?"
    sample = pool[:8]
    more = f" and {len(pool) - len(sample)} more" if len(pool) > len(sample) else ""
    return f"selector: got {selector!r}; no set or operation is called so; there are {', '.join(sample)}{more}"
