"""`kvgen check`: is what is checked in what the specs give?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from kvgen.cli.console import Json, Selectors, print_json

if TYPE_CHECKING:
    from kvgen.cli.tree import Finding

_COLOURS = {"missing": "red", "extra": "magenta", "stale": "yellow", "edited": "cyan"}


def check(selectors: Selectors = None, as_json: Json = False) -> None:
    """Compare generated/ with specs/, for CI: needs neither NVRTC nor a GPU. Exits 1 where they differ.

    \b
    missing   the specs give the file, the folder lacks it
    extra     the folder has it, no spec gives it
    stale     intact, but the specs or templates now give something else
    edited    changed by hand: its text does not match the digest in its banner

    \b
    kvgen check                 everything under generated/, resources.json included
    kvgen check 'qwen*'         these sets and the device library
    """
    from kvgen.cli.project import open_project
    from kvgen.cli.selection import select
    from kvgen.cli.tree import findings

    project = open_project()
    chosen = select(project.sets, selectors)
    found = findings(project, {c.name for c in chosen} if selectors else None)
    command = mend(found)
    if as_json:
        items = [{"path": project.shown(f.path), "state": f.state, "note": f.note} for f in found]
        print_json({"ok": not found, "findings": items, "mend": command})
    elif found:
        width = max(len(project.shown(f.path)) for f in found)
        for finding in found:
            typer.secho(f"{finding.state:8}", fg=_COLOURS[finding.state], nl=False)
            typer.echo(f" {project.shown(finding.path):{width}}  {finding.note}")
        _explain(found)
        typer.echo(f"to mend it:\n{command}" if command else "nothing for kvgen to mend: move these files")
    else:
        typer.echo(f"{len(chosen)} set(s), {len(project.files)} files: in step with the specs")
    if found:
        raise typer.Exit(1)


def mend(found: list[Finding]) -> str | None:
    """The command that mends what can be mended by one; None where nothing is wrong."""
    if not found:
        return None
    ours = [f for f in found if f.ours]
    recorded = [f for f in ours if f.path.endswith("/resources.json") and f.state != "extra"]
    steps = ["kvgen build"] if len(recorded) < len(ours) else []
    return " && ".join([*steps, *(["kvgen compile --record"] if recorded else [])]) or None


def _explain(found: list[Finding]) -> None:
    counts = {state: sum(f.state == state for f in found) for state in _COLOURS}
    typer.echo(f"\n{', '.join(f'{n} {state}' for state, n in counts.items() if n)}")
    if counts["edited"]:
        typer.echo("`kvgen diff` shows the edits; building overwrites them: change the spec or the template")
    if any(not f.ours for f in found):
        typer.echo("files that kvgen did not write are yours to move; building leaves them alone")
