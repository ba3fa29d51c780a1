"""Kernels that attend, as kvgen.cycles examines them: which those are, and what resources.json keeps of it."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgen.bench.tiles import Tile
    from kvgen.compile import Image
    from kvgen.cycles.core import Placement, Replay
    from kvgen.cycles.device import Device
    from kvgen.cycles.kernel import Kernel
    from kvgen.plan.kernel import KernelPlan


def attends(plan: KernelPlan) -> bool:
    """The kernel goes over cached tokens: decode of every kind and extend, without the planners."""
    return plan.division is not None


def kernel_of(image: Image, plan: KernelPlan, source: str) -> Kernel:
    """Disassembled, with its control words. `source` is the CUDA that it was compiled from. Needs nvdisasm."""
    from kvgen.compile import default_cache
    from kvgen.compile.sass import sass
    from kvgen.cycles.kernel import Kernel

    assert image.resources is not None
    own = plan.on(image.arch)
    division = own.division
    assert division is not None
    return Kernel(
        name=image.unit_name,
        arch=image.arch,
        listing=sass(image.data, cache=default_cache(), encodings=True),
        threads=own.threads,
        registers=image.resources.registers,
        shared=image.resources.static_shared + own.shared,
        source=source,
        log=image.log,
        warpgroups=division.warpgroups,
        widens=division.widens,
        prompts="extend" in plan.template,
    )


def trip_bytes(kernel: Kernel, tile: Tile) -> float:
    """Bytes that the trips of all warps of a multiprocessor bring: a tile for each group of warps that share none."""
    groups = max(1, sum(word.opcode == "LDGDEPBAR" for word in kernel.trip))
    return tile.nbytes * groups * kernel.warps * max(1, kernel.blocks) / tile.warps


def recorded(kernel: Kernel, tile: Tile | None) -> dict[str, int]:
    """The facts that resources.json has of a kernel: its own; and where its main loop is one for all warps, and its architecture
    has a reference table, a trip of it, with the warps where they lie worst.

    Cycles with what the table takes for DRAM's latency and with its high end; the issue slots that the trips of a sub-core's
    warps take; what a multiprocessor's trips bring, and what its copies have under way at least, in bytes. The same kernel is
    replayed once: the cache knows it, until a module of kvgen.cycles changes.
    """
    from kvgen.compile import default_cache

    key = hashlib.sha256(f"{_modules()} {kernel} {tile}".encode()).digest()
    known = default_cache().get(key)
    if known is not None:
        return {name: int(n) for name, n in json.loads(known).items()}
    found = _examined(kernel, tile)
    default_cache().put(key, json.dumps(found).encode())
    return found


def replayed(kernel: Kernel, device: Device, placement: Placement = "worst") -> Replay | None:
    """`kernel.replay` with these figures. The cache knows it until a module of kvgen.cycles changes; from which text the same
    machine code was compiled does not matter."""
    from kvgen.compile import default_cache
    from kvgen.cycles.core import Replay, Trip

    roles, mbarriers = kernel.roles
    if not roles:
        return None
    figures = {name: parameter.value for name, parameter in device.parameters()}
    warps = f"{roles} {mbarriers} {kernel.blocks}"
    key = hashlib.sha256(f"replay {_modules()} {warps} {figures} {placement}".encode()).digest()
    known = default_cache().get(key)
    if known is not None:
        fields = json.loads(known)
        return Replay(tuple(Trip(**trip) for trip in fields["trips"]), fields["issue"], fields["slots"])
    run = kernel.replay(device, placement)
    assert run is not None
    default_cache().put(key, json.dumps(asdict(run)).encode())
    return run


@functools.cache
def _modules() -> str:
    """A digest of the modules that examine kernels."""
    from kvgen import cycles

    found = hashlib.sha256()
    for path in sorted(Path(cycles.__path__[0]).glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def _examined(kernel: Kernel, tile: Tile | None) -> dict[str, int]:
    from kvgen.cycles.core import latencies
    from kvgen.cycles.kernel import reference

    found = asdict(kernel.facts)
    device = reference(kernel.arch)
    run = replayed(kernel, device) if device else None
    if device is None or run is None:
        return found
    loaded = replayed(kernel, latencies(device, device.ldg.high))
    assert loaded is not None
    found |= {"trip_cycles": round(run.trip().cycles), "trip_cycles_loaded": round(loaded.trip().cycles)}
    found |= {"trip_slots": round(run.slots), "bytes_in_flight": kernel.in_flight}
    return found | ({"trip_bytes": round(trip_bytes(kernel, tile))} if tile else {})
