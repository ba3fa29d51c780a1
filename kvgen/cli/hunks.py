"""Unified diffs of two versions of the output folder, cut into hunks that are told apart once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvgen.cli.project import RESOURCES
from kvgen.codegen.emit import BANNER_LINES, banner_digest, body_of

State = Literal["added", "removed", "changed"]


@dataclass(frozen=True)
class Hunk:
    """A run of changed lines with its surroundings. `files` are all that have it, the one it is shown of first."""

    files: list[str]
    state: State
    header: str
    lines: list[str]


def hunks_of(
    old: Mapping[str, str], new: Mapping[str, str], shown: Callable[[str], str], set_names: Sequence[str]
) -> list[Hunk]:
    """The differences, by path; hunks that are the same but for their set's name and place are one Hunk."""
    unique: dict[tuple[str, ...], Hunk] = {}
    for path in sorted(old.keys() | new.keys()):
        if path.endswith(f"/{RESOURCES}"):
            continue
        before, after = old.get(path), new.get(path)
        if before == after:
            continue
        state: State = "added" if before is None else "removed" if after is None else "changed"
        top = path.split("/", 1)[0]
        name = re.compile(rf"\b{re.escape(top)}(?=\b|_)") if top in set_names else None
        for header, lines in _hunks(before or "", after or ""):
            key = tuple(name.sub("\0", line) for line in lines) if name else tuple(lines)
            found = unique.get((state, *key))
            if found is None:
                unique[state, *key] = Hunk([shown(path)], state, header, lines)
            elif shown(path) not in found.files:
                found.files.append(shown(path))
    return list(unique.values())


def _hunks(before: str, after: str) -> list[tuple[str, list[str]]]:
    """(header, lines) of each hunk. Where the text differs, the digest in its banner is left out."""
    skip = 0
    if banner_digest(before) and banner_digest(after) and body_of(before) != body_of(after):
        before, after, skip = body_of(before), body_of(after), BANNER_LINES
    found: list[tuple[str, list[str]]] = []
    # Split at "\n" alone, so that a carriage return or form feed is content and shows.
    lines = difflib.unified_diff(before.split("\n"), after.split("\n"), lineterm="", n=3)
    for number, line in enumerate(lines):
        if number < 2:
            continue
        if line.startswith("@@"):
            found.append((_moved(line, skip), []))
        else:
            found[-1][1].append(line.replace("\r", "\\r"))
    return found


def _moved(header: str, by: int) -> str:
    """A hunk's header with its line numbers moved down."""
    return re.sub(r"([-+])(\d+)", lambda m: f"{m[1]}{int(m[2]) + by}", header) if by else header
