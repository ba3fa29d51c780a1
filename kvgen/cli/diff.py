"""`kvgen diff`: what a change does to specs' fields, to the generated code, and to what kernels occupy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvgen.cli.console import Json, Selectors, print_json, say

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgen.cli.hunks import Hunk
    from kvgen.cli.project import Project
    from kvgen.cli.selection import Chosen
    from kvgen.cli.spec_fields import SpecChanges


def diff(
    selectors: Selectors = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="REV", help="Compare generated/ at this git revision with generated/ now.", show_default=False
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", help="Write it as one page that needs no other file.", show_default=False
        ),
    ] = None,
    exit_code: Annotated[
        bool,
        typer.Option("--exit-code", help="Exit 1 where there is a change; without it 0 with a change and without."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what `kvgen build` would change, or what changed since a git revision.

    Fields of specs that changed come first. Then hunks: the same change of many files once, with the template line that it comes
    from; set names and numbers may differ between the files, and are named below it. Then the model's verdict on each kernel and
    the facts that changed (docs/review.md), as resources.json has them on both sides; kernels whose code changed and nobody
    recorded anew are named. Exits 0, with --exit-code 1 where anything changed, 2 where it cannot tell.

    \b
    kvgen diff                          the folder against what the specs give
    kvgen diff --against main           a pull request's change to the kernels and their resources
    kvgen diff '*/append' --against HEAD~1
    kvgen diff --html diff.html         for a browser
    """
    from kvgen.cli.diff_report import Report
    from kvgen.cli.git_versions import at_revision, on_disk
    from kvgen.cli.hunks import hunks_of
    from kvgen.cli.project import open_project
    from kvgen.cli.resource_changes import compilers, deltas_of
    from kvgen.errors import ToolError

    if html is not None and as_json:
        raise ToolError(f"--json: got it beside --html {html}; one form at a time; drop one")
    project = open_project(selectors=selectors)
    chosen = project.chosen if selectors else None
    if against is None:
        old = on_disk(project)
        new = {path: file.text for path, file in project.files.items()}
        # What kvgen did not write, and what only compiling can tell, is no difference that building would make.
        tops = project.names | {"device"} if selectors or project.broken else None
        kept = [p for p in old if p not in new and not (_within(p, tops) and _prunable(project, p))]
        new |= {path: old[path] for path in kept}
    else:
        old, new = at_revision(project, against), on_disk(project)
    specs = _spec_changes(project, old, against, whole=not selectors)
    keep = {path for path in old.keys() | new.keys() if _chosen(path, chosen)}
    numbers = deltas_of(old, new, project.config.out.name, keep.__contains__)
    before, after = (compilers(side, keep.__contains__) for side in (old, new))
    old, new = ({p: t for p, t in side.items() if p in keep} for side in (old, new))
    found = hunks_of(old, new, project.shown, [s.kernels.name for s in project.sets])
    report = Report(specs, found, [_origins(project, hunk, new) for hunk in found], numbers, (before, after))
    if as_json:
        print_json(report.as_json())
    elif html is not None:
        from kvgen.cli.diff_html import page
        from kvgen.files import named, write_inside

        write_inside(html.parent, html.name, page(report, against).encode())
        say(f"wrote {named(html)}")
    else:
        from kvgen.cli.diff_text import print_report

        print_report(report)
    project.end()
    if exit_code and not report.empty:
        raise typer.Exit(1)


def _spec_changes(project: Project, old: Mapping[str, str], against: str | None, *, whole: bool) -> SpecChanges:
    """Since the revision; without one, since HEAD, of the sets that the folder has as HEAD has them."""
    from kvgen.cli.git_versions import specs_at, specs_built
    from kvgen.cli.spec_fields import SpecChanges, spec_changes

    if against is not None:
        return spec_changes(project, specs_at(project, against), whole=whole)
    before, built = specs_built(project, old)
    if not built:
        return SpecChanges([], {})
    found = spec_changes(project, before, whole=whole)
    return SpecChanges([c for c in found.fields if c.set in built or c.before is None], found.broken)


def _origins(project: Project, hunk: Hunk, new: Mapping[str, str]) -> tuple[str, ...]:
    """The template lines behind a hunk's added lines, neighbours as file:first-last; behind the line above the removed ones where
    nothing was added. Nothing of whole files, of files that kvgen does not write, and of those that are not as it would write
    them."""
    file = project.files.get(hunk.path)
    if hunk.state != "changed" or file is None or new.get(hunk.path) != file.text:
        return ()
    found: list[tuple[str, int, int]] = []
    for number in hunk.new_lines:
        place = file.origins[number - 1] if 0 < number <= len(file.origins) else ""
        path, _, line = place.rpartition(":")
        if not line.isdigit():
            continue
        if found and found[-1][0] == path and found[-1][1] <= int(line) <= found[-1][2] + 1:
            found[-1] = (path, found[-1][1], max(found[-1][2], int(line)))
        else:
            found.append((path, int(line), int(line)))
    return tuple(dict.fromkeys(f"{path}:{a}" if a == b else f"{path}:{a}-{b}" for path, a, b in found))


def _within(path: str, tops: set[str] | None) -> bool:
    return tops is None or path.split("/")[0] in tops


def _prunable(project: Project, path: str) -> bool:
    from kvgen.cli.project import RESOURCES
    from kvgen.cli.sync import written_by_kvgen

    kept = path.endswith(f"/{RESOURCES}") and path.split("/")[0] in project.names
    return not kept and written_by_kvgen(project.config.out / path)


def _chosen(path: str, chosen: list[Chosen] | None) -> bool:
    if chosen is None:
        return True
    from kvgen.codegen.emit import kernel_files

    top, _, name = path.partition("/")
    for item in chosen:
        if item.name != top:
            continue
        return item.whole or any(name == f"{kernel.name}.cu" for kernel, _ in kernel_files(item.loaded, item.ops))
    return False
