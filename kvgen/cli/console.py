"""What every verb prints with: tables that survive a pipe, JSON, and the arguments that all share."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_PIPE_WIDTH: Final = 160  # rich assumes 80 columns where there is no terminal, and would cut names


def complete_selector(incomplete: str) -> list[str]:
    """SET and SET/OP for the shell's completion; nothing where the project does not load."""
    from kvgen.errors import KvgenError

    try:
        from kvgen.cli.project import open_sets
        from kvgen.cli.selection import names_of

        return [name for name in names_of(open_sets()[1]) if name.startswith(incomplete)]
    except KvgenError:
        return []


Selectors = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SELECTOR]...",
        help="SET or SET/OP, globs allowed; none means everything.",
        autocompletion=complete_selector,
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


def console(*, stderr: bool = False) -> Console:
    """A rich console on the current stdout or stderr; wide where that is no terminal."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else _PIPE_WIDTH, highlight=False)


def print_json(value: Any) -> None:
    """JSON on stdout, keys in the order given."""
    typer.echo(json.dumps(value, indent=2))


@contextmanager
def progress(title: str, total: int) -> Iterator[tuple[Progress, Any]]:
    """A progress bar on stderr that vanishes at the end; (progress, task). Silent where stderr is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    screen = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        yield bar, bar.add_task(title, total=total)
