"""`python -m tests.forms`: which drawn sets run for forms that no test executes, and which test executes each form."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from kvgen import KernelSet
from tests.forms import cover, record
from tests.forms.cover import Executed
from tests.forms.drawing import EXECUTED
from tests.forms.form import Subject, all_forms, parse

# Seconds that a set's kernels cost to compile and to run, about.
COST: Final = {"extend": 4.0, "mla_decode": 3.0, "decode": 2.0, "indexer_scores": 2.0}
KEPT: Final = 0.2  # a seed that is chosen already costs this share: it has run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.forms", description=cover.__doc__)
    parser.add_argument("--count", type=int, default=20_000, help="sets that are drawn")
    parser.add_argument("--seed", type=int, default=1, help="of the drawing")
    given = parser.parse_args()
    subjects, costs, before = dict[str, set[Subject]](), dict[str, float](), cover.seeds()
    for seed, kernels in cover.drawings(given.seed, given.count):
        subjects[seed] = cover.rendered(kernels)
        costs[seed] = cost_of(kernels) * (KEPT if seed in before else 1.0)
    choose(subjects, costs)


def choose(subjects: Mapping[str, set[Subject]], costs: Mapping[str, float]) -> None:
    """Write both files for drawn sets that render these subjects."""
    rendered = {seed: all_forms(found) for seed, found in subjects.items()}
    wanted = set[str]().union(*rendered.values())
    own = cover.test_of("").removesuffix("]")
    tests = {
        test: {parse(line) for lines in kernels.values() for line in lines}
        for test, kernels in record.read().items()
        if own not in test
    }
    executed = {test: all_forms(found) for test, found in tests.items()}
    missing = wanted.difference(*executed.values())
    show(f"{len(wanted)} forms, {len(missing)} of them executed by no test:", missing)
    always = sorted(cover.ALWAYS)
    chosen = always + cover.covering(rendered, missing.difference(*(rendered[seed] for seed in always)), costs)
    dear = {test: 1.0 + 9.0 * test.startswith(cover.CAMPAIGN) for test in executed}
    taken = cover.covering(executed, wanted - missing, dear)
    entries = list(lines(taken, tests, wanted - missing))
    entries += lines([name_of(seed) for seed in chosen], {name_of(s): subjects[s] for s in chosen}, missing)
    cover.write(entries, chosen)
    print(f"{len(taken)} tests and {len(chosen)} drawn sets execute them")


def lines(tests: list[str], having: Mapping[str, set[Subject]], wanted: set[str]) -> Iterator[Executed]:
    """Few subjects of each test that have all of the wanted forms, each form once."""
    left = set(wanted)
    for test in tests:
        for subject in sorted(having[test], key=lambda s: (-len(s.features), s.line)):
            if found := left & set(subject.forms()):
                left -= found
                name = test.removeprefix(cover.CAMPAIGN)
                yield Executed(name, test != name, subject)


def name_of(seed: str) -> str:
    """The test of a chosen seed, and whether a campaign alone has it."""
    return cover.CAMPAIGN * (seed not in cover.ALWAYS) + cover.test_of(seed)


def cost_of(kernels: KernelSet) -> float:
    """Of a drawn set: its kernels', more of wide rows and of several architectures."""
    archs = sum(arch in EXECUTED for arch in kernels.arch)
    return COST.get(kernels.ops[0].kind, 1.0) * archs * (1.0 + kernels.q_heads * kernels.kv.head_dim / 4096)


def show(title: str, forms: set[str]) -> None:
    """How many of each template and subject."""
    print(title)
    for head, count in sorted(Counter(form.partition(": ")[0] for form in forms).items()):
        print(f"  {count:5} {head}")


if __name__ == "__main__":
    main()
