"""`kvgen demo`: a real model's cache from its config to checked numbers, on the machine at hand."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvgen.architectures import HOPPER
from kvgen.cli.console import tell
from kvgen.cli.progress import progress
from kvgen.files import named

if TYPE_CHECKING:
    from kvgen.cli.demo_steps import Outcome
    from kvgen.cli.project import Project
    from kvgen.compile import Image

SET: Final = "llama3_8b"
_NOT_HERE: Final = "-"


class Device(StrEnum):
    """Where the kernels run; `auto` is the GPU if there is one."""

    auto = "auto"
    cpu = "cpu"
    gpu = "gpu"


def demo(
    device: Annotated[
        Device,
        typer.Option(metavar="DEVICE", help="cpu, gpu, or auto: the GPU if there is one.", show_default=False),
    ] = Device.auto,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="DIR",
            help="Keep the project here, not in a temporary folder.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Llama-3.1-8B's KV cache, end to end: config.json, spec, CUDA, cubins, a ragged batch, the float64 oracle.

    Needs no GPU: without one the compiled kernels run on the CPU machine, with every access checked. Exits 1 if a
    number is wrong.

    \b
    kvgen demo              in a temporary folder
    kvgen demo -o llama     keeps spec and generated code in llama/
    """
    from kvgen.cli.demo_steps import run
    from kvgen.errors import ConfigError
    from kvgen.runtime.cpu import require_host_compiler

    if output is not None and not _empty(output):
        raise ConfigError(f"-o: got {named(output)!r}, which is there and not empty; give a new folder")
    ordinal = _gpu(device)
    if ordinal is None:
        require_host_compiler()
    place = tempfile.TemporaryDirectory(prefix="kvgen-demo-") if output is None else nullcontext(str(output))
    with place as folder:
        project = _build(Path(folder))
        images = _compile(project)
        outcomes = run(project, SET, ordinal)
    good = all(o.right for o in outcomes)
    _print_results(outcomes, images)
    verdict = "every number is right" if good else "WRONG: kernels and oracle disagree; please report it"
    typer.secho(verdict, fg="green" if good else "red", bold=True)
    typer.echo(f"\nnext: {_next(output)}")
    if not good:
        raise typer.Exit(1)


def _empty(folder: Path) -> bool:
    from kvgen.files import kind_of, names_in

    kind = kind_of(folder)
    return kind == "missing" or (kind == "folder" and not names_in(folder))


def _next(output: Path | None) -> str:
    if output is None:
        return "kvgen demo -o llama && cd llama && kvgen show llama3_8b/append --map"
    return f"cd {named(output)} && kvgen show {SET}/append --map"


def _gpu(device: Device) -> int | None:
    """The GPU's ordinal, None for the CPU machine; DeviceError where a GPU is asked for and there is none."""
    from kvgen.errors import DeviceError
    from kvgen.runtime import cuda

    if device is Device.cpu:
        return None
    try:
        driver = cuda.driver()
        ordinal = driver.current_device()
        driver.capability(ordinal)
    except DeviceError:
        if device is Device.gpu:
            raise
        return None
    return ordinal


def _build(folder: Path) -> Project:
    """config.json -> spec -> generated files, in a project of its own."""
    from kvgen import models
    from kvgen.cli.project import open_project
    from kvgen.codegen.emit import write_file
    from kvgen.compile import ARCHS
    from kvgen.files import write_inside

    text = models.spec_text(models.example(), source=models.EXAMPLE, arch=tuple(reversed(ARCHS)))
    write_inside(folder, "pyproject.toml", b'[tool.kvgen]\nspecs = "specs"\nout = "generated"\n')
    write_inside(folder, f"specs/{SET}.py", text.encode())
    project = open_project(folder)
    for file in project.files.values():
        write_file(project.config.out, file)
    kernels = project.sets[0].kernels
    tell(
        f"spec      {models.EXAMPLE} -> specs/{SET}.py: {kernels.q_heads} query heads over {kernels.kv.kv_heads} "
        f"KV heads of {kernels.kv.head_dim}, {kernels.kv.dtype}, pages of {kernels.kv.page_tokens} tokens",
        indent=10,
    )
    lines = sum(file.text.count("\n") for path, file in project.files.items() if path.endswith((".cu", ".cuh")))
    typer.echo(f"build     {len(project.files)} files, {lines} lines of CUDA")
    return project


def _compile(project: Project) -> dict[str, Image]:
    """Every kernel that runs on one architecture, the cache left out of it; by the kernel's name in the set."""
    from kvgen.cli.resources_json import installed
    from kvgen.codegen.emit import set_plans
    from kvgen.compile import Job, compile_many

    (loaded,) = (s for s in project.sets if s.kernels.name == SET)
    names_of = {f"{SET}/{plan.on(HOPPER).name}": plan.name for group in set_plans(loaded).values() for plan in group}
    jobs: list[Job] = [(unit, HOPPER, "cubin") for unit in project.units[SET] if unit.name in names_of]
    names = iter([f"{unit.name} {HOPPER}" for unit, *_ in jobs[1:]])
    with progress("compiling", len(jobs)) as done:
        done.at(f"{jobs[0][0].name} {HOPPER}")

        def next_one(_: Image) -> None:
            done()
            done.at(next(names, ""))

        images = compile_many(jobs, cache=None, workers=1, origin=project.origin, progress=next_one)
    total = sum(image.seconds for image in images)
    tell(f"compile   {len(images)} kernels for {HOPPER} with NVRTC {installed()}, no cache: {total:.2f} s", indent=10)
    return {names_of[image.unit_name]: image for image in images}


def _print_results(outcomes: list[Outcome], images: dict[str, Image]) -> None:
    from kvgen.cli.table import Table, numbers, words

    titles = ("launches", "rows", "largest error", "of its bound", "bytes moved", "minimum", "compile", "registers")
    table = Table((*words("kernel"), *numbers(*titles)))
    for o in outcomes:
        image = images[o.kernel]
        table.add(
            o.kernel,
            str(o.launches),
            str(o.rows),
            f"{o.error:.2g}" if o.error else "0",
            f"{o.share:.0%}" if o.share else "exact" if o.right else "none allowed",
            _NOT_HERE if o.moved is None else f"{o.moved:,} ({o.moved / o.minimum:.2f}x)",
            f"{o.minimum:,}",
            f"{image.seconds:.2f} s",
            str(image.resources.registers if image.resources else _NOT_HERE),
        )
    typer.echo("")
    table.print()
    typer.echo("")
