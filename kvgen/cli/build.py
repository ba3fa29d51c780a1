"""`kvgen build`: write what the specs give."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import typer

from kvgen.cli.console import Selectors

if TYPE_CHECKING:
    from pathlib import Path

    from kvgen.cli.project import Project
    from kvgen.cli.selection import Chosen

Item = TypeVar("Item")
Result = TypeVar("Result")


def build(selectors: Selectors = None) -> None:
    """Write generated/ from specs/: changed files only; removes files of kvgen that no spec gives any more.

    \b
    kvgen build                 everything
    kvgen build llama3_8b       one set, and the device library it includes
    kvgen build '*/decode'      one operation of every set, with the set's cache.cuh and launchers
    """
    from kvgen.cli.project import open_project
    from kvgen.cli.selection import select
    from kvgen.cli.tree import findings
    from kvgen.emit import write_file

    project = open_project()
    chosen = select(project.sets, selectors)
    out = project.config.out
    wanted = _wanted(project, chosen)
    before = {path for path in wanted if (out / path).exists()}
    written = [path for path in wanted if _guarded(write_file, out, project.files[path])]
    scope = {c.name for c in chosen if c.whole} if selectors else None
    stray = [f.path for f in findings(project, scope) if f.state == "extra" and f.ours]
    for path in stray:
        _guarded(_remove, out, path)

    for path in written:
        typer.echo(f"{'changed' if path in before else 'new':8} {project.shown(path)}")
    for path in stray:
        typer.echo(f"{'removed':8} {project.shown(path)}")
    typer.echo(f"{len(chosen)} set(s), {len(wanted)} files: {len(written)} written, {len(stray)} removed")
    if any(f.path.endswith("/resources.json") for f in findings(project, {c.name for c in chosen})):
        typer.echo("resources.json no longer fits; run `kvgen compile --record`")
    if chosen:
        names = ", ".join(["Cache", *(op.name for op in chosen[0].loaded.kernels.ops)])
        typer.echo(f"\nfrom {project.config.package}.{chosen[0].name} import {names}")


def _wanted(project: Project, chosen: list[Chosen]) -> list[str]:
    """The paths to write: of a set chosen in part, everything but the other operations' kernels."""
    from kvgen.emit import set_plans

    skipped = set()
    for item in chosen:
        plans = set_plans(item.loaded)
        skipped |= {f"{item.name}/{p.name}.cu" for op, group in plans.items() if op not in item.ops for p in group}
    tops = {"device", *(c.name for c in chosen)}
    return [path for path in project.files if path.split("/")[0] in tops and path not in skipped]


def _remove(out: Path, path: str) -> None:
    target = out / path
    target.unlink()
    for folder in target.relative_to(out).parents:
        if folder.parts and not any((out / folder).iterdir()):
            (out / folder).rmdir()


def _guarded(action: Callable[[Path, Item], Result], out: Path, item: Item) -> Result:
    """An action on the output folder, a refusal of the file system being the user's to mend."""
    from kvgen.errors import ToolError

    try:
        return action(out, item)
    except OSError as error:
        raise ToolError(f"{error.filename or out}: cannot be written ({error.strerror})") from error
