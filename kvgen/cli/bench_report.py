"""Output of `kvgen bench`: tables for people, one object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from kvgen.cli.table import Column, Table, numbers, words

if TYPE_CHECKING:
    from kvgen.bench import Measured
    from kvgen.cases.scene import Group
    from kvgen.cases.workload import Workload

SCHEMA: Final = 1
SEPARATE: Final = (
    "beside separate kernels, of which each reads and writes its operands once (what they must move at least; none of them "
    "runs here)"
)
_NONE: Final = "-"
_ROWS: Final[tuple[Group, ...]] = ("kv", "scales", "input", "output")
_BESIDE: Final[tuple[Group, ...]] = ("tables", "weights")


def _table(names: tuple[str, ...], figures: tuple[str, ...], *more: Column) -> Table:
    return Table((*words(*names), *numbers(*figures), *more))


def _prose(title: str) -> Column:
    return Column(title, prose=True)


def kernel(name: str, m: Measured, workload: bool = False) -> str:
    """set/op, or set/op_plan: a planner is a kernel of its own; `workload` says with which."""
    return f"{name}/{m.entry.removeprefix(f'{name}_')}" + (f" {m.workload}" if workload else "")


def sizes_table(found: Sequence[tuple[str, Measured]]) -> Table:
    """Bytes that every launch moves: the rows it takes and stores, the tables that tell where they go, and its other operands."""
    figures = ("rows", "requests", "blocks", "bytes", "sectors", "minimum", "ratio", "tables, weights", "minimum")
    table = _table(("operation",), figures)
    for name, m in found:
        sectors, minimum = m.total(*_ROWS)
        beside, least = m.total(*_BESIDE)
        x, y, z = m.grid
        table.add(
            kernel(name, m, True),
            f"{m.rows:,}",
            f"{m.requests:,}",
            f"{x * y * z:,}",
            f"{sum(t.counted.bytes for t in m.traffic if t.group in _ROWS):,}",
            f"{sectors:,}",
            f"{minimum:,}",
            f"{sectors / minimum:.2f}" if minimum else _NONE,
            f"{beside:,}",
            f"{least:,}",
        )
    return table


def separate_table(found: Sequence[tuple[str, Measured]]) -> Table:
    """A fused append's sectors and those of the kernels in its place."""
    table = _table(("operation",), ("rows", "fused", "kernels", "their sectors", "times"), _prose("of which"))
    for name, m in found:
        if not m.separate:
            continue
        fused, separate = m.total(*_ROWS, *_BESIDE)[0], sum(p.sectors for p in m.separate)
        table.add(
            kernel(name, m, True),
            f"{m.rows:,}",
            f"{fused:,}",
            str(len(m.separate)),
            f"{separate:,}",
            f"{separate / fused:.2f}",
            ", ".join(f"{p.title} {p.sectors:,}" for p in m.separate),
        )
    return table


def traffic_table(found: Sequence[tuple[str, Measured]], workload: bool) -> Table:
    """Every buffer of every launch, those with the most bytes first."""
    table = _table(("operation", "", "buffer"), ("requests", "bytes", "sectors", "minimum", "ratio"))
    for name, m in found:
        title = kernel(name, m, workload)
        for t in sorted(m.traffic, key=lambda t: -t.counted.bytes):
            table.add(
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


def work_table(found: Sequence[tuple[str, Measured]], workload: bool) -> Table:
    """Work of the blocks of every launch."""
    figures = ("rows", "warp instructions", "a row", "shared requests", "ways", "worst", "bytes in flight")
    table = _table(("operation", "arch"), figures)
    for name, m in found:
        c = m.counters
        table.add(
            kernel(name, m, workload),
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


def lines_table(m: Measured, count: int) -> Table:
    """The busiest lines of CUDA."""
    figures = (
        "warp instructions",
        "share",
        "requests",
        "sectors a request",
        "of ideal",
        "shared requests",
        "ways",
        "worst",
    )
    table = _table(("line",), figures, _prose("buffers"))
    total = m.counters.warp_instructions
    busiest = sorted(m.counters.lines, key=lambda line: -line.warp_instructions)[:count]
    for line in busiest:
        t, s = line.traffic, line.shared
        table.add(
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


def document(found: Sequence[tuple[str, Measured]], works: Sequence[Workload]) -> dict[str, Any]:
    """Everything; `workload` is null where there are several, which `workloads` lists."""
    return {
        "schema": SCHEMA,
        "workload": asdict(works[0]) if len(works) == 1 else None,
        "workloads": [asdict(w) for w in works],
        "operations": [_operation(name, m) for name, m in found],
    }


def _operation(name: str, m: Measured) -> dict[str, Any]:
    c = m.counters
    return {
        "set": name,
        "op": m.op,
        "workload": m.workload,
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
        "separate": [asdict(p) for p in m.separate],
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
