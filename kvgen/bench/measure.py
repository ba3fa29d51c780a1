"""One operation on the CPU machine in check mode: its counters, buffer by buffer, beside the minimum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgen.cases.contents import Call, Contents
from kvgen.cases.operation import cases_of
from kvgen.cases.scene import GROUPS, LAYER, Group, Scene
from kvgen.cases.separate_passes import Pass
from kvgen.errors import DeviceError
from kvgen.runtime import describe
from kvgen.runtime.cpu import Launched, machine
from kvgen.schema.kernel_set import Op

if TYPE_CHECKING:
    from kvgen.emulator import BufferCounters, Counters
    from kvgen.runtime.kernel import Grid


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
    it, and where the kernel finds a fault in the batch; ToolError for an operation whose fewest bytes nobody knows.
    """
    cases = cases_of(op)
    call = cases.call(scene)
    minimum = cases.minimum(call)
    cache = scene.package.Cache(**scene.pools, **call.tables)
    word = np.zeros(1, np.uint64)
    with machine(arch, "check") as log:
        arguments = cases.planned(call, cache, arguments_of(call) | {"errors": word})
        call.launcher(cache if call.launcher.KERNEL.all_layers else cache[LAYER], **arguments)
    report = describe(word)
    if report is not None:
        raise DeviceError(f"{scene.kernels.name}/{op.name}: the kernel reported {report}, in a batch without faults")
    found = [_measured(call, done, cases.planning(call)) for done in log.launches[:-1]]
    return [*found, _measured(call, log.launches[-1], minimum, cases.replaced(call, minimum))]


def arguments_of(call: Call) -> dict[str, Any]:
    """Arguments of the launcher behind the cache, but for the error word and a workspace."""
    cases = cases_of(call.op)
    memory = {name: Contents(other.scene.pools, dict(other.tables), {}) for name, other in call.others.items()}
    return {**call.arrays, **call.numbers, **{name: cases.cache(call, name, its) for name, its in memory.items()}}


def _measured(call: Call, done: Launched, minimum: Mapping[str, int], separate: tuple[Pass, ...] = ()) -> Measured:
    scene, op, launcher = call.scene, call.op, call.launcher
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
        op.name,
        done.entry,
        done.arch,
        done.grid,
        call.rows,
        done.counters,
        traffic,
        work.name,
        len(work.totals),
        separate,
    )
