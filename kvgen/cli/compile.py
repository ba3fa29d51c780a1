"""`kvgen compile`: every kernel for every architecture, and what it occupies there. No GPU needed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvgen.cli.console import Json, Selectors, print_json, say
from kvgen.cli.progress import Steps, progress
from kvgen.files import named

if TYPE_CHECKING:
    from kvgen.cli.project import Project
    from kvgen.cli.selection import Chosen
    from kvgen.compile import Image, Job, Launchers
    from kvgen.errors import CompileError
    from kvgen.plan.kernel import KernelPlan


@dataclass(frozen=True)
class _Batch:
    """Jobs of the compiler; per unit its plan, the digest of its text and the kernels in its place by architecture; the launchers
    of the sets; of sets that are shards the whole set's name and the number of GPUs."""

    jobs: list[Job]
    kernels: dict[str, KernelPlan]
    digests: dict[str, str]
    launchers: dict[str, Launchers]
    by_arch: dict[str, dict[str, str]]
    shards: dict[str, tuple[str, int]]


def compile_kernels(
    selectors: Selectors = None,
    arch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARCH", help="Instead of the specs' architectures; repeatable, globs allowed.", show_default=False
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="DIR",
            help="Write cubins, launchers and a manifest for KVGEN_CUBINS.",
            show_default=False,
        ),
    ] = None,
    tp: Annotated[
        str | None,
        typer.Option(
            "--tp",
            metavar="N,M",
            help="For one of N GPUs that share the heads, and of M: a set each, called <set>_tpN; the set itself for 1.",
            show_default=False,
        ),
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Write resources.json beside the kernels; whole sets only.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="With --record: overwrite a resources.json that was changed by hand, too.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 if a kernel spills registers.")] = False,
    as_json: Json = False,
) -> None:
    """Compile with NVRTC: in parallel, cached, without a GPU; shows registers, shared memory and spills.

    Where a kernel does not compile, the others are shown, nothing is written, and kvgen exits with 1.

    \b
    kvgen compile                               every kernel for the architectures of its spec
    kvgen compile llama3_8b --arch 'sm_*'       one set for every architecture
    kvgen compile -o cubins --strict            ahead of time; KVGEN_CUBINS=cubins then loads them
    kvgen compile qwen3_8b --tp 1,2,4,8 -o cubins   a set a number of GPUs; kvgen.load("qwen3_8b", tp=4) finds it
    kvgen compile --record                      resources.json, for reviewers and `kvgen diff`
    """
    from kvgen.cli.project import open_project
    from kvgen.cli.resources_json import check_pin
    from kvgen.cli.shards import shards_of, tp_sizes
    from kvgen.compile import UnitsError, compile_many, default_cache, write_folder
    from kvgen.errors import CompileError, ToolError

    if record and arch:
        raise ToolError("--record: got it beside --arch; it records the architectures of the specs; drop one")
    if record and tp:
        raise ToolError(f"--record: got it beside --tp {tp}; it records the sets of the specs; drop one")
    sizes = tp_sizes(tp) if tp else (1,)
    project = open_project(selectors=selectors)
    project, shards = shards_of(project, sizes)
    chosen = project.chosen
    if record:
        partial = [c.name for c in chosen if not c.whole]
        if partial:
            raise ToolError(f"--record: got operations of {', '.join(partial)}; resources.json holds whole sets")
        check_pin(project)
        if not force:
            _keep_edited(project, chosen)
    batch = _batch(project, chosen, arch, shards)
    refused: CompileError | None = None
    with progress("compiling", len(batch.jobs)) as done:
        try:
            images = compile_many(
                batch.jobs, cache=default_cache(), progress=lambda image: _compiled(done, image), origin=project.origin
            )
        except CompileError as error:
            images, refused = error.images if isinstance(error, UnitsError) else [], error
    if refused:
        _show_refused(images, batch, refused, folder=folder, record=record, as_json=as_json)
        project.end()
        raise typer.Exit(1)
    if folder:
        write_folder(folder, images, batch.digests, batch.launchers, batch.by_arch, batch.shards)
    if record:
        _record(project, chosen, images, batch)
    spilling = [image for image in images if _spills(image)]
    if as_json:
        _print_json(images, batch, folder)
    else:
        _print_table(images, batch)
        if folder:
            size = sum(len(image.data) for image in images)
            typer.echo(
                f"{len(images)} cubins, {size:,} bytes, in {named(folder)}; run with KVGEN_CUBINS={named(folder)}"
            )
        if record:
            say(f"recorded resources.json of {len(chosen)} set(s)")
    project.end()
    if strict and spilling:
        names = ", ".join(f"{i.unit_name} {i.arch}" for i in spilling)
        typer.echo(f"{len(spilling)} of {len(images)} kernels spill registers: {names}", err=True)
        raise typer.Exit(1)


def _compiled(done: Steps, image: Image) -> None:
    """A kernel more: the bar names it."""
    done.at(f"{image.unit_name} {image.arch}")
    done()


def _show_refused(
    images: list[Image], batch: _Batch, refused: CompileError, *, folder: Path | None, record: bool, as_json: bool
) -> None:
    """The kernels that compiled, then those that did not; cubins and resources.json of a part of the kernels are not written."""
    if as_json:
        _print_json(images, batch, None, str(refused))
    elif images:
        _print_table(images, batch)
    typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
    typer.echo(str(refused), err=True)
    kept = ([named(folder)] if folder else []) + (["resources.json"] if record else [])
    if kept:
        typer.echo(f"\nnothing was written to {' and '.join(kept)}: they hold all kernels or none", err=True)


def _archs(patterns: list[str]) -> list[str]:
    """The targets that the patterns name; a glob means those of them that this NVRTC knows."""
    from fnmatch import fnmatchcase

    from kvgen.compile import ARCHS, supported_archs
    from kvgen.errors import ToolError
    from kvgen.schema.hints import nearest

    found: list[str] = []
    for pattern in patterns:
        pool = supported_archs() if any(ch in pattern for ch in "*?[") else ARCHS
        hits = [a for a in pool if fnmatchcase(a, pattern)]
        if not hits:
            meant = nearest(pattern, list(ARCHS), "KernelSet", "arch")
            raise ToolError(
                f"--arch: got {pattern!r}; it must be one of {', '.join(ARCHS)}, or a glob such as 'sm_*'{meant}"
            )
        found += [a for a in hits if a not in found]
    return found


def _batch(
    project: Project, chosen: list[Chosen], arch: list[str] | None, shards: dict[str, tuple[str, int]]
) -> _Batch:
    from kvgen.codegen.emit import kernel_files, kernels_by_arch, launchers_of
    from kvgen.compile import text_digest

    targets = _archs(arch) if arch else None
    batch = _Batch([], {}, {}, {}, {}, shards)
    for item in chosen:
        found = {
            f"{item.name}/{kernel.name}": (kernel, own) for kernel, own in kernel_files(item.loaded, item.ops, targets)
        }
        batch.by_arch.update(kernels_by_arch(item.loaded))
        batch.kernels.update({name: kernel for name, (kernel, _) in found.items()})
        batch.launchers[item.name] = launchers_of(item.name, project.files)
        for unit in project.units[item.name]:
            batch.digests[unit.name] = text_digest(unit.text)
            if unit.name in found:
                batch.jobs.extend((unit, a, "cubin") for a in found[unit.name][1])
    return batch


def _keep_edited(project: Project, chosen: list[Chosen]) -> None:
    """Raise ToolError, before anything is compiled, where recording would lose what somebody wrote."""
    from kvgen.cli.project import RESOURCES
    from kvgen.cli.sync import findings
    from kvgen.errors import ToolError

    names = {f"{item.name}/{RESOURCES}" for item in chosen}
    found = [f for f in findings(project, {item.name for item in chosen}) if f.path in names and f.by_hand]
    if found:
        lines = "".join(f"{project.shown(f.path)}: {f.note}\n" for f in found)
        raise ToolError(
            f"{lines}changed by hand, so nothing was recorded; `kvgen compile --record --force` records anyway"
        )


def _record(project: Project, chosen: list[Chosen], images: list[Image], batch: _Batch) -> None:
    from kvgen.cli.project import RESOURCES
    from kvgen.cli.resources_json import record
    from kvgen.files import write_inside

    sources = {unit.name: unit.text for unit, *_ in batch.jobs}
    with progress("disassembling", len(chosen)) as done:
        for item in chosen:
            done.at(item.name)
            own = [image for image in images if image.unit_name.partition("/")[0] == item.name]
            text = record(
                item.loaded,
                project.files,
                project.config.out.name,
                own,
                project.digests[item.name],
                batch.kernels,
                sources,
            )
            write_inside(project.config.root, project.shown(f"{item.name}/{RESOURCES}"), text.encode())
            done()


def _spills(image: Image) -> int:
    """Bytes a thread spills, stores and loads together."""
    return image.resources.spill_stores + image.resources.spill_loads if image.resources else 0


def _print_json(images: list[Image], batch: _Batch, folder: Path | None, refused: str | None = None) -> None:
    from kvgen.cli.resources_json import installed

    kernels: list[dict[str, Any]] = []
    for image in images:
        assert image.resources is not None
        used = image.resources
        kernels.append(
            {
                "kernel": image.unit_name,
                "arch": image.arch,
                "tp": batch.shards.get(image.unit_name.partition("/")[0], ("", 1))[1],
                "digest": batch.digests[image.unit_name],
                "registers": used.registers,
                "static_shared": used.static_shared,
                "dynamic_shared": batch.kernels[image.unit_name].shared_on(image.arch),
                "spill_stores": used.spill_stores,
                "spill_loads": used.spill_loads,
                "stack": used.stack,
                "seconds": round(image.seconds, 4),
                "cached": image.cached,
                "warnings": list(image.warnings),
            }
        )
    found = {"nvrtc": installed(), "folder": str(folder) if folder else None, "kernels": kernels}
    print_json(found | ({"refused": refused} if refused else {}))


def _print_table(images: list[Image], batch: _Batch) -> None:
    from kvgen.cli.resources_json import installed
    from kvgen.cli.table import Column, Table, numbers, words

    titles = numbers("registers", "shared", "spills", "seconds")
    table = Table((*words("kernel", "arch"), *titles, Column("", spare=True)))
    for image in images:
        assert image.resources is not None
        shared = image.resources.static_shared + batch.kernels[image.unit_name].shared_on(image.arch)
        table.add(
            image.unit_name,
            image.arch,
            str(image.resources.registers),
            str(shared),
            str(_spills(image)),
            f"{image.seconds:.3f}",
            "cached" if image.cached else "",
        )
    table.print(mark="spills")
    fresh = sum(not image.cached for image in images)
    say(f"\n{len(images)} cubins, NVRTC {installed()}: {fresh} compiled, {len(images) - fresh} from the cache")
    for image in images:
        for warning in image.warnings:
            typer.echo(f"{image.unit_name} {image.arch}: {warning}", err=True)
