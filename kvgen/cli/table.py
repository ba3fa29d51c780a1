"""Tables for people: a number or a name is never cut. What does not fit the terminal goes on in further lines of its row."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvgen.cli.console import console, terminal_width

if TYPE_CHECKING:
    from rich.text import Text

_GAP: Final = 2  # columns between cells
_INDENT: Final = 4  # of a row's further lines
_LEAST: Final = 24  # columns of a cell of prose that stands beside others
_PIPE: Final = 160  # columns of a row in a pipe, where prose has to be broken; other cells make it as long as they are


@dataclass(frozen=True)
class Column:
    """A title; whether cells are numbers, which stand on the right; whether they are prose, broken between words, and how wide
    at most (0: as wide as the row has room); whether a row can do without it where it does not fit."""

    title: str
    number: bool = False
    prose: bool = False
    most: int = 0
    spare: bool = False


def words(*titles: str) -> tuple[Column, ...]:
    """Columns of names."""
    return tuple(Column(title) for title in titles)


def numbers(*titles: str) -> tuple[Column, ...]:
    """Columns of numbers."""
    return tuple(Column(title, number=True) for title in titles)


@dataclass
class Table:
    """Columns, and the rows below them: a text a cell."""

    columns: tuple[Column, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        """Another row, with a cell for each column."""
        if len(cells) != len(self.columns):
            raise ValueError(f"cells: got {len(cells)} for {len(self.columns)} columns")
        self.rows.append(cells)

    def print(self, mark: str | None = None) -> None:
        """To stdout, titles in bold; cells of the column `mark` in red where they are other than "0"."""
        layout, screen = self._layout(terminal_width()), console()
        for cells, style in ((tuple(c.title for c in self.columns), "bold"), *((row, "") for row in self.rows)):
            for text in self._lines(layout, cells, style, mark):
                screen.print(text, no_wrap=True, overflow="ignore", crop=False)

    def _layout(self, width: int | None) -> list[list[tuple[int, int]]]:
        """Which columns stand in which line of a row, each with its width."""
        wide = [max(len(c.title), *(len(row[i]) for row in self.rows), 0) for i, c in enumerate(self.columns)]
        wide = [min(n, c.most) if c.most else n for n, c in zip(wide, self.columns, strict=True)]
        room = _PIPE if width is None else width
        lines: list[list[tuple[int, int]]] = [[]]
        used = 0
        for i, column in enumerate(self.columns):
            gap = _GAP if lines[-1] else 0
            rest = sum(
                _GAP + n for n, c in zip(wide[i + 1 :], self.columns[i + 1 :], strict=True) if not (c.prose or c.spare)
            )
            left = room - used - gap
            least = wide[i]
            if column.prose:  # its longest word is whole
                words_of = (word for row in self.rows for word in row[i].split())
                least = max(min(wide[i], _LEAST), *map(len, words_of), 0)
            if column.spare and width is not None and left < least:
                continue
            if i and width is not None and left < least:  # in a pipe a row is a line, but for prose
                lines.append([])
                used, left = _INDENT, room - _INDENT
                gap = 0
            size = max(least, min(wide[i], left - (rest if left - rest >= least else 0))) if column.prose else wide[i]
            lines[-1].append((i, size))
            used += gap + size
        return lines

    def _lines(
        self, layout: list[list[tuple[int, int]]], cells: Sequence[str], style: str, mark: str | None
    ) -> Iterator[Text]:
        """A row's lines: prose goes on below itself. A line without text is left out."""
        from rich.text import Text

        for number, places in enumerate(layout):
            parts = [(self._broken(cells[i], size) if self.columns[i].prose else [cells[i]]) for i, size in places]
            for step in range(max(map(len, parts))):
                line = Text(" " * (_INDENT if number else 0))
                for part, (i, size) in zip(parts, places, strict=True):
                    cell = part[step] if step < len(part) else ""
                    red = not style and self.columns[i].title == mark and cell != "0"
                    line.append(f"{cell:{'>' if self.columns[i].number else '<'}{size}}", "red" if red else style)
                    line.append(" " * _GAP)
                line.rstrip()
                if line:
                    yield line

    def _broken(self, cell: str, size: int) -> list[str]:
        return textwrap.wrap(cell, size, break_long_words=False, break_on_hyphens=False) or [""]
