"""`kvgen doctor`: what kvgen needs, and what this machine has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import typer

from kvgen.cli.console import Json, print_json

if TYPE_CHECKING:
    from kvgen.cli.doctor_checks import Finding

_COLOURS: Final = {"ok": "green", "note": "yellow", "broken": "red"}


def doctor(as_json: Json = False) -> None:
    """Check versions, NVRTC, the compile cache, the host compiler, the SASS tools and the GPU.

    Each line is `ok`, a `note` about something you can do without, or `broken` with what to do. Exits 1 if something
    needed is broken; a missing GPU is not: kernels then run on the CPU machine.
    """
    from kvgen.cli.doctor_checks import examine

    found: list[Finding] = []
    for item in examine():
        found.append(item)
        if not as_json:
            typer.secho(f"{item.level:6}", fg=_COLOURS[item.level], nl=False)
            typer.echo(f" {item.what:14} {item.detail}")
    broken = [item.what for item in found if item.level == "broken"]
    if as_json:
        lines = [{"what": f.what, "level": f.level, "detail": f.detail} for f in found]
        print_json({"ok": not broken, "lines": lines})
    if broken:
        raise typer.Exit(1)
