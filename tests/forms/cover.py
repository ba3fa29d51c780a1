"""Which test executes which forms: tests/forms/executed.txt, which tests hold to what they launch, and tests/forms/chosen.txt.

A line of executed.txt is a test and a subject that it launches. Every form that drawn specs can have is in one of them.
chosen.txt has the seeds of drawn sets that run for the forms that no other test executes. `python -m tests.forms` writes both
by the record of `pytest -p tests.forms.record`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from pathlib import Path
from typing import Final

from kvgen import KernelSet
from kvgen.codegen.emit import kernel_files
from kvgen.lowering.cache_header import cache_context
from kvgen.lowering.lowered import lower
from kvgen.schema.loader import LoadedSet
from tests.forms.drawing import EXECUTED, drawn
from tests.forms.form import Subject, all_forms, parse, subjects

FOLDER: Final = Path(__file__).parent
TABLE: Final = FOLDER / "executed.txt"
SEEDS: Final = FOLDER / "chosen.txt"
CAMPAIGN: Final = "campaign "  # before tests that a campaign alone has
# Seeds that every run has: of sets of one architecture, since a run builds a set for one.
# 5928: lists of pages beside a bias, whose axes are of two lengths.
# 11966: strided codes of two bytes a row, which an access of 8 elements would read past.
# 16072: latent rows whose dims have scales of their own.
ALWAYS: Final = frozenset({"1 5928", "1 11966", "1 16072"})


def test_of(seed: str) -> str:
    """The test of a chosen seed."""
    return f"tests/forms/test_forms.py::test_a_chosen_set[{seed}]"


def rendered(kernels: KernelSet) -> set[Subject]:
    """The subjects of a set's kernels on the architectures that the CPU machine executes."""
    cache = cache_context(lower(kernels.kv), "")
    others = {
        op.other_space(name): cache_context(lower(other), "")
        for op in kernels.ops
        for name, other in op.other_caches().items()
    }
    return {
        subject
        for plan, archs in kernel_files(LoadedSet(kernels, "tests/forms", ""))
        for arch in archs
        if arch in EXECUTED
        for subject in subjects(plan.template, plan.context, cache, others, arch)
    }


def drawings(seed: int, count: int) -> Iterator[tuple[str, KernelSet]]:
    """Drawn sets by their seeds."""
    for i in range(count):
        name = f"{seed} {i}"
        yield name, drawn(name)


@dataclass(frozen=True)
class Executed:
    """A test, whether a campaign alone has it, and a subject that it launches."""

    test: str
    campaign: bool
    subject: Subject

    @property
    def line(self) -> str:
        """As text."""
        return f"{CAMPAIGN * self.campaign}{self.test}\t{self.subject.line}"


def table() -> list[Executed]:
    """executed.txt."""
    found = []
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        test, _, subject = line.partition("\t")
        found.append(Executed(test.removeprefix(CAMPAIGN), test.startswith(CAMPAIGN), parse(subject)))
    return found


def seeds() -> list[str]:
    """chosen.txt."""
    return SEEDS.read_text(encoding="utf-8").splitlines()


def executed() -> set[str]:
    """Every form that a test executes."""
    return all_forms(entry.subject for entry in table())


def covering(having: Mapping[str, set[str]], wanted: set[str], cost: Mapping[str, float]) -> list[str]:
    """Few names whose forms are all of the wanted ones, by what they add for their cost."""
    left, chosen = set(wanted), list[str]()
    heap = [(-len(forms & left) / cost[name], name) for name, forms in having.items()]
    heapify(heap)
    while left and heap:
        worth, name = heap[0]
        now = -len(having[name] & left) / cost[name]
        if now > worth:  # it was worth more before others were taken
            heapreplace(heap, (now, name))
        elif now == 0:
            break
        else:
            heappop(heap)
            chosen.append(name)
            left -= having[name]
    return chosen


def write(entries: Iterable[Executed], chosen: Iterable[str]) -> None:
    """Both files."""
    TABLE.write_text("".join(f"{e.line}\n" for e in sorted(entries, key=lambda e: e.line)), encoding="utf-8")
    SEEDS.write_text("".join(f"{seed}\n" for seed in sorted(chosen)), encoding="utf-8")
