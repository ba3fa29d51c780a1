"""What the accessor's configurations have between them."""

from __future__ import annotations

import random
from itertools import combinations, product

import pytest

from tests.accessor.grid import FACTORS, WIDTHS, Config, config, fitting, full_grid
from tests.accessor.test_bytes import CONFIGS

pytestmark = pytest.mark.skipif(full_grid(), reason="the campaign has all of them, not a cover")
Pair = frozenset[tuple[str, str]]


def pairs(one: Config) -> set[Pair]:
    """Every two values of a configuration."""
    return {frozenset(both) for both in combinations(zip(FACTORS, one.choice, strict=True), 2)}


def test_every_pair_of_values_is_met() -> None:
    """Of layout, quantization, variant, page table and dtype: all that drawn valid ones have, and no fewer than there were."""
    covered = set().union(*(pairs(c) for c in CONFIGS))
    assert len(covered) >= 677, "pairs covered"
    draw = random.Random(7)
    for _ in range(3000):
        one = config({name: draw.choice(values) for name, values in FACTORS.items()})
        if (
            one is not None and "residual" not in one.choice
        ):  # grouped keys: every value, their pairs are for the campaign
            assert pairs(one) <= covered, one.name


def test_every_value_meets_every_width() -> None:
    """K's or V's accesses of every width that some configuration with the value could have."""
    met = {(v, w) for c in CONFIGS for v, w in product(c.choice, c.widths[: len(c.cache.storage.roles)])}
    possible = {(v, w) for c in CONFIGS for v, w in product(c.choice, fitting(c))}
    assert possible == met
    assert {w for _, w in met} == set(WIDTHS)


def test_every_value_is_gathered() -> None:
    gathered = {v for c in CONFIGS if c.gathers for v in c.choice}
    assert gathered == {v for c in CONFIGS for v in c.choice}
