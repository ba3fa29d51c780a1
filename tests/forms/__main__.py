"""`python -m tests.forms`: which drawn sets run for forms that no test executes, and which test executes each form."""

from __future__ import annotations

import argparse
from collections import Counter

from tests.forms import cover, record
from tests.forms.drawing import drawn
from tests.forms.form import all_forms, parse

# What a set's kernels cost to compile and to run, about, in seconds.
COST = {"extend": 4.0, "mla_decode": 3.0, "decode": 2.0, "indexer_scores": 2.0}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.forms", description=cover.__doc__)
    parser.add_argument("--count", type=int, default=20_000, help="sets that are drawn")
    parser.add_argument("--seed", type=int, default=1, help="of the drawing")
    given = parser.parse_args()
    drawings = dict(cover.drawings(given.seed, given.count))
    rendered = {seed: all_forms(subjects) for seed, subjects in drawings.items()}
    wanted = set[str]().union(*rendered.values())
    tests = {
        test: {parse(line) for lines in kernels.values() for line in lines} for test, kernels in record.read().items()
    }
    own = "::test_a_chosen_set["
    executed = {test: all_forms(subjects) for test, subjects in tests.items() if own not in test}
    missing = wanted.difference(*executed.values())
    show(f"{len(wanted)} forms, {len(missing)} of them executed by no test:", missing)
    costs = {seed: cost_of(seed) for seed in rendered}
    chosen = cover.covering(rendered, missing, costs)
    taken = cover.covering(
        executed, wanted - missing, {test: 1.0 + 9.0 * test.startswith(cover.CAMPAIGN) for test in executed}
    )
    entries = []
    left = wanted - missing
    for test in taken:
        for subject in sorted(tests[test], key=lambda s: -len(s.features)):
            if left & set(subject.forms()):
                left -= set(subject.forms())
                name = test.removeprefix(cover.CAMPAIGN)
                entries.append(cover.Executed(name, test != name, subject))
    left = set(missing)
    for seed in chosen:
        for subject in sorted(drawings[seed], key=lambda s: -len(s.features)):
            if left & set(subject.forms()):
                left -= set(subject.forms())
                entries.append(cover.Executed(cover.test_of(seed), seed not in cover.ALWAYS, subject))
    cover.write(entries, chosen)
    print(f"{len(taken)} tests and {len(chosen)} drawn sets execute them, {sum(costs[seed] for seed in chosen):.0f} s")


def cost_of(seed: str) -> float:
    """Of a drawn set: its kernels', more of wide heads and of several architectures."""
    kernels = drawn(seed)
    kind = kernels.ops[0].kind
    return COST.get(kind, 1.0) * len(kernels.arch) * (2.0 if kernels.kv.head_dim > 256 else 1.0)


def show(title: str, forms: set[str]) -> None:
    """How many of each template and subject."""
    print(title)
    for head, count in sorted(Counter(form.partition(": ")[0] for form in forms).items()):
        print(f"  {count:5} {head}")


if __name__ == "__main__":
    main()
