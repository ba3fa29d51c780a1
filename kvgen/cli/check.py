"""`kvgen check`: is what is checked in what the specs give?"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvgen.cli.console import Json, Selectors, print_json, say
from kvgen.files import named

if TYPE_CHECKING:
    from kvgen.cli.project import Project
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

    Specs that do not load are all reported, the others are checked, and kvgen exits with 2.

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
    from kvgen.cli.sync import findings
    from kvgen.runtime.module import CUBINS

    if wheel is not None:
        _check_wheel(wheel, selectors, as_json)
        return
    project = open_project(selectors=selectors)
    names = project.names if selectors or project.broken else None
    found = [dataclasses.replace(f, path=project.shown(f.path)) for f in findings(project, names)]
    command = mend(found)
    if any(f.mend == "cubins" for f in found):
        folder = named((project.config.out / CUBINS).relative_to(project.config.root).as_posix())
        command = " && ".join(filter(None, (command, f"kvgen compile -o {folder}")))
    fine = f"{len(project.chosen)} set(s), {len(project.files)} files: in step with the specs"
    _report(project, found, command, as_json, fine)


def _check_wheel(wheel: Path, selectors: list[str] | None, as_json: bool) -> None:
    from kvgen.cli.project import open_project
    from kvgen.cli.wheel import check_wheel

    project = open_project()  # all sets: those that are in the wheel are checked whether they were named or not
    must = open_project(selectors=selectors).names if selectors else None
    checked = check_wheel(wheel, project, must)
    fine = f"{len(checked.sets)} set(s) in {named(wheel)}: complete; {checked.cubins}"
    _report(project, checked.findings, checked.mend, as_json, fine, checked.facts)


def _report(
    project: Project,
    found: list[Finding],
    command: str | None,
    as_json: bool,
    fine: str,
    facts: Mapping[str, int] | None = None,
) -> None:
    """Print what was found, or that all is `fine`; exits 2 where a spec does not load, 1 where something was found."""
    if as_json:
        items = [{"path": f.path, "state": f.state, "note": f.note} for f in found]
        broken = [{"spec": b.source, "message": b.message} for b in project.broken]
        print_json(
            {"ok": not found and not broken, "findings": items, "mend": command, "broken": broken, **(facts or {})}
        )
    elif found:
        width = max(len(named(f.path)) for f in found)
        for finding in found:
            typer.secho(f"{finding.state:8}", fg=_COLOURS[finding.state], nl=False)
            typer.echo(f" {named(finding.path):{width}}  {finding.note}")
        _explain(found)
        typer.echo(f"to mend it:\n{command}" if command else "nothing for kvgen to mend: move these files")
    else:
        say(fine)
    project.end()
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
