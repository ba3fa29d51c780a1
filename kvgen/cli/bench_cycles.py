"""`kvgen bench --cycles`: the trips of attention kernels out of their machine code, beside the bytes that they bring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from kvgen.cli.console import print_json, say
from kvgen.cli.progress import progress

if TYPE_CHECKING:
    from types import ModuleType

    from kvgen.bench.planned_chunks import PlannedTile, PlannedTiles
    from kvgen.bench.tiles import Tile
    from kvgen.cases.workload import Workload
    from kvgen.cli.selection import Chosen
    from kvgen.cli.table import Table
    from kvgen.compile import Job
    from kvgen.config import Config
    from kvgen.cycles.core import Placement
    from kvgen.cycles.device import Device
    from kvgen.cycles.kernel import Kernel
    from kvgen.cycles.launch import BlockTrip, Launch, Work
    from kvgen.cycles.step import StepCycles
    from kvgen.ops import Extend
    from kvgen.plan.kernel import KernelPlan
    from kvgen.schema.kernel_set import KernelSet, Op

SCHEMA: Final = 1
LATENCIES: Final = (800, 1200)  # of loads and copies from DRAM, at which trips are compared with their budgets
IN_FLIGHT_LATENCY: Final = 1200
PROMPT: Final = 8192  # rows of the causal prompt whose share of allowed products is said
_CLOSING: Final = (
    "a trip of the main loop in cycles, by a replay of its machine code: a model, and no time. `budget` is what the trip's bytes "
    "take at the reachable bandwidth; `of reachable` an interval, from the ranges of the device's figures. docs/cycles.md"
)


@dataclass(frozen=True)
class Examined:
    """One kernel on one device. `trips` by latency, where warps lie worst; `reachable` % of the bandwidth that kernels
    reach, from the worst to the best that the device's ranges allow. `products`: cycles that a trip's products take of
    the tensor pipes. `tflops`, of kernels of prompts: at the clock under tensor load in GHz, and at its highest, if
    nothing ran but trips. `causal`: of a causal prompt's products, those that the mask allows. None where the main loop is not
    one for all warps, or no tile's.
    """

    kernel: str
    arch: str
    device: str
    blocks: int
    warps: int
    instructions: int | None
    issue: float | None
    trips: Mapping[int, float]
    budget: float | None
    products: float | None
    tflops: Mapping[float, float] | None
    causal: float | None
    in_flight: int | None
    in_flight_needed: float
    reachable: tuple[float, float] | None
    facts: Mapping[str, int]
    waits: Mapping[str, float]
    launches: Mapping[str, Launch]
    steps: Mapping[str, Mapping[str, StepCycles]] = field(default_factory=dict)
    """Of extend, by what of the batch is in the step: `all`, requests of `several` tiles of rows, of `one`; then by side."""


def examine(
    kernel: Kernel,
    tile: Tile | None,
    device: Device,
    work: Work | Mixed | None = None,
    causal: float | None = None,
) -> Examined:
    """Replay a kernel at both latencies, and at both ends of all figures; and the launch of a batch, if there is one."""
    from kvgen.cli.attention_cycles import replayed, trip_bytes
    from kvgen.cycles.core import latencies
    from kvgen.cycles.launch import launch

    runs = {cycles: replayed(kernel, latencies(device, cycles)) for cycles in LATENCIES}
    first = runs[LATENCIES[0]]
    trips = {cycles: run.trip().cycles for cycles, run in runs.items() if run is not None}
    budget = reachable = tflops = None
    launches, steps = {}, {}
    sides: tuple[tuple[str, Device, Placement], ...] = (
        ("low", device.fast(), "spread"),
        ("value", device, "worst"),
        ("high", device.slow(), "worst"),
    )
    asks = first is not None and (tile is not None or work is not None)
    cycles = {side: _cycles(kernel, at, placement) for side, at, placement in sides} if asks else {}
    if first is not None and kernel.prompts:
        of_all = kernel.floating_operations * device.multiprocessors.value / trips[LATENCIES[0]] / 1e3
        tflops = {clock: of_all * clock for clock in (device.clock_tensor.value, device.clock_tensor.high)}
    if first is not None and tile is not None:
        nbytes = trip_bytes(kernel, tile)
        budget = nbytes / device.budget_rate
        low, _, high = (100 * min(1.0, nbytes / at.budget_rate / cycles[side]) for side, at, _ in sides)
        reachable = high, low
        if work is not None and not isinstance(work, Mixed):
            launches = {side: launch(_block_trip(kernel, tile, cycles[side]), work, at) for side, at, _ in sides}
    if asks and isinstance(work, Mixed):
        steps = {
            name: {side: work.step(part, cycles[side], kernel.blocks, at) for side, at, _ in sides}
            for name, part in work.parts.items()
        }
    return Examined(
        kernel=kernel.name,
        arch=kernel.arch,
        device=device.name,
        blocks=kernel.blocks,
        warps=kernel.warps,
        instructions=None if first is None else first.trip().instructions,
        issue=None if first is None else first.issue,
        trips=trips,
        budget=budget,
        products=None if first is None else kernel.product_cycles(device) or None,
        tflops=tflops,
        causal=causal,
        in_flight=None if first is None else kernel.in_flight,
        in_flight_needed=device.budget_rate * IN_FLIGHT_LATENCY,
        reachable=reachable,
        facts=asdict(kernel.facts),
        waits={} if first is None else first.trip().waits,
        launches=launches,
        steps=steps,
    )


@dataclass(frozen=True)
class Mixed:
    """A batch of extend, its parts and their plans. A trip is a tile of `tokens`, with K and V of `token_bytes` each; one of an
    entry of up to `narrow_cols` columns takes half of it. An entry takes `overhead` trips more, and a column `column_bytes` of q
    and out."""

    parts: Mapping[str, PlannedTiles]
    tokens: int
    token_bytes: float
    narrow_cols: int
    overhead: int
    column_bytes: float

    def step(self, planned: PlannedTiles, trip: float, blocks: int, device: Device) -> StepCycles:
        """Of one part, on `blocks` a multiprocessor. K and V of a request come from memory once for all its tiles of rows."""
        from kvgen.cycles.step import Entry, step

        seen, last = Counter[int](), Counter[int]()
        for e in planned.entries:
            seen[e.b] += e.end - e.begin
            last[e.b] = max(last[e.b], e.end)
        alone = {b for b, n in Counter(e.b for e in planned.entries if e.begin < e.end).items() if n == 1}

        def entry(e: PlannedTile) -> Entry:
            cycles = (-(-e.end // self.tokens) - e.begin // self.tokens + self.overhead) * trip
            tokens = (e.end - e.begin) * (1 if e.b in alone or not seen[e.b] else min(1, last[e.b] / seen[e.b]))
            nbytes = tokens * self.token_bytes + e.cols * self.column_bytes
            return Entry(cycles / 2 if e.cols <= self.narrow_cols else cycles, nbytes)

        entries = {e: entry(e) for e in planned.entries}
        return step(
            [entries[e] for e, _ in planned.works], round(device.multiprocessors.value) * max(1, blocks), device
        )


def _cycles(kernel: Kernel, device: Device, placement: Placement) -> float:
    from kvgen.cli.attention_cycles import replayed

    run = replayed(kernel, device, placement)
    assert run is not None
    return run.trip().cycles


def _block_trip(kernel: Kernel, tile: Tile, cycles: float) -> BlockTrip:
    from kvgen.cli.attention_cycles import trip_bytes
    from kvgen.cycles.launch import BlockTrip

    nbytes = trip_bytes(kernel, tile) / max(1, kernel.blocks)
    return BlockTrip(cycles, round(nbytes / tile.nbytes * tile.tokens), nbytes, kernel.facts.dependent_loads)


def _work(config: Config, item: Chosen, op: Op, workload: Workload, device: Device, arch: str) -> Work | Mixed | None:
    """What the operation's planner makes of a batch on this GPU; None where nothing is planned."""
    from kvgen.bench.planned_chunks import planned_chunks
    from kvgen.cases.scene import Scene
    from kvgen.cli.project import generated
    from kvgen.cycles.launch import Work
    from kvgen.ops import Extend

    with generated(config.out, item.name) as package:
        if isinstance(op, Extend):
            return mixed_batch(item.loaded.kernels, package, op, workload, device, arch)
        found = planned_chunks(
            Scene(item.loaded.kernels, package, workload), op, round(device.multiprocessors.value), arch
        )
    return Work(found.parts, found.columns, found.pieces) if found else None


def mixed_batch(
    kernels: KernelSet, package: ModuleType, op: Extend, workload: Workload, device: Device, arch: str
) -> Mixed:
    """The batch's plan, and where it mixes requests of one tile of rows with others, theirs alone."""
    from kvgen.bench.planned_chunks import planned_tiles
    from kvgen.bench.tiles import token_bytes
    from kvgen.cases.scene import Scene
    from kvgen.cases.workload import Workload
    from kvgen.layout.dtypes import dtype
    from kvgen.lowering.attention.split_kv import OVERHEAD

    cache = kernels.kv
    fit = op.choices(kernels)[arch].fit
    division = fit.division
    requests = list(zip(workload.totals, workload.new, strict=True))
    few = [(n, rows) for n, rows in requests if rows * kernels.group <= division.columns]
    many = [(n, rows) for n, rows in requests if rows * kernels.group > division.columns]
    batches = {"all": requests} | ({"several": many, "one": few} if few and many else {})
    multiprocessors = round(device.multiprocessors.value)
    parts = {
        name: planned_tiles(
            Scene(kernels, package, Workload(name, tuple(n for n, _ in part), tuple(r for _, r in part))),
            op,
            multiprocessors,
            arch,
        )
        for name, part in batches.items()
    }
    out = dtype(op.out_dtype or cache.dtype).bytes
    return Mixed(
        parts,
        tokens=division.tokens,
        token_bytes=token_bytes(kernels),
        narrow_cols=fit.narrow_columns,
        overhead=OVERHEAD,
        column_bytes=dtype(cache.dtype).bytes * cache.head_dim + out * cache.v_dim,
    )


def _causal(kernels: KernelSet, op: Op, plan: KernelPlan) -> float | None:
    """Of the products of a causal prompt, those that the mask allows; None where rows do not see all tokens up to their own."""
    from kvgen.bench.tiles import causal_share
    from kvgen.ops import Extend
    from kvgen.schema.mask import Mask

    plain = isinstance(op, Extend) and op.mask == Mask() and not op.cross
    return causal_share(plan, kernels.group, PROMPT) if plain else None


def figures_of(path: Path) -> dict[str, tuple[float, float, float]]:
    """The calibration in a report of `kvgen verify --gpu`: value, least and most by name."""
    from kvgen.errors import ToolError
    from kvgen.files import named
    from kvgen.json_file import read_object

    entries = read_object(path, limit=1 << 26).get("calibration")
    try:
        found = {f["name"]: (float(f["value"]), float(f["low"]), float(f["high"])) for f in entries or ()}
    except (KeyError, TypeError, ValueError):
        found = {}
    if not found or not all(low <= value <= high for value, low, high in found.values()):
        raise ToolError(
            f"--calibration: got {named(path)}, which has no figures; pass a report of `kvgen verify --gpu --json`"
        )
    return found


def bench_cycles(
    selectors: list[str] | None,
    arch: str | None,
    name: str | None,
    calibration: Path | None,
    batch: Workload | None,
    *,
    as_json: bool,
) -> None:
    """The kernels that attend of the sets that the selectors name, and their launches of a batch."""
    from kvgen.cli.attention_cycles import attends, kernel_of
    from kvgen.cli.project import open_project
    from kvgen.codegen.emit import set_plans
    from kvgen.compile import compile_many, default_cache
    from kvgen.cycles.device import DEVICES
    from kvgen.cycles.kernel import reference
    from kvgen.errors import ToolError

    if name is not None and name not in DEVICES:
        raise ToolError(f"--device: got {name!r}; it must be one of {', '.join(DEVICES)}")
    if calibration is not None and name is None:
        raise ToolError("--calibration: got it without --device; its figures are those of one GPU; name it")
    figures = figures_of(calibration) if calibration else {}
    wanted = arch or (DEVICES[name].arch if name else None)
    project = open_project(selectors=selectors)
    jobs: list[Job] = []
    plans: dict[str, KernelPlan] = {}
    owners: dict[str, tuple[Chosen, Op]] = {}
    for item in project.chosen:
        known: dict[str, tuple[KernelPlan, tuple[str, ...]]] = {}
        for op in item.loaded.kernels.ops:
            own = [p for p in set_plans(item.loaded)[op.name] if attends(p)] if op.name in item.ops else []
            files = [(kernel, archs) for p in own for kernel, archs in p.files(item.loaded.kernels.arch)]
            known |= {f"{item.name}/{kernel.name}": (kernel, archs) for kernel, archs in files}
            owners |= {f"{item.name}/{kernel.name}": (item, op) for kernel, _ in files}
        archs = [a for a in item.loaded.kernels.arch if (a == wanted if wanted else reference(a))]
        target = archs[-1:] if wanted is None else archs
        for unit in project.units[item.name]:
            own_archs = known[unit.name][1] if unit.name in known else ()
            jobs += [(unit, a, "cubin") for a in target if a in own_archs and (DEVICES[name] if name else reference(a))]
        plans |= {unit: kernel for unit, (kernel, _) in known.items()}
    if not jobs:
        tables = ", ".join(sorted({device.arch for device in DEVICES.values()}))
        raise ToolError(
            f"--cycles: none of these operations attends on an architecture with a table of figures ({tables}); select others"
        )
    texts = {unit.name: unit.text for unit, *_ in jobs}
    from kvgen.bench.tiles import tile_of

    found = []
    with progress("compiling", len(jobs)) as done:
        images = compile_many(jobs, cache=default_cache(), progress=lambda _: done(), origin=project.origin)
    with progress("replaying", len(images)) as done:
        for image in images:
            done.at(f"{image.unit_name} {image.arch}")
            device = DEVICES[name] if name else reference(image.arch)
            assert device is not None
            device = device.measured(figures)
            plan = plans[image.unit_name]
            item, op = owners[image.unit_name]
            tile = tile_of(plan)
            work = _work(project.config, item, op, batch, device, image.arch) if batch else None
            causal = _causal(item.loaded.kernels, op, plan)
            found.append(examine(kernel_of(image, plan, texts[image.unit_name]), tile, device, work, causal))
            done()
    if as_json:
        print_json({"schema": SCHEMA, "latencies": LATENCIES, "kernels": [_object(x) for x in found]})
    else:
        _print(found)
        for x in found:
            if x.launches:
                typer.echo(_launch_line(x))
            for line in _step_lines(x):
                typer.echo(line)
    project.end()


def _print(found: Sequence[Examined]) -> None:
    _table(found).print()
    for x in found:
        facts = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in x.facts.items() if n)
        waits = ", ".join(f"{why} {n:.0f}" for why, n in list(x.waits.items())[:4] if n >= 1)
        typer.echo(f"{x.kernel} {x.arch}: {facts or 'no facts'}" + (f"; waits a trip: {waits}" if waits else ""))
        if x.products is not None and x.tflops is not None:
            over = ", ".join(f"{100 * x.products / x.trips[n]:.0f} %" for n in LATENCIES)
            rates = " and ".join(f"{rate:.0f} TFLOP/s at {clock:g} GHz" for clock, rate in x.tflops.items())
            typer.echo(
                f"{x.kernel} {x.arch}: products take {x.products:.0f} cycles of the tensor pipes a trip, {over} of it: {rates}"
            )
            if x.causal is not None:
                typer.echo(
                    f"{x.kernel} {x.arch}: of a causal prompt of {PROMPT} rows the mask allows {100 * x.causal:.1f} % of the "
                    f"products: {100 * x.causal * x.products / x.trips[LATENCIES[0]]:.0f} % of the tensor pipes"
                )
    say()
    say(_CLOSING, prose=True)


def _object(x: Examined) -> dict[str, Any]:
    """For programs: a launch with its sums."""
    sums = {side: asdict(at) | {"total": at.total, "reached": at.reached} for side, at in x.launches.items()}
    steps = {
        name: {side: asdict(at) | {"total": at.total} for side, at in part.items()} for name, part in x.steps.items()
    }
    return asdict(x) | {"launches": sums, "steps": steps}


def _launch_line(x: Examined) -> str:
    low, at, high = (x.launches[side] for side in ("low", "value", "high"))
    stages = f"node {at.node:.1f}, head {at.head:.1f}, trips {at.stream:.1f}, merge {at.merge:.1f}"
    return (
        f"{x.kernel}, one launch: {low.total:.1f} to {high.total:.1f} us, {high.reached:.0f} to {low.reached:.0f} % of reachable "
        f"({stages}; bytes alone {at.bandwidth:.1f})"
    )


def _step_lines(x: Examined) -> list[str]:
    """A step of extend, and each part of a mixed batch alone."""
    lines = []
    titles = {"all": "", "several": " of the requests with several tiles of rows", "one": " of those with one"}
    for name, part in x.steps.items():
        low, at, high = (part[side] for side in ("low", "value", "high"))
        lines.append(
            f"{x.kernel}, a step{titles[name]}: {low.total:.1f} to {high.total:.1f} us ({at.cycles:.0f} cycles: tensor cores and "
            f"ends {at.work:.0f} if evenly divided, memory {at.memory:.0f}; idle {at.idle:.0f} %)"
        )
    if len(x.steps) > 1:
        alone = max(x.steps["several"]["value"].cycles, x.steps["one"]["value"].cycles)
        lines.append(f"{x.kernel}, a step: {x.steps['all']['value'].cycles / alone:.2f} of the longer part alone")
    return lines


def _table(found: Sequence[Examined]) -> Table:
    from kvgen.cli.table import Table, numbers, words

    trips = (f"trip at {n}" for n in LATENCIES)
    titles = ("warps", "instructions", "issue", *trips, "budget", "of it", "in flight, KB", "of reachable, %")
    table = Table((*words("kernel", "device"), *numbers(*titles)))
    for x in found:
        table.add(x.kernel, x.device, *_row(x))
    return table


def _row(x: Examined) -> list[str]:
    warps = f"{x.blocks} x {x.warps}"
    if x.instructions is None or x.issue is None:
        return [warps, *("-" for _ in range(6 + len(LATENCIES)))]
    over = "-" if x.budget is None else ", ".join(f"{x.trips[n] / x.budget:.2f}" for n in LATENCIES)
    least = x.in_flight or 0
    return [
        warps,
        str(x.instructions),
        f"{100 * x.issue:.0f} %",
        *(f"{x.trips[n]:.0f}" for n in LATENCIES),
        "-" if x.budget is None else f"{x.budget:.0f}",
        over,
        f"{least / 1024:.0f} of {x.in_flight_needed / 1024:.0f}",
        "-" if x.reachable is None else f"{x.reachable[0]:.0f} to {x.reachable[1]:.0f}",
    ]
