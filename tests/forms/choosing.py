"""`python -m tests.forms.choosing`: more tests for tests/forms/alike.txt, by what each executes and what it costs.

    pytest -n auto -p tests.time_split                              # build/times.json
    pytest -n auto -p tests.template_cover -p tests.forms.record    # build/template_cover.json and build/forms.json

are its records. Tests that launch a template's kernels may go if what stays still has every form that the run executed, every
test function, and each template line in three tests, or in as many as execute it. Tests that executed.txt names stay. A test's
cost is its own seconds, and those of compiling kernels that no other test of the choice has.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import Final

from tests import template_cover, time_split
from tests.forms import alike, cover, record
from tests.forms.form import all_forms, parse

LINES: Final = 3  # tests that a template line keeps
FREE: Final = 0.06  # seconds of a test that stays anyway, if all its kernels do
LEAST: Final = 0.03  # seconds of any test: pytest's own


@dataclass(frozen=True)
class Candidate:
    """A test: what it executes (lines, forms, its function), its kernels, its own seconds."""

    has: frozenset[str]
    kernels: frozenset[str]
    seconds: float


def left_out(tests: Mapping[str, Candidate], stay: Iterable[str], kernel_seconds: Mapping[str, float]) -> set[str]:
    """Tests that need not run, of these: the others, `stay` among them, have all that is wanted."""
    counts = Counter(what for test in tests.values() for what in test.has)
    missing = {what: min(n, LINES if what.startswith("line ") else 1) for what, n in counts.items()}
    kept, compiled = set[str](), set[str]()

    def take(name: str) -> None:
        kept.add(name)
        compiled.update(tests[name].kernels)
        for what in tests[name].has:
            missing[what] -= 1

    def worth(name: str) -> float:
        test = tests[name]
        cost = LEAST + test.seconds + sum(kernel_seconds[k] for k in test.kernels - compiled)
        return -sum(missing[what] > 0 for what in test.has) / cost

    for name in stay:
        take(name)
    heap = [(worth(name), name) for name in tests if name not in kept]
    heapify(heap)
    while heap:
        before, name = heap[0]
        now = worth(name)
        if now > before:  # others have what it has, or its kernels
            heapreplace(heap, (now, name))
        else:
            heappop(heap)
            if now < 0:
                take(name)
    free = {name for name, test in tests.items() if test.seconds < FREE and test.kernels <= compiled}
    return tests.keys() - kept - free


def seconds_of(compiling: Mapping[str, float], kernels: Mapping[str, frozenset[str]]) -> dict[str, float]:
    """Seconds of compiling each kernel, about: the least share of a test that compiled it."""
    found: dict[str, float] = {}
    for test, its in kernels.items():
        for kernel in its:
            share = compiling.get(test, 0.0) / len(its)
            found[kernel] = min(found.get(kernel, share or 1.0), share or 1.0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.forms.choosing", description=(__doc__ or "").splitlines()[0])
    parser.parse_args()
    times: dict[str, tuple[float, float]] = json.loads(time_split.FILE.read_text(encoding="utf-8"))
    lines = template_cover.read()
    launched = record.read()
    if lines is None or not launched:
        raise SystemExit("no record of these sources: run what this module's docstring says")
    having: dict[str, set[str]] = {test: {f"function {alike.function(test)}"} for test in times}
    for line, tests in lines.lines.items():
        for ran in tests:
            if ran.test in having:
                having[ran.test].add(f"line {line}")
    kernels = {test: frozenset(launched.get(test, {})) for test in times}
    for test in times:
        for subjects in launched.get(test, {}).values():
            having[test] |= all_forms(map(parse, subjects))
    candidates = {t: Candidate(frozenset(having[t]), kernels[t], own) for t, (_, own) in times.items()}
    held = {entry.test for entry in cover.table()}
    stay = [test for test in times if test in held or "[" not in test or not kernels[test]]
    gone = left_out(candidates, stay, seconds_of({t: c for t, (c, _) in times.items()}, kernels))
    print(
        f"{len(gone)} of {len(times)} tests, {sum(sum(times[t]) for t in gone):.0f} of {sum(map(sum, times.values())):.0f} s"
    )
    alike.TABLE.write_text("".join(f"{t}\n" for t in sorted(gone | set(alike.table()))), encoding="utf-8")


if __name__ == "__main__":
    main()
