"""Kernels that fit a call and were not chosen, beside the chosen one: cycles a token and query column, by recorded trips.

`kvgen compile --record` writes a line a call and architecture into resources.json where several candidates fit. A chosen kernel
that takes more cycles than another one is a choice to look at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgen.codegen.emit import File
    from kvgen.compile import Unit
    from kvgen.ops import Decode, Extend, MlaDecode
    from kvgen.plan.kernel import KernelPlan
    from kvgen.schema.kernel_set import KernelSet, Op
    from kvgen.schema.loader import LoadedSet


@dataclass(frozen=True)
class Other:
    """A kernel that fits the operation `op` on an architecture, and that the set has not."""

    op: Decode | Extend | MlaDecode
    arch: str
    name: str
    plan: KernelPlan
    unit: Unit


def others(loaded: LoadedSet, files: Mapping[str, File], prefix: str) -> list[Other]:
    """All of a set's, of architectures with a reference table. `files` are the set's and the device library's.

    Kernels on CUDA cores are left out: they take 8 to 9 times the cycles of those on tensor cores, and most of a record's time.
    """
    from kvgen.codegen.emit import unit_of
    from kvgen.cycles.kernel import reference
    from kvgen.ops import Decode, Extend, MlaDecode

    found = []
    for op in (op for op in loaded.kernels.ops if isinstance(op, Decode | Extend | MlaDecode)):
        for arch in (arch for arch in loaded.kernels.arch if reference(arch)):
            _, *more = op.candidates(loaded.kernels, arch).items()
            for name, plan in more:
                if plan.division is None or plan.division.lanes:
                    continue
                unit = unit_of(loaded, files, prefix, plan, f"{op.name}.{name}")
                found.append(Other(op, arch, name, plan, unit))
    return found


def column_cycles(facts: Mapping[str, int], plan: KernelPlan, columns: int) -> int | None:
    """Thousandths of a cycle of a multiprocessor for a token and one of `columns` query columns of a kv head (0: blocks are
    full); None without a recorded trip. Rows that several blocks read count as often."""
    division = plan.division
    if division is None or not facts.get("trip_cycles") or not facts.get("trip_bytes"):
        return None
    tokens = facts["trip_bytes"] * division.trip_tokens / division.trip_bytes
    each = columns * division.heads / division.tiles if columns else division.columns
    return round(1000 * facts["trip_cycles"] / (tokens * each))


def columns_of(kernels: KernelSet, op: Op) -> int:
    """Query columns of a request and kv head; 0 where requests have any number of rows."""
    from kvgen.ops import Decode, MlaDecode

    if isinstance(op, MlaDecode):
        return op.rows * kernels.q_heads
    return op.rows * kernels.group if isinstance(op, Decode) else 0


def compared(
    loaded: LoadedSet, recorded: Mapping[str, Mapping[str, Mapping[str, int]]], found: list[Other]
) -> dict[str, dict[str, dict[str, int]]]:
    """By operation and architecture the cycles of the chosen kernel, first, and of the others, by their names: of calls that
    have others. `recorded` has the facts of the set's kernels by file and architecture."""
    from kvgen.bench.tiles import tile_of
    from kvgen.cli.attention_cycles import kernel_of
    from kvgen.cli.attention_cycles import recorded as examined
    from kvgen.compile import compile_many, default_cache

    images = compile_many([(other.unit, other.arch, "cubin") for other in found], cache=default_cache())
    calls: dict[str, dict[str, dict[str, int]]] = {}
    for other, image in zip(found, images, strict=True):
        kernels, op = loaded.kernels, other.op
        columns = columns_of(kernels, op)
        by_arch = calls.setdefault(op.name, {})
        if other.arch not in by_arch:
            (chosen, *_) = op.candidates(kernels, other.arch)
            own = op.plan(kernels)[0].on(other.arch)
            cycles = column_cycles(recorded[own.name][other.arch], own, columns)
            by_arch[other.arch] = {} if cycles is None else {chosen: cycles}
        facts = examined(kernel_of(image, other.plan, other.unit.text), tile_of(other.plan))
        cycles = column_cycles(facts, other.plan, columns)
        if cycles is not None:
            by_arch[other.arch][other.name] = cycles
    return calls
