"""Recorded facts of kernels that attend, of specs/ and tests/sets: those that cost time only become fewer, trips do not grow.

`known_facts.txt` names every fact that still holds, `trips.txt` every trip's cycles. KVGEN_UPDATE_GOLDEN=1 takes from the first
what holds no more, and writes the second; what would be a new fact, or more of one, is written there by hand, with a reason in
the commit.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Final

from kvgen.cycles.facts import Facts
from tests import sets

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
FACTS: Final = tuple(field.name for field in dataclasses.fields(Facts))
BOUND: Final = 1.03  # a trip that is so much longer is a regression

Found = dict[str, int]


def recorded() -> dict[str, dict[str, int]]:
    """By "set/kernel arch": what there is of a kernel that attends."""
    found = {}
    for path in sorted((ROOT / "generated").glob("*/resources.json")):
        kernels = json.loads(path.read_text(encoding="utf-8"))["kernels"]
        for name, entry in kernels.items():
            for arch, facts in entry.items():
                if isinstance(facts, dict) and FACTS[0] in facts:
                    found[f"{path.parent.name}/{name} {arch}"] = facts
    for key, (_, facts) in sets.recorded().items():  # its lines leave out what is 0
        found[key] = dict.fromkeys(FACTS, 0) | facts
    return found


def read(name: str) -> Found:
    """Lines of a key and a number."""
    lines = (HERE / name).read_text(encoding="utf-8").splitlines()
    return {key: int(number) for key, _, number in (line.rpartition(" ") for line in lines if line)}


def write(name: str, found: Found) -> None:
    (HERE / name).write_text("".join(f"{key} {number}\n" for key, number in sorted(found.items())), encoding="utf-8")


def test_every_kernel_that_attends_is_examined() -> None:
    found = {key.split()[0] for key in recorded()}
    kernels = {p.parent.name + "/" + p.stem for p in (ROOT / "generated").glob("*/*decode*.cu") if "plan" not in p.stem}
    assert found and kernels <= found


def test_facts_only_become_fewer() -> None:
    now = {f"{key} {fact}": facts[fact] for key, facts in recorded().items() for fact in FACTS if facts[fact]}
    known = read("known_facts.txt")
    more = {key: n for key, n in now.items() if n > known.get(key, 0)}
    assert not more, f"more than known_facts.txt says: {more}"
    if os.environ.get("KVGEN_UPDATE_GOLDEN"):
        write("known_facts.txt", now)
    assert read("known_facts.txt") == now, "less than known_facts.txt says; KVGEN_UPDATE_GOLDEN=1 writes it"


def test_trips_do_not_grow() -> None:
    parts = ("trip_cycles", "trip_slots")
    now = {f"{key} {part}": facts[part] for key, facts in recorded().items() for part in parts if part in facts}
    assert now
    if os.environ.get("KVGEN_UPDATE_GOLDEN"):
        write("trips.txt", now)
    known = read("trips.txt")
    assert known.keys() == now.keys(), "other kernels; KVGEN_UPDATE_GOLDEN=1 writes trips.txt"
    longer = {key: (known[key], n) for key, n in now.items() if n > BOUND * known[key]}
    assert not longer, f"longer than trips.txt allows: {longer}"
    shorter = {key: (known[key], n) for key, n in now.items() if known[key] > BOUND * n}
    assert not shorter, f"shorter, so KVGEN_UPDATE_GOLDEN=1 writes trips.txt: {shorter}"


def test_more_is_seen() -> None:
    """The two files are not empty, and a fact of theirs holds."""
    known = read("known_facts.txt")
    assert any(key.endswith(" awaited_loads") for key in known) or not known
    assert all(n > 0 for n in known.values()) and all(n > 0 for n in read("trips.txt").values())
