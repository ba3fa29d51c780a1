"""`kvgen verify`: generated kernels held to the oracles on this machine's GPU or on the CPU machine, with a report to file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvgen.architectures import on_cpu
from kvgen.cli.console import Selectors, at_least, broken, print_json, say
from kvgen.cli.progress import Steps, progress
from kvgen.files import named

if TYPE_CHECKING:
    from kvgen.cli.table import Table
    from kvgen.cli.verify_sets import Verified
    from kvgen.verify.bandwidth import Reading
    from kvgen.verify.calibrate import Calibration
    from kvgen.verify.results import KernelResult, SetResult

_NONE: Final = "-"
_STDOUT: Final = Path("-")
_SHOWN: Final = 3  # lines of what is wrong with one case; the report has all


@dataclass
class _Found:
    """The machine, what was measured of it (on a GPU), and the results of every set."""

    facts: dict[str, Any]
    sets: list[SetResult]
    bandwidth: tuple[Reading, ...] = ()
    calibration: Calibration | None = None


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
    drawn: Annotated[
        int,
        typer.Option(
            "--drawn",
            metavar="N",
            callback=at_least(0),
            help="Run N sets of each drawn kind; sets of the project run beside them where SELECTORS name them.",
        ),
    ] = 0,
    patience: Annotated[
        int,
        typer.Option(
            "--patience",
            metavar="S",
            callback=at_least(1),
            help="With --gpu: seconds until a silent case is killed; a timing has four times as many.",
        ),
    ] = 8,
) -> None:
    """Run generated kernels on ragged batches and on hostile data, and compare all memory with the float64 oracle.

    Data is hostile where page ids, lengths, offsets or indices are wrong: kernels must report it and touch nothing outside
    their arrays, around which canaries lie. With --gpu, the GPU's parts are measured first (latencies, rates), and kernels are
    timed beside the read bandwidth of the same run. Exits 1 if something is wrong.

    \b
    kvgen verify llama3_8b                        on the CPU machine; no GPU needed
    kvgen verify --gpu --json gpu.json            every set on this GPU
    kvgen verify --gpu --issue gpu.md --json gpu.json    a report to file
    kvgen verify --drawn 2 --seed 7               features that the project's sets do not have
    """
    from kvgen.cli.project import open_project
    from kvgen.cli.resources_json import installed
    from kvgen.cli.verify_sets import drawn_sets, of_project
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
    project = open_project(selectors=selectors) if selectors or not drawn else None
    sets = [*(of_project(project) if project is not None else ()), *drawn_sets(drawn, seed)]
    said = partial(_say_machine, len(sets), printing)
    ran = _on_gpu(sets, quick, seed, patience, said) if gpu else _on_cpu(sets, quick, seed, said)
    found = document(
        ran.sets,
        device=ran.facts,
        nvrtc=installed(),
        seed=seed,
        quick=quick,
        selectors=(*(selectors or ()), *((f"--drawn {drawn}",) if drawn else ())),
        bandwidth=ran.bandwidth,
        calibration=ran.calibration,
    )
    if json_file is not None:
        _write(json_file, found)
    if issue is not None:
        _write(issue, issue_text(found))
    if not printing:
        _print(ran, found["summary"])
        for path, what in ((json_file, "the report"), (issue, "the text of an issue")):
            if path is not None:
                say(f"{what}: {named(path)}")
    if project is not None:
        project.end()
    if found["summary"]["wrong"] or found["calibration_wrong"]:
        raise typer.Exit(1)


def _say_machine(sets: int, printing: bool, facts: dict[str, Any]) -> None:
    if not printing:
        say(f"{facts['name']}: {sets} set(s)")


def _on_gpu(
    sets: Sequence[Verified], quick: bool, seed: int, patience: int, said: Callable[[dict[str, Any]], None]
) -> _Found:
    """Every set on this machine's GPU. Raises DeviceError that says what is missing."""
    from kvgen.cli.verify_gpu import How, verify_gpu

    found = verify_gpu(sets, How(quick, seed, patience), said)
    return _Found(found.facts, found.sets, found.bandwidth, found.calibration)


def _on_cpu(sets: Sequence[Verified], quick: bool, seed: int, said: Callable[[dict[str, Any]], None]) -> _Found:
    """Every set on the CPU machine, in this process; the bar advances by kernels."""
    from kvgen.runtime.cpu import require_host_compiler

    require_host_compiler()
    found = _Found({"name": "CPU machine"}, [])
    said(found.facts)
    with progress("verifying", sum(len(its.ops) for its in sets)) as done:
        for its in sets:
            found.sets.append(_set(its, quick, seed, done))
    return found


def _set(its: Verified, quick: bool, seed: int, done: Steps) -> SetResult:
    """Every kernel of a set that was chosen, on the CPU machine."""
    from kvgen.verify.memory import HostMemory
    from kvgen.verify.results import KernelResult, SetResult
    from kvgen.verify.run import Verifier

    kernels = its.kernels
    arch = next(reversed(on_cpu(kernels.arch)), "")
    with its.package() as package:
        result = SetResult(its.name, arch or _NONE, *its.digest())
        verifier = Verifier(kernels, package, HostMemory(), seed, quick)
        for op in (op for op in kernels.ops if op.name in its.ops):
            done.at(f"{its.name}/{op.name} {arch}")
            if arch:
                result.kernels += [verifier.run(op, arch=other) for other in verifier.other_archs(op)]
                result.kernels.append(verifier.run(op))
            else:
                why = f"the set is generated for {', '.join(kernels.arch)}, none of which runs on the CPU machine"
                result.kernels.append(KernelResult(op.name, op.kind, why=why))
            done()
    return result


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


def _print(ran: _Found, summary: dict[str, int]) -> None:
    sets, bandwidth, calibration = ran.sets, ran.bandwidth, ran.calibration
    if calibration is not None:
        typer.echo(f"calibration: {len(calibration.figures)} figures in {calibration.seconds:.1f} s; --json has them")
        for line in calibration.wrong:
            typer.secho(f"calibration, {line}", fg="red")
    if bandwidth:
        readings = ", ".join(f"{r.gb_s:.0f} ({r.nbytes / 2**20:.0f} MiB)" for r in bandwidth)
        typer.echo(f"read bandwidth of this GPU, GB/s: {readings}")
    typer.echo("")
    _table(sets, times=bool(bandwidth)).print()
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
                say(f"{s.name}/{k.name}: {k.why}", prose=True)
        if not s.in_step:
            say(f"{s.name}: its generated files are not what the spec gives; `kvgen check` shows where", prose=True)
    launches = f"{summary['cases']} launches, {summary['hostile']} of them on hostile data"
    verdict = f"{summary['wrong']} wrong" if summary["wrong"] else "all right"
    typer.echo("")
    typer.secho(
        broken(f"{summary['kernels']} kernel(s), {launches}, {summary['not_run']} kernel(s) not run: {verdict}"),
        fg="red" if summary["wrong"] else "green",
    )


def _table(sets: list[SetResult], *, times: bool) -> Table:
    from kvgen.cli.table import Table, numbers, words

    timed = ("workload", "us", "GB/s", "of read") if times else ()
    titles = ("batches", "largest error", "of its bound", "hostile", "as expected", *timed)
    table = Table((*words("kernel", "arch", "status"), *numbers(*titles)))
    for s in sets:
        for k in s.kernels:
            first = _cells(s, k)
            rows: list[tuple[str, ...]] = [
                (t.workload, f"{t.us:.1f}", f"{t.gb_s:.0f}", f"{t.percent:.0f}%") for t in k.timed
            ]
            for row in rows or [(_NONE,) * 4 if times else ()]:
                table.add(*first, *row)
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
