"""`kvgen diff`: what a change does to the generated code, each identical hunk once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvgen.cli.console import Json, Selectors, print_json

if TYPE_CHECKING:
    from kvgen.cli.hunks import Hunk
    from kvgen.cli.project import Project
    from kvgen.cli.selection import Chosen

_COLOURS: Final = {"+": "green", "-": "red", "@": "cyan"}


def diff(
    selectors: Selectors = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="REV", help="Compare generated/ at this git revision with generated/ now.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what `kvgen build` would change, or what changed since a git revision. Exits 1 where there is a difference.

    An identical hunk is shown once, with the number of files that have it; set names count as identical.

    \b
    kvgen diff                          the folder against what the specs give
    kvgen diff --against main           a pull request's change to the kernels and their resources
    kvgen diff '*/append' --against HEAD~1
    """
    from kvgen.cli.git_versions import at_revision, on_disk
    from kvgen.cli.hunks import hunks_of, resource_changes
    from kvgen.cli.project import open_project
    from kvgen.cli.selection import select

    project = open_project()
    chosen = select(project.sets, selectors) if selectors else None
    if against is None:
        old = on_disk(project)
        new = {path: file.text for path, file in project.files.items()}
        # What kvgen did not write, and what only compiling can tell, is no difference that building would make.
        new |= {path: text for path, text in old.items() if path not in new and not _prunable(project, path)}
    else:
        old, new = at_revision(project, against), on_disk(project)
    keep = {path for path in old.keys() | new.keys() if _chosen(project, path, chosen)}
    old, new = ({p: t for p, t in side.items() if p in keep} for side in (old, new))
    numbers = resource_changes(old, new)
    found = hunks_of(old, new, project.shown, [s.kernels.name for s in project.sets])
    if as_json:
        print_json(
            {
                "hunks": [{"files": h.files, "state": h.state, "text": "\n".join(h.lines)} for h in found],
                "resources": numbers,
            }
        )
    else:
        _print(found)
        for line in numbers:
            typer.echo(line)
    if found or numbers:
        raise typer.Exit(1)


def _prunable(project: Project, path: str) -> bool:
    from kvgen.cli.project import RESOURCES
    from kvgen.cli.sync import written_by_kvgen

    names = {s.kernels.name for s in project.sets}
    kept = path.endswith(f"/{RESOURCES}") and path.split("/")[0] in names
    return not kept and written_by_kvgen(project.config.out / path)


def _chosen(project: Project, path: str, chosen: list[Chosen] | None) -> bool:
    if chosen is None:
        return True
    from kvgen.codegen.emit import set_plans

    top, _, name = path.partition("/")
    for item in chosen:
        if item.name != top:
            continue
        plans = set_plans(item.loaded)
        return item.whole or any(name == f"{p.name}.cu" for op in item.ops for p in plans[op])
    return False


def _print(found: list[Hunk]) -> None:
    previous = ""
    for hunk in found:
        if hunk.files[0] != previous:
            previous = hunk.files[0]
            gone, fresh = hunk.state == "removed", hunk.state == "added"
            typer.secho(f"--- {'/dev/null' if fresh else previous}", bold=True)
            typer.secho(f"+++ {'/dev/null' if gone else previous}", bold=True)
        typer.secho(hunk.header, fg="cyan", nl=False)
        typer.secho(f"  same in {len(hunk.files)} files" if len(hunk.files) > 1 else "", dim=True)
        for line in hunk.lines:
            typer.secho(line, fg=_COLOURS.get(line[:1]))
