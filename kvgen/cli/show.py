"""`kvgen show`: one set or operation, from the decisions behind it down to its machine code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kvgen.cli.console import Json, complete_selector, print_json
from kvgen.cli.settings import settings
from kvgen.paths import templates_root

if TYPE_CHECKING:
    from kvgen.cli.project import Project
    from kvgen.cli.selection import Chosen
    from kvgen.compile import Unit


def show(
    selector: Annotated[
        str | None,
        typer.Argument(metavar="SELECTOR", hidden=True, autocompletion=complete_selector, show_default=False),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="The layout and every decision about the kernels.")] = False,
    line_map: Annotated[bool, typer.Option("--map", help="Each generated line beside its template:line.")] = False,
    flat: Annotated[bool, typer.Option("--flat", help="The self-contained text that NVRTC compiles.")] = False,
    ptx: Annotated[bool, typer.Option("--ptx", help="The PTX of the kernels.")] = False,
    sass: Annotated[bool, typer.Option("--sass", help="The machine code of the kernels; needs kvgen[sass].")] = False,
    arch: Annotated[
        str | None,
        typer.Option(metavar="ARCH", help="For --ptx and --sass; by default the spec's last.", show_default=False),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            "--template",
            metavar="NAME",
            help="Print a template instead of a set, such as ops/append.cu.j2: what banners and --map name.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print what the specs give for a set or an operation; by default its generated files.

    \b
    kvgen show llama3_8b/append               the CUDA, every constant folded
    kvgen show llama3_8b --plan               layout, parameters, grids
    kvgen show llama3_8b/append --map         where each line comes from
    kvgen show llama3_8b/decode --sass --arch sm_90a
    kvgen show --template ops/append.cu.j2    a template that a banner names
    """
    from kvgen.cli.project import open_project
    from kvgen.errors import ToolError

    views = {"--plan": plan, "--map": line_map, "--flat": flat, "--ptx": ptx, "--sass": sass}
    named = [name for name, given in views.items() if given]
    if template is not None:
        if selector is not None or named or arch or as_json:
            raise ToolError(
                "--template: got it beside other things to show; a template is the same for all sets; drop the rest"
            )
        typer.echo(_template(template), nl=False)
        return
    if selector is None:
        raise ToolError("show: got no SELECTOR; name a set or an operation, as llama3_8b/append; `kvgen list` has all")
    if len(named) > 1:
        raise ToolError(f"show: got {' and '.join(named)}; one view at a time; drop all but one")
    if arch and not (ptx or sass):
        raise ToolError(f"--arch: got {arch!r} without --ptx or --sass; nothing else depends on it; add one")
    if as_json and not plan:
        raise ToolError("--json: got it without --plan; the other views are text already; drop it, or add --plan")
    project = open_project(selectors=[selector], device=plan or flat or ptx or sass)
    chosen = project.chosen
    if plan:
        _show_plan(project, as_json)
    elif flat or ptx or sass:
        _print_parts([(u.name, text) for u, text in _code(project, chosen, ptx=ptx, sass=sass, arch=arch)])
    else:
        _print_parts([(project.shown(p), _text(project, p, line_map)) for p in _paths(project, chosen)])
        if line_map and templates_root().parent != project.config.root:
            _say_templates()
    project.end()


def _say_templates() -> None:
    """Where the paths of --map lie, on stderr, for those whose project has no templates of its own."""
    from kvgen.files import named

    if not settings().quiet:
        place = named(templates_root())
        typer.echo(f"templates/ is {place}; `kvgen show --template NAME` prints one of its files", err=True)


def _template(name: str) -> str:
    """The text of a template: a path below the templates, as banners and --map write it. Raises ToolError."""
    import difflib

    from kvgen.errors import ToolError
    from kvgen.files import read_text

    root = templates_root()
    path = name.removeprefix("templates/").partition(":")[0]
    known = sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.suffix in (".j2", ".cuh"))
    if path not in known:
        near = difflib.get_close_matches(path, known, n=3) or [n for n in known if path in n][:3]
        meant = f"did you mean {', '.join(near)}?" if near else "paths are as banners have them: ops/append.cu.j2"
        raise ToolError(f"--template: got {name!r}; there is no such template; {meant}")
    return read_text(root / path, limit=1 << 22)


def _print_parts(parts: list[tuple[str, str]]) -> None:
    """The parts, each under a heading where there are several."""
    for number, (title, text) in enumerate(parts):
        if len(parts) > 1:
            typer.secho(f"{chr(10) if number else ''}==> {title} <==", bold=True)
        typer.echo(text, nl=not text.endswith("\n"))


def _kernels(item: Chosen, archs: Sequence[str] | None = None) -> list[str]:
    """Kernels with a file of their own; with `archs` those that are for one of them."""
    from kvgen.codegen.emit import kernel_files

    found = kernel_files(item.loaded, item.ops, archs)
    return [kernel.name for kernel, own in found if own or archs is None]


def _paths(project: Project, chosen: list[Chosen]) -> list[str]:
    paths = []
    for item in chosen:
        kernels = [f"{item.name}/{name}.cu" for name in _kernels(item)]
        paths += [p for p in project.files if p.startswith(f"{item.name}/")] if item.whole else kernels
    return paths


def _text(project: Project, path: str, line_map: bool) -> str:
    file = project.files[path]
    if not line_map:
        return file.text
    origins = file.origins
    width = max(map(len, origins), default=0)
    lines = file.text.removesuffix("\n").split("\n")
    return "\n".join(f"{origins[i]:{width}}  {i + 1:4} | {line}".rstrip() for i, line in enumerate(lines))


def _code(project: Project, chosen: list[Chosen], *, ptx: bool, sass: bool, arch: str | None) -> list[tuple[Unit, str]]:
    from kvgen.compile import ImageKind, compile_many, default_cache
    from kvgen.compile.sass import sass as disassemble

    jobs = []
    for item in chosen:
        target = arch or item.loaded.kernels.arch[-1]
        names = {f"{item.name}/{name}" for name in _kernels(item, [target] if ptx or sass else None)}
        jobs += [(unit, target) for unit in project.units[item.name] if unit.name in names]
    if not (ptx or sass):
        return [(unit, unit.text) for unit, _ in jobs]
    kind: ImageKind = "ptx" if ptx else "cubin"
    images = compile_many([(u, a, kind) for u, a in jobs], cache=default_cache(), origin=project.origin)
    return [
        (unit, image.data.decode() if ptx else disassemble(image.data))
        for (unit, _), image in zip(jobs, images, strict=True)
    ]


def _show_plan(project: Project, as_json: bool) -> None:
    from kvgen.cli.describe import describe, plan_text
    from kvgen.cli.slow_kernels import on_cuda_cores

    described = [describe(item.loaded, item.ops) for item in project.chosen]
    slow = {found.kernel: found for found in on_cuda_cores(project)}
    for item in described:
        for kernel in item["kernels"]:
            found = slow.get(f"{item['set']}/{kernel['name']}")
            if found is not None:
                kernel["attention"] |= {"device": found.device, "percent_of_reachable": found.percent}
    if as_json:
        print_json(described)
    else:
        typer.echo("\n\n".join(plan_text(item) for item in described))
