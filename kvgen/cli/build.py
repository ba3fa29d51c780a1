"""`kvgen build`: write what the specs give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvgen.cli.console import Json, Selectors, note, print_json, say, warn
from kvgen.files import named

if TYPE_CHECKING:
    from kvgen.cli.project import Project
    from kvgen.cli.selection import Chosen
    from kvgen.cli.sync import Finding


def build(
    selectors: Selectors = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite and remove files that were changed by hand, too.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write generated/ from specs/: changed files only; removes files of kvgen that no spec gives any more, and what a build
    that was killed left behind.

    README.md of that folder lists all sets of the project; its device/ has the headers that they include. Decodes and
    extends that stay on CUDA cores are warned of, with the reason and, of decodes, the model's verdict (docs/cycles.md).

    Where a file to be written or removed was changed by hand, nothing is written, and each such file is named. A spec that
    does not load stops no other: the rest is built, folders without a set stay as long as it is broken, and kvgen exits
    with 2.

    \b
    kvgen build                 everything
    kvgen build llama3_8b       one set, and the device library it includes
    kvgen build '*/decode'      one operation of every set, with the set's cache.cuh and launchers
    """
    from kvgen.cli.project import open_project
    from kvgen.cli.slow_kernels import on_cuda_cores
    from kvgen.cli.sync import findings
    from kvgen.files import kind_of, remove_inside, write_inside

    project = open_project(selectors=selectors)
    chosen = project.chosen
    root, out = project.config.root, project.config.out
    wanted = _wanted(project, chosen)
    # While a spec does not load, nobody can tell which folders are its sets': only those of the others are cleared up.
    found = findings(project, project.names if selectors or project.broken else None)
    whole = {c.name for c in chosen if c.whole}
    stray = [f for f in found if f.state == "extra" and f.mend == "build"]
    stray = [f for f in stray if not selectors or f.path.split("/")[0] in whole]
    _refuse(project, [f for f in found if _touches(f, wanted)] + stray, force)
    before = {path for path in wanted if kind_of(out / path) != "missing"}
    written = [p for p in wanted if write_inside(root, project.shown(p), project.files[p].text.encode())]
    for item in stray:
        remove_inside(root, project.shown(item.path), keep=project.shown(""))

    states = [("changed" if path in before else "new", path) for path in written]
    states += [("removed", item.path) for item in stray]
    record = any(f.mend == "record" for f in findings(project, project.names))
    slow = on_cuda_cores(project)
    if as_json:
        print_json(
            {
                "ok": not project.broken,
                "sets": [item.name for item in chosen],
                "files": len(wanted),
                "touched": [{"path": project.shown(path), "state": state} for state, path in states],
                "record": record,
                "cuda_cores": [kernel.as_json for kernel in slow],
                "broken": [{"spec": b.source, "message": b.message} for b in project.broken],
            }
        )
    else:
        for path in sorted(set(wanted) - set(written)):
            note(f"{'same':8} {project.shown(path)}")
        _print(project, states, len(wanted), record, first=bool(chosen) and not before)
        for kernel in slow:
            warn(kernel.text)
    project.end()


def _print(project: Project, states: list[tuple[str, str]], files: int, record: bool, *, first: bool) -> None:
    """Print the files written and removed, and how the first set is imported; after the first build, files to read first; in a
    project without specs, how to get one."""
    for state, path in states:
        say(f"{state:8} {named(project.shown(path))}")
    if first:
        for line in _summary(project):
            say(line)
    removed = sum(state == "removed" for state, _ in states)
    say(f"{len(project.chosen)} set(s), {files} files: {len(states) - removed} written, {removed} removed")
    if record:
        typer.echo("resources.json no longer fits; run `kvgen compile --record`")
    if project.chosen:
        example = project.chosen[0]
        names = ", ".join(["Cache", *(op.name for op in example.loaded.kernels.ops)])
        say(f"\nfrom {project.config.package}.{example.name} import {names}")
    else:
        specs = named(project.config.specs.relative_to(project.config.root).as_posix())
        typer.echo(
            f"{specs}/ has no specs, so there is nothing to generate; `kvgen init --from config.json -o {specs}/model.py` "
            "writes one for a model, `kvgen new DIR` makes a project with an example"
        )


def _summary(project: Project) -> list[str]:
    """How much was generated, and where to begin to read it."""
    from kvgen.codegen.emit import kernel_files
    from kvgen.codegen.sets_page import PATH as PAGE

    lines = {path: file.text.count("\n") for path, file in project.files.items()}
    headers = [n for path, n in lines.items() if path.startswith("device/")]
    kernels = {f"{s.kernels.name}/{k.name}.cu" for s in project.sets for k, _ in kernel_files(s)}
    launchers = [f"{name}/__init__.py" for name in sorted(project.names)]
    caches = [n for path, n in lines.items() if path.endswith("/cache.cuh") and path.split("/")[0] in project.names]
    shortest = min(sorted(kernels), key=lines.__getitem__)
    own = project.shown(shortest.split("/")[0])
    rows = (
        (
            len(kernels),
            "kernel",
            sum(lines[path] for path in kernels),
            f"specialised for {_count(len(launchers), 'set')}",
        ),
        (len(caches), "cache header", sum(caches), "where each element of a cache lies"),
        (len(launchers), "module", sum(lines[path] for path in launchers), "Python that checks a call and launches"),
        (len(headers), "header", sum(headers), "of the device library: those that the kernels include"),
    )
    table = [f"{_count(n, what):>18}  {total:>7,} lines  {about}" for n, what, total, about in rows]
    read = (
        (project.shown(PAGE), "the sets, a line each"),
        (project.shown(shortest), f"the shortest kernel, {lines[shortest]} lines"),
        (f"{own}/cache.cuh", "the cache that it reads and writes"),
        (f"{own}/__init__.py", "its launcher: arguments, shapes, errors"),
    )
    width = max(len(named(path)) for path, _ in read)
    return ["", *table, "", "to read first:", *(f"  {named(path):{width}}  {about}" for path, about in read), ""]


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _touches(finding: Finding, wanted: list[str]) -> bool:
    """A finding is about a file that is to be written, or stands in the way of one."""
    return any(path == finding.path or path.startswith(f"{finding.path}/") for path in wanted)


def _refuse(project: Project, touched: list[Finding], force: bool) -> None:
    """Raise ToolError, before anything is written, for what stands in the way and, without `force`, for work by hand."""
    from kvgen.errors import ToolError

    def lines(found: list[Finding]) -> str:
        return "".join(f"{named(project.shown(f.path))}: {f.note}\n" for f in found)

    blocked = [f for f in touched if f.mend == "move"]
    by_hand = [f for f in touched if f.by_hand and not force]
    if blocked:
        raise ToolError(f"{lines(blocked)}nothing was written")
    if by_hand:
        raise ToolError(
            f"{lines(by_hand)}changed by hand, so nothing was written; `kvgen diff` shows the changes: make them in the spec or "
            "the template, or drop them with `kvgen build --force`"
        )


def _wanted(project: Project, chosen: list[Chosen]) -> list[str]:
    """The paths to write: the list of all sets; of a set chosen in part, everything but the other operations' kernels."""
    from kvgen.codegen.emit import kernel_files
    from kvgen.codegen.sets_page import PATH as PAGE

    skipped = set()
    for item in chosen:
        others = [op.name for op in item.loaded.kernels.ops if op.name not in item.ops]
        skipped |= {f"{item.name}/{kernel.name}.cu" for kernel, _ in kernel_files(item.loaded, others)}
    tops = {"device", PAGE, *(c.name for c in chosen)} if chosen else set[str]()
    return [path for path in project.files if path.split("/")[0] in tops and path not in skipped]
