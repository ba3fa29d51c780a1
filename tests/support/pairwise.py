"""A few combinations of many factors in which every pair of values meets that can."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import TypeVar

T = TypeVar("T")
Pair = tuple[int, str, int, str]


def cover(factors: Mapping[str, Sequence[str]], make: Callable[[dict[str, str]], T | None]) -> list[T]:
    """What `make` gives for a choice of each factor (None: they do not go together), until every pair has met.

    Greedy and always the same: the first pair that is missing gets a combination, completed by the values that bring the
    most other missing pairs with it. A pair is left out only after all its completions were tried.
    """
    names, missing = list(factors), dict.fromkeys(_pairs(list(factors.values())))
    known: dict[tuple[str, ...], T | None] = {}
    found: list[T] = []

    def made(choice: tuple[str, ...]) -> T | None:
        if choice not in known:
            known[choice] = make(dict(zip(names, choice, strict=True)))
        return known[choice]

    while missing:
        i, a, j, b = pair = next(iter(missing))
        for choice in _completions({i: a, j: b}, list(factors.values()), missing):
            if (one := made(choice)) is not None:
                found.append(one)
                for met in combinations(enumerate(choice), 2):
                    missing.pop((*met[0], *met[1]), None)
                break
        missing.pop(pair, None)
    return found


def every(factors: Mapping[str, Sequence[str]], make: Callable[[dict[str, str]], T | None]) -> list[T]:
    """What `make` gives for all combinations."""
    made = (make(dict(zip(factors, choice, strict=True))) for choice in product(*factors.values()))
    return [one for one in made if one is not None]


def _pairs(values: list[Sequence[str]]) -> Iterator[Pair]:
    """The rarest first: pairs of the factors with the most values ask for the most combinations."""
    for i, j in sorted(combinations(range(len(values)), 2), key=lambda p: -len(values[p[0]]) * len(values[p[1]])):
        for a, b in product(values[i], values[j]):
            yield i, a, j, b


def _completions(
    fixed: dict[int, str], values: list[Sequence[str]], missing: Mapping[Pair, None]
) -> Iterator[tuple[str, ...]]:
    """Every combination with these values, those that look best first."""
    if len(fixed) == len(values):
        yield tuple(fixed[i] for i in range(len(values)))
        return
    free = next(i for i in range(len(values)) if i not in fixed)

    def gain(value: str) -> int:
        met = [(i, a, free, value) if i < free else (free, value, i, a) for i, a in fixed.items()]
        return -sum(pair in missing for pair in met)

    for value in sorted(values[free], key=gain):
        yield from _completions(fixed | {free: value}, values, missing)
