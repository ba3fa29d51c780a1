"""The tables of docs/cycles.md: a GPU's figures, from kvgen/cycles/device.py, and trips beside their budgets, from resources.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from docpages.results import recorded
from kvgen.cycles.device import DEVICES, SOURCES, Device, Parameter
from kvgen.cycles.kernel import reference

ARCH: Final = "sm_90a"
# Of a trip's budget: where DRAM answers as usual, and where it is loaded; and of what Little's law asks to be under way then.
TRIP, LOADED, IN_FLIGHT = 0.85, 0.95, 1.0


def parameters_table() -> str:
    """A row a figure, a column a GPU."""
    names = list(DEVICES)
    lines = [f"| figure | {' | '.join(names)} | unit | what | source |", "|---" * (len(names) + 4) + "|"]
    for name, first in DEVICES[names[0]].parameters():
        values = [dict(DEVICES[n].parameters())[name] for n in names]
        cells = [_range(p) for p in values]
        sources = dict.fromkeys(p.source for p in values)
        what = dict.fromkeys(p.what for p in values)
        lines.append(f"| `{name}` | {' | '.join(cells)} | {first.unit} | {'; '.join(what)} | {'; '.join(sources)} |")
    return "\n".join(lines)


def _range(p: Parameter) -> str:
    return f"{p.value:g}" if p.low == p.high else f"{p.value:g} ({p.low:g} to {p.high:g})"


def sources_list() -> str:
    """What the short names of sources stand for."""
    return "\n".join(f"- {name}: {what}" for name, what in SOURCES.items())


def _trips(device: Device) -> Iterator[tuple[str, dict[str, Any], float]]:
    """Kernels that attend by tiles of copies, and their budgets."""
    for set_name, kernels in recorded().items():
        for name, entry in sorted(kernels.items()):
            facts = entry.get(ARCH, {})
            if "trip_bytes" in facts:
                yield f"{set_name}/{name}", facts, facts["trip_bytes"] / device.budget_rate


def gates_table() -> str:
    """A row a kernel on tensor cores: its trip over its budget, what it has under way, and which gates it does not pass."""
    device = reference(ARCH)
    assert device is not None
    needed = device.budget_rate * device.ldg.high
    lines = [
        f"| kernel, {ARCH} | budget | trip at {device.ldg.value:g}, of it | trip at {device.ldg.high:g}, of it | "
        f"under way, of {needed / 1024:.1f} KB | awaited loads | not passed |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, facts, budget in _trips(device):
        trip, loaded = facts["trip_cycles"] / budget, facts["trip_cycles_loaded"] / budget
        under_way = facts["bytes_in_flight"] / needed
        failed = [
            what
            for what, fails in (
                ("trip", trip > TRIP),
                ("loaded trip", loaded > LOADED),
                ("bytes under way", under_way < IN_FLIGHT),
                ("awaited loads", facts["awaited_loads"] > 0),
            )
            if fails
        ]
        kernel = name.rpartition("/")[2]
        gate = (
            "no gate (MLA)"
            if "mla" in kernel
            else "no gate (extend)"
            if "extend" in kernel
            else ", ".join(failed) or "-"
        )
        lines.append(
            f"| {name} | {budget:.0f} | {trip:.2f} | {loaded:.2f} | {facts['bytes_in_flight'] / 1024:.0f} KB | "
            f"{facts['awaited_loads']} | {gate} |"
        )
    return "\n".join(lines)


BLOCKS: Final[dict[str, Callable[[], str]]] = {
    "parameters": parameters_table,
    "sources": sources_list,
    "gates": gates_table,
}
