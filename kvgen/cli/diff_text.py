"""The text of `kvgen diff`, for terminals and comments of pull requests: 100 columns, but for longer lines of generated files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import typer

from kvgen.cli.console import console
from kvgen.cli.diff_report import Report, about_files, about_numbers, same_fields, some
from kvgen.cli.hunks import Hunk
from kvgen.cli.verdicts import Line, Phrase, lines, same_counts, unrecorded
from kvgen.files import named

if TYPE_CHECKING:
    from rich.text import Text

_COLOURS: Final = {"+": "green", "-": "red"}
_TONES: Final = {"worse": "red", "better": "green", "other": "cyan"}
_WIDTH: Final = 100
_NAMED: Final = 8  # kernels that are not recorded; --json has all
_SETS: Final = 3  # names behind numbers
_VARIANTS: Final = 8  # of a hunk


def print_report(report: Report) -> None:
    """The fields that changed, the hunks, the kernels."""
    _print_fields(report)
    shown = ""
    for hunk, origins in zip(report.hunks, report.origins, strict=True):
        if hunk.files[0] != shown:
            shown = hunk.files[0]
            gone, fresh = hunk.state == "removed", hunk.state == "added"
            typer.secho(f"--- {'/dev/null' if fresh else shown}", bold=True)
            typer.secho(f"+++ {'/dev/null' if gone else shown}", bold=True)
        _print_hunk(hunk, origins)
    _print_kernels(report)


def _print_fields(report: Report) -> None:
    for text, sets in same_fields(report.specs):
        title = some(sets, _SETS)
        for line in _wrapped(f"{title}:", text.split(" ")):
            typer.secho(line, bold=True)
    for message in report.specs.broken.values():
        for line in _wrapped("not compared, since the older spec does not load:", named(message).split(" ")):
            typer.secho(line, fg="yellow")


def _print_hunk(hunk: Hunk, origins: tuple[str, ...]) -> None:
    typer.secho(" ".join((hunk.header, *origins)), fg="cyan")
    for line in hunk.lines:
        typer.secho(line, fg=_COLOURS.get(line[:1]))
    notes = []
    if files := about_files(hunk):
        notes += _wrapped("# in", files, "#   ")
    numbers = about_numbers(hunk)
    if numbers:
        words = [f"{some_numbers} (x{n}: {some(sets, _SETS)});" for some_numbers, n, sets in numbers[:_VARIANTS]]
        words += [f"and {len(numbers) - _VARIANTS} more"] if len(numbers) > _VARIANTS else []
        words[-1] = words[-1].removesuffix(";")
        notes += _wrapped("# numbers", words, "#   ")
    for note in notes:
        typer.secho(note, dim=True)


def _print_kernels(report: Report) -> None:
    """A line a kernel and architecture, the same one once; then the kernels that have none."""
    from rich.text import Text

    screen = console()
    before, after = report.nvrtc
    if report.recompiled:
        text = f"recorded under NVRTC {', '.join(before)} -> {', '.join(after)}"
        screen.print(Text(text), soft_wrap=True)
    for line in lines(report.deltas):
        screen.print(styled(line), soft_wrap=True)
    if names := same_counts(report.deltas):
        for text in _wrapped("other machine code with the same counts:", some(names, _NAMED).split(" ")):
            screen.print(Text(text), soft_wrap=True)
    if names := unrecorded(report.deltas):
        words = f"{some(names, _NAMED)}; `kvgen build && kvgen compile --record` measures them".split(" ")
        for text in _wrapped("not recorded as they are now:", words):
            screen.print(Text(text, "yellow"), soft_wrap=True)


def styled(line: Line) -> Text:
    """A kernel's line, broken between facts."""
    from rich.text import Text

    found = Text()
    found.append(line.title, "bold")
    found.append(": ")
    column = len(line.title) + 2
    for number, phrase in enumerate(line.phrases):
        last = number == len(line.phrases) - 1
        width = len(phrase.text) + len(phrase.size) + (0 if last else 1)
        if number:
            fits = column + 1 + width <= _WIDTH
            found.append(" " if fits else "\n    ")
            column = column + 1 if fits else 4
        _append(found, phrase)
        found.append("" if last else ",")
        column += width
    if line.note:
        found.append("  " if column + 2 + len(line.note) <= _WIDTH else "\n    ")
        found.append(line.note, "dim")
    return found


def _append(text: Text, phrase: Phrase) -> None:
    style = _TONES.get(phrase.tone, "")
    if phrase.size:
        text.append(phrase.text)
        text.append(phrase.size, style)
    else:
        text.append(phrase.text, style)


def _wrapped(title: str, words: Iterable[str], indent: str = "    ") -> list[str]:
    """Words behind a title in lines of 100 columns; further lines begin with `indent`."""
    found = [title]
    for word in words:
        fits = len(found[-1]) + 1 + len(word) <= _WIDTH
        found = [*found[:-1], f"{found[-1]} {word}"] if fits else [*found, indent + word]
    return found
