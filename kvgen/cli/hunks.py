"""Two versions of the output folder compared: changed lines with their surroundings, the same change of many files once.

Changes are the same where their lines are equal but for set names and numbers. Surroundings do not count. A removed file is
a name.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kvgen.cli.project import RESOURCES
from kvgen.codegen.emit import BANNER_LINES, banner_digest, body_of

State = Literal["added", "removed", "changed"]

_AROUND: Final = 3  # lines of surroundings on either side; rows of a table of Markdown explain no other row
_NUMBER: Final = re.compile(r"\b\d[\w.]*")


@dataclass(frozen=True)
class Hunk:
    """A change of one file or more. Header and lines are those of the file `path` (below the output folder), with surroundings.

    `variants`: by the numbers in which the files' changed lines differ, the files that have them, by their shown paths; first the
    numbers and the file that are shown. `new_lines`: the numbers of the added lines in the new text of `path`; where no line was
    added, of the line before the removed ones.
    """

    path: str
    state: State
    header: str
    lines: tuple[str, ...]
    variants: dict[tuple[str, ...], list[str]]
    new_lines: tuple[int, ...]

    @property
    def files(self) -> list[str]:
        """All files that have the change, each once, the one that is shown first."""
        return list(dict.fromkeys(file for files in self.variants.values() for file in files))

    @property
    def adds(self) -> bool:
        """A line was added."""
        return any(line.startswith("+") for line in self.lines)


@dataclass(frozen=True)
class _Texts:
    """The lines of a file in both versions, and how many lines of a banner were left out above them."""

    path: str
    state: State
    before: list[str]
    after: list[str]
    skipped: int


@dataclass(frozen=True)
class _Change:
    """Lines `before[i1:i2]` that became `after[j1:j2]`: their masked text, and the numbers in them."""

    texts: _Texts
    i1: int
    i2: int
    j1: int
    j2: int
    masked: tuple[str, ...]
    numbers: tuple[str, ...]

    def is_near(self, other: _Change) -> bool:
        """`other`, which comes next, would share surroundings with this one."""
        return other.texts is self.texts and other.i1 - self.i2 <= 2 * _around(self.texts.path)


def _around(path: str) -> int:
    return 0 if path.endswith(".md") else _AROUND


def hunks_of(
    old: Mapping[str, str], new: Mapping[str, str], shown: Callable[[str], str], set_names: Sequence[str]
) -> list[Hunk]:
    """The differences, by path. `shown` gives the path by which messages name a file."""
    changes = [
        change
        for path in sorted(old.keys() | new.keys())
        if not path.endswith(f"/{RESOURCES}") and old.get(path) != new.get(path)
        for change in _changes(_texts(path, old.get(path), new.get(path)), set_names)
    ]
    groups: dict[tuple[tuple[str, ...], ...], list[list[_Change]]] = {}
    for run in _runs(changes):
        groups.setdefault(tuple(change.masked for change in run), []).append(run)
    return [_hunk(group, shown) for group in groups.values()]


def _texts(path: str, before: str | None, after: str | None) -> _Texts:
    """Where the text below the banner differs, the banner's digest differs for that reason alone, and the banner is left out."""
    state: State = "added" if before is None else "removed" if after is None else "changed"
    old, new, skipped = before or "", after or "", 0
    if banner_digest(old) and banner_digest(new) and body_of(old) != body_of(new):
        old, new, skipped = body_of(old), body_of(new), BANNER_LINES
    # Split at "\n" alone, so that a carriage return or form feed is content and shows.
    before_lines, after_lines = (
        [] if text is None else part.split("\n") for text, part in ((before, old), (after, new))
    )
    return _Texts(path, state, before_lines, after_lines, skipped)


def _changes(texts: _Texts, set_names: Sequence[str]) -> Iterator[_Change]:
    top = texts.path.split("/", 1)[0]
    name = re.compile(rf"\b{re.escape(top)}(?=\b|_)") if top in set_names else None

    def masked(line: str) -> str:
        return _NUMBER.sub("\1", name.sub("\0", line) if name else line)

    matcher = difflib.SequenceMatcher(None, texts.before, texts.after)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag != "equal":
            # All removed files are one hunk: what they had is nobody's to review.
            gone, fresh = texts.before[i1:i2] if texts.state != "removed" else [], texts.after[j1:j2]
            named = (
                name.sub("\0", line) if name else line for line in (*gone, *fresh)
            )  # a set's name may have numbers
            numbers = tuple(n for line in named for n in _NUMBER.findall(line))
            lines = (texts.state, *(f"-{masked(line)}" for line in gone), *(f"+{masked(line)}" for line in fresh))
            yield _Change(texts, i1, i2, j1, j2, lines, numbers)


def _runs(changes: Sequence[_Change]) -> Iterator[list[_Change]]:
    """Changes joined that stand near each other wherever either of them is."""
    pairs: Counter[tuple[tuple[str, ...], tuple[str, ...]]] = Counter()
    count = Counter(change.masked for change in changes)
    for i in range(1, len(changes)):
        if changes[i - 1].is_near(changes[i]):
            pairs[changes[i - 1].masked, changes[i].masked] += 1
    run: list[_Change] = []
    for change in changes:
        last = run[-1] if run else None
        together = last is not None and last.is_near(change) and last.masked != change.masked
        if last and together and pairs[last.masked, change.masked] == count[last.masked] == count[change.masked]:
            run.append(change)
            continue
        if run:
            yield run
        run = [change]
    if run:
        yield run


def _hunk(group: Sequence[Sequence[_Change]], shown: Callable[[str], str]) -> Hunk:
    """One hunk of the same changes; the first ones are shown."""
    first = group[0]
    texts = first[0].texts
    variants: dict[tuple[str, ...], list[str]] = {}
    for run, numbers in zip(group, _differing(group), strict=True):
        files = variants.setdefault(numbers, [])
        if shown(run[0].texts.path) not in files:
            files.append(shown(run[0].texts.path))
    around = _around(texts.path)
    above = min(around, first[0].i1, first[0].j1)
    below = min(around, len(texts.before) - first[-1].i2, len(texts.after) - first[-1].j2)
    begin, end = first[0].i1 - above, first[-1].i2 + below
    lines, at, new_lines = list[str](), begin, list[int]()
    for change in first:
        lines += [f" {line}" for line in texts.before[at : change.i1]]
        lines += [f"-{line}" for line in texts.before[change.i1 : change.i2] if texts.state != "removed"]
        lines += [f"+{line}" for line in texts.after[change.j1 : change.j2]]
        new_lines += range(change.j1 + 1, change.j2 + 1)
        at = change.i2
    lines += [f" {line}" for line in texts.before[at:end]]
    old = _range(begin, end, texts.skipped)
    new = _range(first[0].j1 - above, first[-1].j2 + below, texts.skipped)
    placed = tuple(number + texts.skipped for number in new_lines or [first[0].j1])
    visible = tuple(line.replace("\r", "\\r") for line in lines)
    return Hunk(texts.path, texts.state, f"@@ -{old} +{new} @@", visible, variants, placed)


def _range(begin: int, end: int, skipped: int) -> str:
    """Lines [begin, end) as a unified diff writes them."""
    length = end - begin
    start = begin + (1 if length else 0) + skipped
    return f"{start}" if length == 1 else f"{start},{length}"


def _differing(group: Sequence[Sequence[_Change]]) -> list[tuple[str, ...]]:
    """The numbers of each member that are not the same in all; each column of equal numbers once."""
    columns = list(zip(*(tuple(n for change in run for n in change.numbers) for run in group), strict=True))
    kept = list(dict.fromkeys(column for column in columns if len(set(column)) > 1))
    return list(zip(*kept, strict=True)) if kept else [()] * len(group)
