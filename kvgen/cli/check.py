"""`kvgen check`: is what is checked in what the specs give?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvgen.cli.console import Json, Selectors, print_json
from kvgen.files import named

if TYPE_CHECKING:
    from kvgen.cli.sync import Finding

_COLOURS = {"missing": "red", "extra": "magenta", "stale": "yellow", "edited": "cyan"}


def check(
    selectors: Selectors = None,
    wheel: Annotated[
        Path | None,
        typer.Option(
            "--wheel",
            metavar="FILE",
            help="Compare the packages in this wheel instead of the folder.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare generated/ with specs/, for CI: needs neither NVRTC nor a GPU. Exits 1 where they differ.

    \b
    missing   the specs give the file, the folder lacks it
    extra     the folder has it, no spec gives it
    stale     intact, but the specs or templates now give something else
    edited    changed by hand, or replaced: its text does not match the digest in it

    \b
    kvgen check                 everything under generated/, resources.json included
    kvgen check 'qwen*'         these sets and the device library
    kvgen check --wheel dist/engine-1.0-py3-none-any.whl
    """
    from kvgen.cli.project import open_project
    from kvgen.cli.selection import select
    from kvgen.cli.sync import findings

    project = open_project()
    chosen = select(project.sets, selectors)
    names = {c.name for c in chosen} if selectors else None
    if wheel is not None:
        from kvgen.cli.wheel import check_wheel

        checked = check_wheel(wheel, project, names)
        _report(checked.findings, checked.mend, as_json, f"{len(checked.sets)} set(s) in {named(wheel)}: complete")
        return
    found = [dataclasses.replace(f, path=project.shown(f.path)) for f in findings(project, names)]
    _report(found, mend(found), as_json, f"{len(chosen)} set(s), {len(project.files)} files: in step with the specs")


def _report(found: list[Finding], command: str | None, as_json: bool, fine: str) -> None:
    """Print what was found, or that all is `fine`; exits 1 where something was."""
    if as_json:
        items = [{"path": f.path, "state": f.state, "note": f.note} for f in found]
        print_json({"ok": not found, "findings": items, "mend": command})
    elif found:
        width = max(len(named(f.path)) for f in found)
        for finding in found:
            typer.secho(f"{finding.state:8}", fg=_COLOURS[finding.state], nl=False)
            typer.echo(f" {named(finding.path):{width}}  {finding.note}")
        _explain(found)
        typer.echo(f"to mend it:\n{command}" if command else "nothing for kvgen to mend: move these files")
    else:
        typer.echo(fine)
    if found:
        raise typer.Exit(1)


def mend(found: list[Finding]) -> str | None:
    """The command that mends what can be mended by one; None where nothing is wrong."""
    if not found:
        return None
    steps = []
    for mend, command in (("build", "kvgen build"), ("record", "kvgen compile --record")):
        group = [f for f in found if f.mend == mend]
        steps += [command + (" --force" if any(f.by_hand for f in group) else "")] if group else []
    return " && ".join(steps) or None


def _explain(found: list[Finding]) -> None:
    counts = {state: sum(f.state == state for f in found) for state in _COLOURS}
    typer.echo(f"\n{', '.join(f'{n} {state}' for state, n in counts.items() if n)}")
    if any(f.by_hand for f in found):
        typer.echo("`kvgen diff` shows what was changed by hand; --force drops it: change the spec or the template")
    if any(f.mend == "move" and f.state == "extra" for f in found):
        typer.echo("files that kvgen did not write are yours to move; building leaves them alone")
