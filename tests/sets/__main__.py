"""Record the sets of tests/sets: `python -m tests.sets --record` compiles and examines kernels of other code than record.txt's.

`--every` records all kernels anew; so does another NVRTC. No GPU is needed.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Final

from kvgen.cli.candidates import compared, others
from kvgen.cli.resources_json import installed, measured
from kvgen.codegen.emit import kernel_files
from kvgen.compile import Job, code_digest, compile_many, default_cache
from kvgen.cycles.facts import Facts as AttentionFacts
from kvgen.schema.loader import LoadedSet
from tests import sets

# What a line has of every kernel; and of kernels that attend, where it is not 0.
ALWAYS: Final = ("registers", "spills", "shared", "blocks", "instructions", "machine_code")
ATTENDING: Final = (
    *("trip_cycles", "trip_cycles_loaded", "trip_slots", "trip_bytes"),
    *(field.name for field in dataclasses.fields(AttentionFacts)),
)
HEADER: Final = (
    "# Kernel, architecture, digest of the code, of the machine code, facts. Written by python -m tests.sets --record"
)

Record = dict[str, tuple[str, sets.Facts]]
Candidates = dict[str, sets.Facts]


def kept(facts: dict[str, int]) -> sets.Facts:
    """The facts that a line has."""
    return {name: facts[name] for name in ALWAYS} | {name: facts[name] for name in ATTENDING if facts.get(name)}


def measure(keys: set[str]) -> Record:
    """The kernels of these "set/kernel architecture", compiled and examined."""
    chosen = [(item, unit, [a for a in archs if f"{unit.name} {a}" in keys]) for item, unit, archs in sets.units()]
    jobs: list[Job] = [(unit, arch, "cubin") for _, unit, archs in chosen for arch in archs]  # type: ignore[misc]
    images = compile_many(jobs, cache=default_cache())
    texts = {unit.name: unit.text for _, unit, _ in chosen}
    found: Record = {}
    for item in sets.loaded():
        name = item.kernels.name
        plans = {f"{name}/{plan.name}": plan for plan, _ in kernel_files(item)}
        digests = {unit.partition("/")[2]: code_digest(texts[unit]) for unit in plans}
        own = [image for image in images if image.unit_name in plans]
        for kernel, entry in measured(own, digests, plans, texts).items():
            for arch, facts in entry.items():
                if isinstance(facts, dict):
                    found[f"{name}/{kernel} {arch}"] = digests[kernel][: sets.DIGITS], kept(facts)
    return found


def compare(item: LoadedSet, record: Record) -> Candidates:
    """The cycles of every kernel that fits a call of this set, where several do."""
    name = item.kernels.name
    facts: dict[str, dict[str, sets.Facts]] = {}
    for key, (_, of) in record.items():
        kernel, arch = key.split(" ")
        if kernel.startswith(f"{name}/"):
            facts.setdefault(kernel.partition("/")[2], {})[arch] = of
    found = others(item, sets.files(), sets.OUT)
    calls = compared(item, facts, found) if found else {}
    return {f"{name}/{op} {arch}": cycles for op, by_arch in calls.items() for arch, cycles in by_arch.items()}


def fits_others(item: LoadedSet, candidates: Candidates) -> bool:
    """Other kernels fit the calls of this set than its lines of before name."""
    name = item.kernels.name
    now: dict[str, set[str]] = {}
    for other in others(item, sets.files(), sets.OUT):
        now.setdefault(f"{name}/{other.op.name} {other.arch}", set()).add(other.name)
    return now != {key: set(list(cycles)[1:]) for key, cycles in candidates.items()}


def brought_up(record: Record, candidates: Candidates, *, every: bool) -> tuple[Record, Candidates, int]:
    """The record of all kernels as they are now, and how many of them were compiled; others have their lines of before."""
    now = sets.digests()
    stale = {key for key, digest in now.items() if every or key not in record or record[key][0] != digest}
    whole = {key: record[key] for key in now if key not in stale} | measure(stale)
    moved = {key.partition("/")[0] for key in stale}
    calls: Candidates = {}
    for item in sets.loaded():
        name = item.kernels.name
        own = {key: cycles for key, cycles in candidates.items() if key.startswith(f"{name}/")}
        calls |= compare(item, whole) if name in moved or fits_others(item, own) else own
    return whole, calls, len(stale)


def main() -> None:
    """Write record.txt."""
    parser = argparse.ArgumentParser(prog="python -m tests.sets", description=__doc__)
    parser.add_argument("--record", action="store_true", required=True, help="write record.txt")
    parser.add_argument("--every", action="store_true", help="compile kernels whose code is that of the record, too")
    options = parser.parse_args()
    every = options.every or not sets.RECORD.is_file() or sets.recorded_under() != installed()
    before, calls = ({}, {}) if every else (sets.recorded(), sets.candidates())
    record, candidates, compiled = brought_up(before, calls, every=every)
    lines = [sets.line(key, *record[key]) for key in record]
    lines += [sets.candidates_line(key, candidates[key]) for key in candidates]
    lines.sort(key=lambda text: text.split(" ")[:3])
    sets.RECORD.write_text("\n".join((f"{HEADER}, NVRTC {installed()}", *lines)) + "\n", encoding="utf-8")
    print(f"{sets.RECORD.relative_to(sets.ROOT)}: {len(record)} kernels, {compiled} of them recorded anew")


if __name__ == "__main__":
    main()
