"""`kvgen bench`: what operations ask of memory, counted without a GPU, beside the fewest sectors they could."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvgen.cli.bench_report import (
    SEPARATE,
    document,
    kernel,
    lines_table,
    separate_table,
    sizes_table,
    traffic_table,
    work_table,
)
from kvgen.cli.console import Json, Selectors, at_least, print_json, say, tell
from kvgen.cli.progress import Steps, progress

if TYPE_CHECKING:
    from kvgen.bench import Measured
    from kvgen.cases.workload import Workload
    from kvgen.cli.selection import Chosen
    from kvgen.config import Config

BATCH: Final = 4
TOKENS: Final = 256


def bench(
    selectors: Selectors = None,
    batch: Annotated[
        int | None,
        typer.Option(callback=at_least(1), metavar="N", help=f"Requests; {BATCH} if not given.", show_default=False),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            callback=at_least(1),
            metavar="N",
            help=f"Tokens of each request; {TOKENS} if not given.",
            show_default=False,
        ),
    ] = None,
    new: Annotated[
        int | None,
        typer.Option(
            callback=at_least(1),
            metavar="N",
            help="How many of them append stores; all if not given.",
            show_default=False,
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Batches by name instead: prompt, step, demo, tokens1, tokens8, tokens128, tokens4096; sizes is the last four, "
            "and what appends chosen by name have if nothing is given.",
            show_default=False,
        ),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(metavar="ARCH", help="Run the PTX for it; for each spec's last if not given.", show_default=False),
    ] = None,
    lines: Annotated[
        int,
        typer.Option(
            callback=at_least(0),
            metavar="N",
            help="Also the N busiest lines of CUDA of every kernel.",
            show_default=False,
        ),
    ] = 0,
    cycles: Annotated[
        bool, typer.Option("--cycles", help="Instead: trips of attention kernels in cycles, read out of machine code.")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --cycles: the GPU; H200 or A100 if not given.", show_default=False),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With --device: figures measured on it, a report of kvgen verify.", show_default=False
        ),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(
            metavar="ROWS",
            help="With --cycles, of extend: each request's new tokens, as 4000,1x60; --tokens are the least of each in all.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Count what every operation asks of memory, on the CPU machine, beside the fewest sectors it could.

    Counts, not times: exact, repeatable, no GPU needed. A sector is 32 bytes; `minimum` counts the different sectors that
    hold what the operation must read or write, by its meaning and the layout, whatever the kernel does. Sectors are
    counted once a warp's request: caches, which may serve the second request, are not modelled. An append that does more
    than store stands beside the kernels that it replaces. Exits 1 where a kernel touches less than it must.

    \b
    kvgen bench llama3_8b                          4 requests of 256 tokens
    kvgen bench llama3_8b/append                   1, 8, 128 and 4096 new tokens
    kvgen bench '*/append' --batch 1 --tokens 4096
    kvgen bench llama3_8b/decode --workload step --lines 10
    kvgen bench --json > counts.json               for programs; docs/performance.md has the schema
    kvgen bench --cycles '*/decode'                what a trip of the main loop takes; docs/cycles.md
    kvgen bench --cycles llama3_8b --batch 1 --tokens 4096
    kvgen bench --cycles llama3_8b/extend --rows 4000,1x60 --tokens 4000
    """
    if rows and not cycles:
        from kvgen.errors import ToolError

        raise ToolError(f"--rows: got {rows!r} without --cycles; batches of counts have --batch, --tokens and --new")
    if cycles or device or calibration:
        others = (("--new", new), ("--workload", workload), ("--lines", lines))
        beside = [option for option, value in others if value]
        _cycles(selectors, arch, (device, calibration), (batch, tokens, rows), beside, asked=cycles, as_json=as_json)
        return
    from kvgen.cases.operation import cases_of
    from kvgen.cli.project import end, open_sets
    from kvgen.runtime.cpu import require_host_compiler

    config, selection = open_sets(selectors=selectors)
    require_host_compiler()
    chosen = selection.chosen
    works = _workloads(batch, tokens, new, workload, default=_sizes(chosen))
    with progress("counting", len(works) * sum(len(c.ops) for c in chosen)) as done:
        found = [(c.name, m) for c in chosen for w in works for m in _measure(config, c, w, arch, done)]
    left = [f"{c.name}/{op.name}" for c in chosen if c.whole for op in c.loaded.kernels.ops if not cases_of(op).counted]
    if left:
        typer.echo(f"not counted: {', '.join(left)}; kvgen bench has no minimum for their kind", err=True)
    if as_json:
        print_json(document(found, works))
    else:
        _print(found, works, lines)
    short = [f"{kernel(n, m)} {t.name}" for n, m in found for t in m.traffic if t.ratio is not None and t.ratio < 1]
    if short:
        typer.secho(
            f"{', '.join(short)}: fewer sectors than the operation must touch; it leaves out work, or kvgen counts wrongly",
            fg="red",
            err=True,
        )
    end(config, selection.broken)
    if short:
        raise typer.Exit(1)


def _cycles(
    selectors: list[str] | None,
    arch: str | None,
    table: tuple[str | None, Path | None],
    size: tuple[int | None, int | None, str | None],
    beside: list[str],
    *,
    asked: bool,
    as_json: bool,
) -> None:
    from kvgen.cases.workload import Workload
    from kvgen.cli.bench_cycles import bench_cycles
    from kvgen.errors import ToolError

    if not asked:
        option, given = ("--device", table[0]) if table[0] else ("--calibration", str(table[1]))
        raise ToolError(f"{option}: got {given!r} without --cycles; counts of the CPU machine are of no GPU; drop it")
    if beside:
        raise ToolError(f"--cycles: got it beside {beside[0]}; it takes --batch and --tokens; drop {', '.join(beside)}")
    batch, tokens, rows = size
    sized = batch is not None or tokens is not None
    work = Workload.uniform(batch or BATCH, tokens or TOKENS, 1) if sized else None
    if rows:
        if batch is not None:
            raise ToolError(f"--rows: got {rows!r} beside --batch; it has the requests; drop --batch")
        work = Workload.mixed(rows, tokens or 1)
    bench_cycles(selectors, arch, *table, work, as_json=as_json)


def _print(found: list[tuple[str, Measured]], works: Sequence[Workload], lines: int) -> None:
    for work in works:
        new = sum(work.new)
        typer.echo(f"{work.name}: {len(work.totals)} request(s), {sum(work.totals)} tokens, {new} of them new")
    typer.echo("")
    shows = len(works) > 1
    if shows:
        sizes_table(found).print()
        typer.echo("")
    traffic_table(found, shows).print()
    typer.echo("")
    work_table(found, shows).print()
    if any(m.separate for _, m in found):
        typer.echo("")
        tell(SEPARATE)
        separate_table(found).print()
    for name, m in found if lines else ():
        typer.echo(f"\n{kernel(name, m, shows)} ({m.entry}), by executed warp instructions")
        lines_table(m, lines).print()
    say()
    say(_closing(), prose=True)


def _sizes(chosen: Sequence[Chosen]) -> bool:
    """Whether appends alone were asked for, by their names."""
    ops = {op.kind for c in chosen for op in c.loaded.kernels.ops if op.name in c.ops}
    return ops == {"append"} and not any(c.whole for c in chosen)


def _workloads(
    batch: int | None, tokens: int | None, new: int | None, names: str | None, *, default: bool
) -> tuple[Workload, ...]:
    """The batches that the options describe; without any, those of all sizes where that is the default."""
    from kvgen.bench import SIZES, WORKLOADS
    from kvgen.cases.workload import Workload
    from kvgen.cli.demo_steps import PROMPTS
    from kvgen.errors import ToolError

    if names is None and default and batch is tokens is new is None:
        return SIZES
    if names is None:
        return (Workload.uniform(BATCH if batch is None else batch, TOKENS if tokens is None else tokens, new),)
    given = [
        option for option, value in (("--batch", batch), ("--tokens", tokens), ("--new", new)) if value is not None
    ]
    if given:
        raise ToolError(
            f"--workload: got {names!r} beside {given[0]}; a workload has sizes of its own; give one or the other"
        )
    known = {**WORKLOADS, "demo": Workload("demo", PROMPTS, PROMPTS)}
    found: list[Workload] = []
    for name in names.split(","):
        if name != "sizes" and name not in known:
            raise ToolError(f"--workload: got {name!r}; it must be one of {', '.join(known)}, sizes")
        found += SIZES if name == "sizes" else (known[name],)
    return tuple(dict.fromkeys(found))


def _measure(config: Config, chosen: Chosen, work: Workload, arch: str | None, done: Steps) -> list[Measured]:
    """Every operation of a set that was chosen; `done` is called after each."""
    from kvgen.bench import measure
    from kvgen.cases.operation import cases_of
    from kvgen.cases.scene import Scene
    from kvgen.cli.project import generated

    found: list[Measured] = []
    with generated(config.out, chosen.name) as package:
        scene = Scene(chosen.loaded.kernels, package, work)
        for op in chosen.loaded.kernels.ops:
            if op.name in chosen.ops:
                done.at(f"{chosen.name}/{op.name} {work.name}")
                # Nobody knows the fewest sectors of the others, a user's kernels among them: by name only, which says so.
                found += measure(scene, op, arch) if cases_of(op).counted or not chosen.whole else []
                done()
    return found


def _closing() -> str:
    """What a GPU would add, and where to get it."""
    from kvgen.errors import DeviceError
    from kvgen.runtime import cuda

    said = "counts of the CPU machine in check mode; no times. `kvgen verify --gpu` times kernels on a GPU"
    try:
        cuda.driver().current_device()
    except DeviceError:
        return f"{said}; none is here"
    return f"{said}, and one is here"
