"""Python text of a spec: literals and calls of validated values, broken as `ruff format` would with lines of 120.

Nothing of a config is pasted: a value reaches the text as the literal of a validated int, float, bool or string of
letters, digits and underscores, and nothing else can.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvgen.errors import ConfigError
from kvgen.schema.base import Spec

LINE = 120
INDENT = "    "
SOURCE_LENGTH = 80


@dataclass(frozen=True)
class Atom:
    """Text that is never broken."""

    text: str


@dataclass(frozen=True)
class Group:
    """`opening item, item, ... closing`; an item may carry a keyword. One line where it fits, else an item a line."""

    opening: str
    items: Sequence[tuple[str, Atom | Group]]
    closing: str

    @cached_property
    def flat(self) -> str:
        """The one-line form; a tuple of one keeps its comma."""
        inner = ", ".join(word + (item.text if isinstance(item, Atom) else item.flat) for word, item in self.items)
        return f"{self.opening}{inner}{',' if self.opening == '(' and len(self.items) == 1 else ''}{self.closing}"


def harmless(source: str) -> str:
    """A path or name for the docstring: letters, digits and ._-/@+ stay; the end is kept, for it names the file."""
    text = re.sub(r"[^A-Za-z0-9._/@+-]", "_", source)
    return text if len(text) <= SOURCE_LENGTH else "..." + text[3 - SOURCE_LENGTH :]


def _given(spec: Spec) -> list[str]:
    """The fields that a constructor call must give: those that were given and are not at their default."""
    fields = type(spec).model_fields
    given = (n for n in fields if n in spec.model_fields_set)
    return [n for n in given if fields[n].is_required() or getattr(spec, n) != fields[n].default]


def spec_names(spec: Spec) -> set[str]:
    """The class names that `call(spec)` uses."""
    values = [getattr(spec, name) for name in _given(spec)]
    inner = [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
    return {type(spec).__name__}.union(*(spec_names(value) for value in inner if isinstance(value, Spec)))


def call(spec: Spec) -> Group:
    """A constructor call with every field that is not at its default."""
    items = [(f"{name}=", literal(getattr(spec, name))) for name in _given(spec)]
    return Group(f"{type(spec).__name__}(", items, ")")


def literal(value: object) -> Atom | Group:
    """The Python literal of a validated value."""
    if isinstance(value, Spec):
        return call(value)
    if isinstance(value, tuple):
        return Group("(", [("", literal(item)) for item in value], ")")
    if value is None or isinstance(value, bool):
        return Atom(repr(value))
    if isinstance(value, int):
        return Atom(f"{value:_}" if abs(value) >= 10_000 else str(value))
    if isinstance(value, float) and math.isfinite(value):
        return Atom(f"{int(value):_}.0" if value.is_integer() and 10_000 <= abs(value) < 1e15 else repr(value))
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_]+", value):
        return Atom(f'"{value}"')
    raise ConfigError(f"spec: got a {type(value).__name__}; it has no place in a spec; valid: numbers, names, booleans")


def broken(group: Group, depth: int) -> str:
    """The group with an item a line, each on one line where that fits."""
    pad = INDENT * (depth + 1)
    lines = []
    for word, item in group.items:
        flat = item.text if isinstance(item, Atom) else item.flat
        if isinstance(item, Group) and len(pad) + len(word) + len(flat) + 1 > LINE:
            flat = broken(item, depth + 1)
        lines.append(f"{pad}{word}{flat},\n")
    return f"{group.opening}\n{''.join(lines)}{INDENT * depth}{group.closing}"
