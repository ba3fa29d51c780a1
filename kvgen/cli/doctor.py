"""`kvgen doctor`: what kvgen needs, and what this machine has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import typer

from kvgen.cli.console import Json

if TYPE_CHECKING:
    from kvgen.cli.doctor_checks import Finding

_COLOURS: Final = {"ok": "green", "note": "yellow", "broken": "red"}


def doctor(as_json: Json = False) -> None:
    """Check versions, NVRTC, the compile cache, the host compiler, the SASS tools and the GPU.

    Each line is `ok`, a `note` about something you can do without, or `broken` with what to do. Exits 1 if something
    needed is broken; a missing GPU is not: kernels then run on the CPU machine. Where the runtime alone is installed, without
    kvgen[build], it looks at what kernels need to run.
    """
    from kvgen.cli.doctor_text import report

    if report(as_json=as_json, line=_line):
        raise typer.Exit(1)


def _line(item: Finding) -> None:
    typer.secho(f"{item.level:6}", fg=_COLOURS[item.level], nl=False)
    typer.echo(f" {item.what:14} {item.detail}")
