"""`kvgen bench`: what operations ask of memory, counted without a GPU, beside the fewest sectors they could."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvgen.cli.console import Json, Selectors, console, print_json, progress

if TYPE_CHECKING:
    from rich.table import Table

    from kvgen.bench import Measured, Workload
    from kvgen.cli.selection import Chosen
    from kvgen.config import Config

SCHEMA: Final = 1
BATCH: Final = 4
TOKENS: Final = 256
_NONE: Final = "-"


def bench(
    selectors: Selectors = None,
    batch: Annotated[int | None, typer.Option(min=1, metavar="N", help="Requests.", show_default=str(BATCH))] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens of each request.", show_default=str(TOKENS))
    ] = None,
    new: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="How many of them append stores.", show_default="all"),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A batch with a name instead: prompt, step, demo.", show_default=False),
    ] = None,
    arch: Annotated[
        str | None, typer.Option(metavar="ARCH", help="Run the PTX for it.", show_default="each spec's last")
    ] = None,
    lines: Annotated[
        int, typer.Option(min=0, metavar="N", help="Also the N busiest lines of CUDA of every kernel.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Count what every operation asks of memory, on the CPU machine, beside the fewest sectors it could.

    Counts, not times: exact, repeatable, no GPU needed. A sector is 32 bytes; `minimum` counts the different sectors that
    hold what the operation must read or write, by its meaning and the layout, whatever the kernel does. Sectors are
    counted once a warp's request: caches, which may serve the second request, are not modelled. Exits 1 where a kernel
    touches less than it must.

    \b
    kvgen bench llama3_8b                          4 requests of 256 tokens
    kvgen bench '*/append' --batch 1 --tokens 4096
    kvgen bench llama3_8b/decode --workload step --lines 10
    kvgen bench --json > counts.json               for programs; docs/performance.md has the schema
    """
    from kvgen.cli.project import open_sets
    from kvgen.cli.selection import select

    work = _workload(batch, tokens, new, workload)
    config, sets = open_sets()
    chosen = select(sets, selectors)
    with progress("counting", sum(len(c.ops) for c in chosen)) as (bar, task):
        found = [(c.name, m) for c in chosen for m in _measure(config, c, work, arch, lambda: bar.advance(task))]
    if as_json:
        rows = [_operation(name, m) for name, m in found]
        print_json({"schema": SCHEMA, "workload": asdict(work), "operations": rows})
    else:
        _print(found, work, lines)
    short = [f"{_kernel(n, m)} {t.name}" for n, m in found for t in m.traffic if t.ratio is not None and t.ratio < 1]
    if short:
        typer.secho(
            f"{', '.join(short)}: fewer sectors than the operation must touch; it leaves out work, or kvgen counts wrongly",
            fg="red",
            err=True,
        )
        raise typer.Exit(1)


def _print(found: list[tuple[str, Measured]], work: Workload, lines: int) -> None:
    typer.echo(f"{work.name}: {len(work.totals)} request(s), {sum(work.totals)} tokens, {sum(work.new)} of them new\n")
    screen = console()
    screen.print(_traffic_table(found))
    typer.echo("")
    screen.print(_work_table(found))
    for name, m in found if lines else ():
        typer.echo(f"\n{name}/{m.op} ({m.entry}), by executed warp instructions")
        screen.print(_lines_table(m, lines))
    typer.echo(f"\n{_closing()}")


def _workload(batch: int | None, tokens: int | None, new: int | None, name: str | None) -> Workload:
    """The batch that the options describe."""
    from kvgen.bench import WORKLOADS, Workload
    from kvgen.cli.workload import PROMPTS
    from kvgen.errors import ToolError

    if name is None:
        return Workload.uniform(BATCH if batch is None else batch, TOKENS if tokens is None else tokens, new)
    given = [
        option for option, value in (("--batch", batch), ("--tokens", tokens), ("--new", new)) if value is not None
    ]
    if given:
        raise ToolError(
            f"--workload: got {name!r} beside {given[0]}; a workload has sizes of its own; give one or the other"
        )
    known = {**WORKLOADS, "demo": Workload("demo", PROMPTS, PROMPTS)}
    if name not in known:
        raise ToolError(f"--workload: got {name!r}; it must be one of {', '.join(known)}")
    return known[name]


def _measure(config: Config, chosen: Chosen, work: Workload, arch: str | None, done: Any) -> list[Measured]:
    """Every operation of a set that was chosen; `done` is called after each."""
    from kvgen.bench import Scene, measure
    from kvgen.cli.project import generated

    found: list[Measured] = []
    with generated(config.out, chosen.name) as package:
        scene = Scene(chosen.loaded.kernels, package, work)
        for op in chosen.loaded.kernels.ops:
            if op.name in chosen.ops:
                # Nobody knows the fewest sectors of a kernel of the user's: by its name only, which says so.
                found += measure(scene, op, arch) if op.kind != "custom" or not chosen.whole else []
                done()
    return found


def _closing() -> str:
    """What a GPU would add, and where to get it."""
    from kvgen.errors import DeviceError
    from kvgen.runtime import cuda

    said = "counts of the CPU machine in check mode; no times. benchmarks/run_gpu.py times the same kernels on a GPU"
    try:
        cuda.driver().current_device()
    except DeviceError:
        return f"{said}; none is here"
    return f"{said}, and one is here: see benchmarks/README.md"


# Tables --------------------------------------------------------------------------------------------------------------


def _table(words: tuple[str, ...], numbers: tuple[str, ...]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in words:
        table.add_column(title, no_wrap=True)
    for title in numbers:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _kernel(name: str, m: Measured) -> str:
    """set/op, or set/op_plan: a planner is a kernel of its own."""
    return f"{name}/{m.entry.removeprefix(f'{name}_')}"


def _traffic_table(found: list[tuple[str, Measured]]) -> Table:
    table = _table(("operation", "", "buffer"), ("requests", "bytes", "sectors", "minimum", "ratio"))
    for name, m in found:
        title = _kernel(name, m)
        for t in m.traffic:
            table.add_row(
                title,
                t.group,
                t.name,
                f"{t.counted.requests:,}",
                f"{t.counted.bytes:,}",
                f"{t.counted.sectors:,}",
                _NONE if t.minimum is None else f"{t.minimum:,}",
                _NONE if t.ratio is None else f"{t.ratio:.2f}",
            )
            title = ""
    return table


def _work_table(found: list[tuple[str, Measured]]) -> Table:
    numbers = ("rows", "warp instructions", "a row", "shared requests", "ways", "worst", "bytes in flight")
    table = _table(("operation", "arch"), numbers)
    for name, m in found:
        c = m.counters
        table.add_row(
            _kernel(name, m),
            m.arch,
            f"{m.rows:,}",
            f"{c.warp_instructions:,}",
            f"{c.warp_instructions / m.rows:,.1f}",
            f"{c.shared.requests:,}",
            f"{c.shared.ways:.2f}" if c.shared.requests else _NONE,
            str(c.shared.worst_ways) if c.shared.requests else _NONE,
            f"{c.peak_in_flight:,}",
        )
    return table


def _lines_table(m: Measured, count: int) -> Table:
    numbers = (
        "warp instructions",
        "share",
        "requests",
        "sectors a request",
        "of ideal",
        "shared requests",
        "ways",
        "worst",
    )
    table = _table(("line",), numbers)
    table.add_column("buffers")
    total = m.counters.warp_instructions
    busiest = sorted(m.counters.lines, key=lambda line: -line.warp_instructions)[:count]
    for line in busiest:
        t, s = line.traffic, line.shared
        table.add_row(
            line.source,
            f"{line.warp_instructions:,}",
            f"{line.warp_instructions / total:.1%}",
            f"{t.requests:,}" if t.requests else _NONE,
            f"{t.sectors / t.requests:.2f}" if t.requests else _NONE,
            f"{t.coalescing:.2f}" if t.requests else _NONE,
            f"{s.requests:,}" if s.requests else _NONE,
            f"{s.ways:.2f}" if s.requests else _NONE,
            str(s.worst_ways) if s.requests else _NONE,
            ", ".join(sorted(line.per_buffer)),
        )
    return table


# JSON ----------------------------------------------------------------------------------------------------------------


def _operation(name: str, m: Measured) -> dict[str, Any]:
    c = m.counters
    return {
        "set": name,
        "op": m.op,
        "kernel": m.entry,
        "arch": m.arch,
        "grid": list(m.grid),
        "rows": m.rows,
        "warp_instructions": c.warp_instructions,
        "thread_instructions": c.thread_instructions,
        "classes": dict(c.classes),
        "thread_classes": dict(c.thread_classes),
        "shared": asdict(c.shared),
        "peak_in_flight": c.peak_in_flight,
        "buffers": [
            {"name": t.name, "group": t.group, **asdict(t.counted), "minimum_sectors": t.minimum, "ratio": t.ratio}
            for t in m.traffic
        ],
        "lines": [
            {
                "source": line.source,
                "warp_instructions": line.warp_instructions,
                "thread_instructions": line.thread_instructions,
                "classes": dict(line.classes),
                "thread_classes": dict(line.thread_classes),
                "buffers": {n: asdict(line.per_buffer[n]) for n in sorted(line.per_buffer)},
                "shared": asdict(line.shared),
            }
            for line in c.lines
        ],
    }
