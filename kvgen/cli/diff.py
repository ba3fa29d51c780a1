"""`kvgen diff`: what a change does to the generated code and to what kernels occupy, each identical hunk once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvgen.cli.console import Json, Selectors, console, print_json

if TYPE_CHECKING:
    from rich.text import Text

    from kvgen.cli.deltas import Delta, Step
    from kvgen.cli.hunks import Hunk
    from kvgen.cli.project import Project
    from kvgen.cli.selection import Chosen

_COLOURS: Final = {"+": "green", "-": "red", "@": "cyan"}
_MACHINE_CODE: Final = "machine_code"  # a digest: what matters is that it differs
# Of which more is worse; of the others it may be better.
_COSTS: Final = (
    *(
        "registers",
        "spills",
        "shared",
        "instructions",
        "trip_cycles",
        "trip_cycles_loaded",
        "trip_slots",
        "awaited_loads",
    ),
    *("serialised_products", "setmaxnreg_dropped", "local_accesses", "loop_fences", "dependent_loads"),
)
_NAMED: Final = 8  # kernels that are not recorded; --json has all


def diff(
    selectors: Selectors = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="REV", help="Compare generated/ at this git revision with generated/ now.", show_default=False
        ),
    ] = None,
    exit_code: Annotated[
        bool,
        typer.Option("--exit-code", help="Exit 1 where there is a change; without it 0 with a change and without."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what `kvgen build` would change, or what changed since a git revision.

    An identical hunk is shown once, with the number of files that have it; set names count as identical. Below the hunks,
    what changed of each kernel's resources (docs/review.md), as resources.json has them on both sides; a kernel whose text
    changed and that was not recorded anew is named as such. Exits 0, with --exit-code 1 where anything changed, 2 where it
    cannot tell.

    \b
    kvgen diff                          the folder against what the specs give
    kvgen diff --against main           a pull request's change to the kernels and their resources
    kvgen diff '*/append' --against HEAD~1
    """
    from kvgen.cli.deltas import compilers, deltas_of
    from kvgen.cli.git_versions import at_revision, on_disk
    from kvgen.cli.hunks import hunks_of
    from kvgen.cli.project import open_project

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
    keep = {path for path in old.keys() | new.keys() if _chosen(path, chosen)}
    numbers = deltas_of(old, new, project.config.out.name, keep.__contains__)
    under = [compilers(side, keep.__contains__) for side in (old, new)]
    old, new = ({p: t for p, t in side.items() if p in keep} for side in (old, new))
    found = hunks_of(old, new, project.shown, [s.kernels.name for s in project.sets])
    if as_json:
        print_json(
            {
                "hunks": [{"files": h.files, "state": h.state, "text": "\n".join(h.lines)} for h in found],
                "resources": [
                    {"kernel": d.kernel, "arch": d.arch, "state": d.state, "facts": d.facts} for d in numbers
                ],
                "nvrtc": under,
            }
        )
    else:
        _print(found)
        _print_resources(numbers, *under)
    project.end()
    if exit_code and (found or numbers or _recompiled(*under)):
        raise typer.Exit(1)


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


def _recompiled(before: list[str], after: list[str]) -> bool:
    """Whether the facts of both sides are there, and of two compilers."""
    return bool(before and after and before != after)


def _print_resources(deltas: list[Delta], before: list[str], after: list[str]) -> None:
    """A line a kernel and architecture, the same one once; then the kernels that have none."""
    from rich.text import Text

    lines: dict[tuple[object, ...], list[Delta]] = {}
    for delta in deltas:
        name = delta.kernel.partition("/")[2]
        lines.setdefault((name, delta.arch, delta.state, *delta.facts.items()), []).append(delta)
    unknown = [delta.kernel for delta in deltas if delta.state == "unrecorded"]
    screen = console()
    if _recompiled(before, after):
        screen.print(Text(f"recorded under NVRTC {', '.join(before)} -> {', '.join(after)}"), soft_wrap=True)
    for group in lines.values():
        if group[0].state != "unrecorded":
            line = _line(group[0])
            line.append(f"  same in {len(group)} sets" if len(group) > 1 else "", "dim")
            screen.print(line, soft_wrap=True)
    if unknown:
        names = ", ".join(unknown[:_NAMED]) + (f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else "")
        text = f"not recorded as they are now: {names}; `kvgen build && kvgen compile --record` measures them"
        screen.print(Text(text, "yellow"), soft_wrap=True)


def _line(delta: Delta) -> Text:
    from rich.text import Text

    from kvgen.files import named

    line = Text()
    line.append(named(delta.kernel), "bold")
    line.append(f" {named(delta.arch)}" if delta.arch else "")
    line.append(": " if delta.state == "changed" else f": {delta.state}")
    shown = {what: step for what, step in delta.facts.items() if step not in ((0, None), (None, 0))}
    if delta.state != "changed":
        shown.pop(_MACHINE_CODE, None)
    if delta.state != "changed" and shown:
        line.append(", ")
    for number, (what, step) in enumerate(shown.items()):
        line.append(", " if number else "")
        _append_fact(line, named(what), step)
    return line


def _append_fact(line: Text, what: str, step: Step) -> None:
    before, after = step
    if what == _MACHINE_CODE:
        line.append("other machine code")
        return
    if before is None or after is None:
        line.append(f"{what} {after if before is None else before}")
        return
    colour = "cyan" if what not in _COSTS else "red" if after > before else "green"
    line.append(f"{what} {before} -> {after} ")
    line.append(f"({after - before:+d})", colour)
