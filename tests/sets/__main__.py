"""Record the sets of tests/sets: `python -m tests.sets --record` compiles and disassembles every kernel. No GPU is needed."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, Final

from kvgen.cli.resources_json import installed, measured
from kvgen.codegen.emit import kernel_files
from kvgen.compile import Job, code_digest, compile_many, default_cache
from kvgen.cycles.facts import Facts as AttentionFacts
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


def kept(facts: dict[str, int]) -> sets.Facts:
    """The facts that a line has."""
    return {name: facts[name] for name in ALWAYS} | {name: facts[name] for name in ATTENDING if facts.get(name)}


def measure(names: set[str] | None = None) -> dict[str, str]:
    """The lines of the record, by "set/kernel architecture"; of these sets, or of all."""
    found: dict[str, str] = {}
    chosen = [entry for entry in sets.units() if names is None or entry[0].kernels.name in names]
    jobs: list[Job] = [(unit, arch, "cubin") for _, unit, archs in chosen for arch in archs]  # type: ignore[misc]
    images = compile_many(jobs, cache=default_cache())
    texts = {unit.name: unit.text for _, unit, _ in chosen}
    for item in dict.fromkeys(entry[0] for entry in chosen):
        name = item.kernels.name
        plans = {f"{name}/{plan.name}": plan for plan, _ in kernel_files(item)}
        digests = {unit.partition("/")[2]: code_digest(texts[unit]) for unit in plans}
        own = [image for image in images if image.unit_name in plans]
        for kernel, entry in measured(item.kernels, own, digests, plans, texts).items():
            facts: dict[str, Any] = {arch: of for arch, of in entry.items() if isinstance(of, dict)}
            for arch, of in facts.items():
                key = f"{name}/{kernel} {arch}"
                found[key] = sets.line(key, digests[kernel][: sets.DIGITS], kept(of))
    return found


def main() -> None:
    """Write record.txt."""
    parser = argparse.ArgumentParser(prog="python -m tests.sets", description=__doc__)
    parser.add_argument(
        "--record", action="store_true", required=True, help="compile every kernel and write record.txt"
    )
    parser.parse_args()
    lines = measure()
    text = "\n".join((f"{HEADER}, NVRTC {installed()}", *(lines[key] for key in sorted(lines)))) + "\n"
    sets.RECORD.write_text(text, encoding="utf-8")
    print(f"{len(lines)} kernels recorded in {sets.RECORD.relative_to(sets.ROOT)}")


if __name__ == "__main__":
    main()
