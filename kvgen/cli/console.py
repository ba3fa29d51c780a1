"""What every verb prints with: tables that survive a pipe, JSON, and the arguments that all share."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvgen.cli.settings import settings

if TYPE_CHECKING:
    from rich.console import Console

_LEAST_WIDTH: Final = 40
_PIPE_WIDTH: Final = 160  # rich assumes 80 columns where there is no terminal, and would cut names


def complete_selector(incomplete: str) -> list[str]:
    """SET, and after a `/` SET/OP, for the shell's completion; nothing where there is no project.

    The names of sets are read off the specs; for the operations, the spec of the set before the `/` runs.
    """
    from kvgen.errors import KvgenError

    try:
        from kvgen.cli.selection import complete
        from kvgen.config import find_config

        return complete(find_config(settings().project), incomplete)
    except KvgenError:
        return []


def complete_preset(incomplete: str) -> list[str]:
    """The names of presets for the shell's completion."""
    from kvgen.schema import presets

    return [name for name in presets.__all__ if name.startswith(incomplete)]


def complete_kv_dtype(incomplete: str) -> list[str]:
    """The words of `--kv-dtype` for the shell's completion."""
    from kvgen.models.kv_dtype import KV_DTYPES

    return [name for name in KV_DTYPES if name.startswith(incomplete)]


Selectors = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SELECTOR",
        hidden=True,  # the help ends with what it is
        autocompletion=complete_selector,
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


def console() -> Console:
    """A rich console on the current stdout; wide where that is no terminal."""
    from rich.console import Console

    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is, at least 40; None where it is none."""
    if not sys.stdout.isatty():
        return None
    given = os.environ.get("COLUMNS", "")
    try:
        return max(
            _LEAST_WIDTH, int(given) if given.isdigit() else os.get_terminal_size(sys.stdout.fileno()).columns or 80
        )
    except OSError:
        return 80


def broken(text: str, indent: int = 0) -> str:
    """Prose in lines that fit the terminal that stdout is, further ones `indent` columns to the right; one line elsewhere."""
    width = terminal_width()
    if width is None:
        return text
    space = " " * indent
    lines = textwrap.wrap(text, width, subsequent_indent=space, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def tell(text: str, indent: int = 0) -> None:
    """Prose on stdout, broken between words where that is a terminal."""
    typer.echo(broken(text, indent))


def print_json(value: Any) -> None:
    """JSON on stdout, keys in the order given."""
    typer.echo(json.dumps(value, indent=2))


def say(text: str = "", *, prose: bool = False) -> None:
    """A line on stdout that is no finding and no answer; left out with -q. Prose is broken between words."""
    if not settings().quiet:
        tell(text) if prose else typer.echo(text)


def warn(text: str) -> None:
    """A line on stderr about what is done and may not be what one wants; left out with -q."""
    if not settings().quiet:
        typer.secho("warning: ", fg="yellow", bold=True, nl=False, err=True)
        typer.echo(text, err=True)


def note(text: str) -> None:
    """A line on stderr with -v."""
    if settings().verbose:
        typer.secho(text, dim=True, err=True)


def at_least(least: int) -> Callable[[int | None], int | None]:
    """A callback of an option: its number is at least so large."""

    def check(value: int | None) -> int | None:
        if value is not None and value < least:
            raise typer.BadParameter(f"got {value}; it must be at least {least}")
        return value

    return check
