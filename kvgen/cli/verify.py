"""`kvgen verify`: generated kernels held to the oracles on this machine's GPU or on the CPU machine, with a report to file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvgen.cli.console import Selectors, at_least, console, print_json, say
from kvgen.cli.progress import progress
from kvgen.files import named

if TYPE_CHECKING:
    from rich.table import Table

    from kvgen.cli.project import Project
    from kvgen.cli.selection import Chosen
    from kvgen.spec.kernel_set import KernelSet, Op
    from kvgen.verify.bandwidth import Reading
    from kvgen.verify.calibrate import Calibration
    from kvgen.verify.device import Gpu
    from kvgen.verify.memory import Memory
    from kvgen.verify.results import KernelResult, SetResult
    from kvgen.verify.timing import Timer

_NONE: Final = "-"
_STDOUT: Final = Path("-")
_SHOWN: Final = 3  # lines of what is wrong with one case; the report has all


@dataclass
class _Machine:
    """Where kernels run: a GPU, with the cubin of the kernels that measure its bandwidth, and what was measured; or the CPU
    machine (None).

    `lost`: what the driver said when the GPU's context was gone; nothing runs after that.
    """

    device: Gpu | None
    memory: Memory
    quick: bool
    seed: int
    cubin: bytes = b""
    bandwidth: tuple[Reading, ...] = ()
    calibration: Calibration | None = None
    lost: str = ""

    def timer(self, kernels: KernelSet, package: ModuleType) -> Timer | None:
        """What times the kernels of a set; None on the CPU machine."""
        from kvgen.verify.bandwidth import filler
        from kvgen.verify.timing import Timer

        if self.device is None:
            return None
        fill = filler(self.device, self.cubin)
        return Timer(self.device, kernels, package, fill, max(r.gb_s for r in self.bandwidth))


def verify(
    selectors: Selectors = None,
    gpu: Annotated[
        bool, typer.Option("--gpu/--cpu", help="On this machine's GPU, with times; or on the CPU machine, without.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="One batch and one kind of hostile data a kernel; one time.")
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the report as JSON; - prints it.", show_default=False),
    ] = None,
    issue: Annotated[
        Path | None,
        typer.Option("--issue", metavar="FILE", help="Write the text of an issue; - prints it.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", callback=at_least(0), help="Other random numbers.")] = 0,
) -> None:
    """Run generated kernels on ragged batches and on hostile data, and compare all memory with the float64 oracle.

    Data is hostile where page ids, lengths, offsets or indices are wrong: kernels must report it and touch nothing outside
    their arrays, around which canaries lie. With --gpu, the GPU's parts are measured first (latencies, rates), and kernels are
    timed beside the read bandwidth of the same run. Exits 1 if something is wrong.

    \b
    kvgen verify llama3_8b                        on the CPU machine; no GPU needed
    kvgen verify --gpu --json gpu.json            every set on this GPU
    kvgen verify --gpu --issue gpu.md --json gpu.json    a report to file
    """
    from kvgen.cli.project import open_project
    from kvgen.cli.resources_json import installed
    from kvgen.errors import ToolError
    from kvgen.files import is_folder, kind_of
    from kvgen.verify.report import document
    from kvgen.verify.report import issue as issue_text

    if json_file == _STDOUT and issue == _STDOUT:
        raise ToolError("--issue: got '-' beside --json -; one of them can be printed; give the other a file")
    for option, path in (("--json", json_file), ("--issue", issue)):
        if path not in (None, _STDOUT) and (kind := kind_of(path)) not in ("missing", "file"):
            raise ToolError(
                f"{option}: {named(path)} is a {kind}; give the name of a new file, or of a file to overwrite"
            )
        if path not in (None, _STDOUT) and not is_folder(path.parent):
            raise ToolError(f"{option}: {named(path)} is in no folder; make {named(path.parent)}, or name another file")
    printing = _STDOUT in (json_file, issue)
    project = open_project(selectors=selectors)
    machine = _machine(gpu, quick, seed)
    facts = machine.device.describe() if machine.device is not None else {"name": "CPU machine"}
    if not printing:
        say(f"{facts['name']}: {len(project.chosen)} set(s)")
    sets = _run(project, machine)
    found = document(
        sets,
        device=facts,
        nvrtc=installed(),
        seed=seed,
        quick=quick,
        selectors=selectors or (),
        bandwidth=machine.bandwidth,
        calibration=machine.calibration,
    )
    if json_file is not None:
        _write(json_file, found)
    if issue is not None:
        _write(issue, issue_text(found))
    if not printing:
        _print(sets, machine, found["summary"])
        for path, what in ((json_file, "the report"), (issue, "the text of an issue")):
            if path is not None:
                say(f"{what}: {named(path)}")
    project.end()
    if found["summary"]["wrong"] or found["calibration_wrong"]:
        raise typer.Exit(1)


def _machine(gpu: bool, quick: bool, seed: int) -> _Machine:
    """This machine's GPU, its parts and its bandwidth measured, or the CPU machine. Raises DeviceError that says what is
    missing."""
    from kvgen.compile import ARCHS, select_arch
    from kvgen.errors import DeviceError
    from kvgen.runtime import cuda
    from kvgen.verify.bandwidth import compiled, read_bandwidth
    from kvgen.verify.calibrate import calibrate, calibrate_cubin
    from kvgen.verify.device import Gpu
    from kvgen.verify.memory import GpuMemory, HostMemory
    from kvgen.verify.probe import GpuMachine

    if not gpu:
        return _Machine(None, HostMemory(), quick, seed)
    try:
        device = Gpu(cuda.driver().current_device())
        arch = select_arch(device.driver.capability(device.ordinal), ARCHS)
    except DeviceError as error:
        raise DeviceError(
            f"--gpu: {error}; `kvgen doctor` shows what this machine has, and `kvgen verify --cpu` needs no GPU"
        ) from error
    calibration = calibrate(GpuMachine(device, arch, calibrate_cubin(arch)))
    cubin = compiled(arch)
    return _Machine(device, GpuMemory(device.ordinal), quick, seed, cubin, read_bandwidth(device, cubin), calibration)


def _run(project: Project, machine: _Machine) -> list[SetResult]:
    """What was found of every set; the bar advances by kernels."""
    from kvgen.cli.project import generated

    sets: list[SetResult] = []
    with progress("verifying", sum(len(item.ops) for item in project.chosen)) as done:
        for item in project.chosen:
            with generated(project.config.out, item.name) as package:
                sets.append(_set(project, item, package, machine, done))
    return sets


def _arch(archs: Sequence[str], device: Gpu | None) -> str:
    """The target of a set whose code runs here; "" where it has none."""
    from kvgen.compile import select_arch
    from kvgen.errors import DeviceError

    if device is None:
        return next((a for a in reversed(archs) if a in ("sm_80", "sm_89", "sm_90a")), "")
    try:
        return select_arch(device.driver.capability(device.ordinal), archs)
    except DeviceError:
        return ""


def _set(project: Project, item: Chosen, package: ModuleType, machine: _Machine, done: Callable[[], None]) -> SetResult:
    """Every kernel of a set that was chosen."""
    from kvgen.verify.results import KernelResult, SetResult
    from kvgen.verify.run import Verifier

    kernels = item.loaded.kernels
    arch, (digest, in_step) = _arch(kernels.arch, machine.device), _digest(project, item.name)
    result = SetResult(item.name, arch or _NONE, digest, in_step)
    verifier = Verifier(kernels, package, machine.memory, machine.seed, machine.quick, machine.lost)
    timer = machine.timer(kernels, package) if arch else None
    where = "the CPU machine" if machine.device is None else "this GPU"
    for op in (op for op in kernels.ops if op.name in item.ops):
        if arch:
            result.kernels += [verifier.run(op, arch=other) for other in verifier.other_archs(op)]
            found = verifier.run(op)
        else:
            why = f"the set is generated for {', '.join(kernels.arch)}, none of which runs on {where}"
            found = KernelResult(op.name, op.kind, why=why)
        if timer is not None and found.cases and not verifier.lost:
            _time(timer, op, found, machine.quick)
        result.kernels.append(found)
        done()
    machine.lost = verifier.lost
    return result


def _time(timer: Timer, op: Op, found: KernelResult, quick: bool) -> None:
    """Add a kernel's times, or why there are none."""
    from kvgen.errors import DeviceError

    try:
        works = timer.works(op)
        found.timed += [timer.run(op, work) for work in (works[:1] if quick else works)]
    except DeviceError as error:
        found.why = f"not timed: {error}"


def _digest(project: Project, name: str) -> tuple[str, bool]:
    """The SHA-256 of a set's generated files and of the device library, as they lie there; whether they are what the spec
    gives."""
    from kvgen.cli.ondisk import LIMIT
    from kvgen.files import read_bytes

    hashed, same = hashlib.sha256(), True
    for path, file in project.files.items():
        if not path.startswith((f"{name}/", "device/")):
            continue
        data = read_bytes(project.config.out / path, limit=LIMIT, name=project.shown(path))
        hashed.update(f"{path}\0{len(data)}\0".encode() + data)
        same &= data == file.text.encode()
    return hashed.hexdigest(), same


def _write(path: Path, content: Any) -> None:
    """A text, or an object as JSON, to a file or to stdout."""
    import json

    from kvgen.errors import ToolError
    from kvgen.files import reason

    if path == _STDOUT:
        if isinstance(content, str):
            typer.echo(content, nl=False)
        else:
            print_json(content)
        return
    text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ToolError(f"{named(path)}: cannot be written: {reason(error)}") from error


# What is printed -----------------------------------------------------------------------------------------------------


def _print(sets: list[SetResult], machine: _Machine, summary: dict[str, int]) -> None:
    bandwidth, calibration = machine.bandwidth, machine.calibration
    if calibration is not None:
        typer.echo(f"calibration: {len(calibration.figures)} figures in {calibration.seconds:.1f} s; --json has them")
        for line in calibration.wrong:
            typer.secho(f"calibration, {line}", fg="red")
    if bandwidth:
        readings = ", ".join(f"{r.gb_s:.0f} ({r.nbytes / 2**20:.0f} MiB)" for r in bandwidth)
        typer.echo(f"read bandwidth of this GPU, GB/s: {readings}")
    typer.echo("")
    console().print(_table(sets, times=bool(bandwidth)))
    wrong = [(s, k) for s in sets for k in s.kernels if k.status == "wrong"]
    for s, k in wrong:
        typer.echo("")
        for case in (c for c in k.cases if c.wrong):
            typer.secho(f"{s.name}/{k.name}{f' on {k.arch}' if k.arch else ''}, {case.name}", fg="red")
            for line in case.wrong[:_SHOWN]:
                typer.echo(f"  {line}")
            if len(case.wrong) > _SHOWN:
                typer.echo(f"  and {len(case.wrong) - _SHOWN} more")
    for s in sets:
        for k in s.kernels:
            if k.why:
                say(f"{s.name}/{k.name}: {k.why}")
        if not s.in_step:
            say(f"{s.name}: its generated files are not what the spec gives; `kvgen check` shows where")
    launches = f"{summary['cases']} launches, {summary['hostile']} of them on hostile data"
    verdict = f"{summary['wrong']} wrong" if summary["wrong"] else "all right"
    typer.echo("")
    typer.secho(
        f"{summary['kernels']} kernel(s), {launches}, {summary['not_run']} kernel(s) not run: {verdict}",
        fg="red" if summary["wrong"] else "green",
    )


def _table(sets: list[SetResult], *, times: bool) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("kernel", "arch", "status"):
        table.add_column(title, no_wrap=True)
    numbers = ("batches", "largest error", "of its bound", "hostile", "as expected")
    for title in (*numbers, *(("workload", "us", "GB/s", "of read") if times else ())):
        table.add_column(title, justify="right", no_wrap=True)
    for s in sets:
        for k in s.kernels:
            first = _cells(s, k)
            rows: list[tuple[str, ...]] = [
                (t.workload, f"{t.us:.1f}", f"{t.gb_s:.0f}", f"{t.percent:.0f}%") for t in k.timed
            ]
            for row in rows or [(_NONE,) * 4 if times else ()]:
                table.add_row(*first, *row)
                first = ("",) * len(first)
    return table


def _cells(s: SetResult, k: KernelResult) -> tuple[str, ...]:
    from kvgen.verify.results import share_text

    if not k.cases:
        return (f"{s.name}/{k.name}", k.arch or s.arch, k.status, *(_NONE,) * 5)
    bad = k.hostile
    as_expected = sum(not c.wrong for c in bad)
    return (
        f"{s.name}/{k.name}",
        k.arch or s.arch,
        k.status,
        str(len(k.cases) - len(bad)),
        f"{k.error:.2g}" if k.error else "0",
        share_text(k.share),
        str(len(bad)),
        str(as_expected),
    )
