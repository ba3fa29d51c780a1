"""One operation on the CPU machine in check mode: its counters, buffer by buffer, beside the minimum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgen.bench.calls import call_of
from kvgen.bench.minimum import minimum_sectors, planning_sectors
from kvgen.bench.synthetic_batch import GROUPS, LAYER, Group, Scene
from kvgen.bench.unfused import Pass, separate_passes
from kvgen.errors import DeviceError
from kvgen.runtime import describe
from kvgen.runtime.cpu import Launched, machine
from kvgen.schema.kernel_set import Op

if TYPE_CHECKING:
    from kvgen.emulator import BufferCounters, Counters
    from kvgen.runtime.kernel import Grid
    from kvgen.runtime.layer_cache import LayerCache


@dataclass(frozen=True)
class Traffic:
    """One buffer of a launch: what was counted, and the fewest sectors (None where nothing need be touched)."""

    name: str
    group: Group
    counted: BufferCounters
    minimum: int | None

    @property
    def ratio(self) -> float | None:
        """Counted sectors / the fewest."""
        return None if self.minimum is None else self.counted.sectors / self.minimum


@dataclass(frozen=True)
class Measured:
    """One kernel of an operation: `rows` of new tokens (append), gathered ones, queries, ids or pairs of pages, and what its
    launch did with a workload. `separate` are the kernels that a fused append replaces."""

    op: str
    entry: str
    arch: str
    grid: Grid
    rows: int
    counters: Counters
    traffic: tuple[Traffic, ...]
    workload: str
    requests: int
    separate: tuple[Pass, ...] = ()

    def total(self, *groups: Group) -> tuple[int, int]:
        """(sectors, minimum) of these groups."""
        mine = [t for t in self.traffic if t.group in groups]
        return sum(t.counted.sectors for t in mine), sum(t.minimum or 0 for t in mine)


def measure(scene: Scene, op: Op, arch: str | None) -> list[Measured]:
    """Run an operation once; one Measured a kernel, of a planner first.

    `arch` is the architecture whose PTX runs, None the set's last one. Raises DeviceError where the machine cannot run
    it, and where the kernel finds a fault in the batch.
    """
    call = call_of(scene, op)
    cache = scene.package.Cache(**scene.pools, **scene.tables(call.counted_as, call.rows_each))
    word = np.zeros(1, np.uint64)
    arguments = call.arguments() | {"errors": word}
    given = cache if call.launcher.KERNEL.all_layers else cache[LAYER]
    with machine(arch, "check") as log:
        if hasattr(call.launcher, "workspace"):
            arguments = planned(call.launcher, cache[LAYER], call.rows, arguments)
        call.launcher(given, **arguments)
    report = describe(word)
    if report is not None:
        raise DeviceError(f"{scene.kernels.name}/{op.name}: the kernel reported {report}, in a batch without faults")
    minimum = minimum_sectors(scene, call)
    found = [_measured(scene, op, call.rows, done, planning_sectors(scene, call)) for done in log.launches[:-1]]
    separate = separate_passes(scene, call, minimum)
    return [*found, _measured(scene, op, call.rows, log.launches[-1], minimum, separate)]


def planned(launcher: Any, layer: LayerCache, rows: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What an operation takes once its step is planned: a workspace, instead of what its planner alone takes."""
    longest = layer.dims["max_cache_length"] if launcher.SPLIT_PLAN.chunk_tokens else None
    workspace = launcher.workspace(max_rows=rows, device=layer.device, max_tokens=longest)
    taken = {p.name for p in launcher.PLAN.arguments} & arguments.keys()
    launcher.plan(layer, workspace, rows=rows, **{name: arguments[name] for name in taken})
    gone = taken - {p.name for p in launcher.KERNEL.arguments}
    return {n: a for n, a in arguments.items() if n not in gone} | {"workspace": workspace}


def _measured(
    scene: Scene, op: Op, rows: int, done: Launched, minimum: Mapping[str, int], separate: tuple[Pass, ...] = ()
) -> Measured:
    launcher = getattr(scene.package, op.name)
    found = [
        Traffic(name, scene.group(name, launcher), counted, minimum.get(name))
        for name, counted in done.counters.per_buffer.items()
        if counted.requests or name in minimum
    ]
    # Launches list their buffers by address, which is another one every time.
    found.sort(key=lambda t: (GROUPS.index(t.group), t.name))
    work = scene.workload
    traffic = tuple(found)
    return Measured(
        op.name, done.entry, done.arch, done.grid, rows, done.counters, traffic, work.name, len(work.totals), separate
    )
