"""What the accessor's configurations have between them."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, product

import pytest

from kvgen import ops
from kvgen.codegen.emit import render_set
from kvgen.schema.loader import LoadedSet
from tests.accessor.grid import FACTORS, LEVELS, PADS, WIDTHS, Config, config, fitting, full_grid
from tests.accessor.kernels import kernel_set
from tests.accessor.test_bytes import CONFIGS

pytestmark = pytest.mark.skipif(full_grid(), reason="the campaign has all of them, not a cover")
Pair = frozenset[tuple[str, str]]


def levels(one: Config) -> tuple[str, ...]:
    """The level that each of its values is a member of."""
    return tuple(
        next(level for level, members in LEVELS[name].items() if value in (members or (level,)))
        for name, value in zip(FACTORS, one.choice, strict=True)
    )


def pairs(found: tuple[str, ...]) -> set[Pair]:
    return {frozenset(both) for both in combinations(zip(FACTORS, found, strict=True), 2)}


# Grouped keys: every value that they go with is for the campaign.
COVER = [c for c in CONFIGS if "residual" not in c.choice]


def test_every_pair_of_levels_is_met() -> None:
    """Of layout, quantization, variant, page table and dtype: all that drawn valid ones have, and no fewer than there were."""
    covered = set().union(*(pairs(levels(c)) for c in COVER))
    assert len(covered) >= 337, "pairs covered"
    draw = random.Random(7)
    for _ in range(3000):
        one = config({name: draw.choice(values) for name, values in FACTORS.items()})
        if one is not None and "residual" not in one.choice:
            assert pairs(levels(one)) <= covered, one.name


def test_every_member_is_met_by_every_dtype() -> None:
    """Codes of every type become values of every type; layouts, variants and tables are all there."""
    met = {pair for c in COVER for pair in combinations(c.choice, 2)}
    assert set(product(FACTORS["quant"][:-1], FACTORS["dtype"])) <= met
    assert set().union(*(c.choice for c in CONFIGS)) == set().union(*FACTORS.values())


def test_every_level_lies_in_memory_in_every_way() -> None:
    """Padding of pages, by rows and by less than a row, and none."""
    met = {(level, pad) for c in COVER for level in levels(c) for pad in (c.pad, c.other_pad)}
    assert met == set(product({level for name in LEVELS for level in LEVELS[name]}, PADS))


def test_layouts_of_a_level_have_one_device_text() -> None:
    """The orders of page, layer and K/V are numbers of the call."""
    for quant, variant in product(("none", "token_head", "i4"), ("paged", "latent")):
        one = config(dict(zip(FACTORS, ("max", quant, variant, "dense", "bf16"), strict=True)))
        assert one is not None
        texts = set()
        for name in LEVELS["layout"]["max"]:
            other = config(dict(zip(FACTORS, (name, quant, variant, "dense", "bf16"), strict=True)))
            assert other is not None
            cache = one.cache.model_copy(update={"layout": other.cache.layout})
            files = render_set(LoadedSet(kernel_set(replace(one, cache=cache), ops.Gather()), "tests/accessor", ""))
            text = next(f.text for path, f in files.items() if str(path).endswith("cache.cuh"))
            texts.add("\n".join(line.split("//")[0].rstrip() for line in text.splitlines()))
        assert len(texts) == 1


def test_every_value_meets_every_width() -> None:
    """K's or V's accesses of every width that some configuration with the value could have."""
    masks = [(c, mask) for c in CONFIGS for mask in c.widths[: len(c.cache.storage.roles)]]
    met = {(v, w) for c, mask in masks for v, w in product(c.choice, WIDTHS) if w & mask}
    possible = {(v, w) for c in CONFIGS for v, w in product(c.choice, fitting(c))}
    assert possible == met
    assert {w for _, w in met} == set(WIDTHS)


def test_every_value_is_met_by_k_and_by_v() -> None:
    """By V where a cache with the value has it."""
    for role in (0, 1):
        met = {v for c in CONFIGS if c.widths[role] for v in c.choice}
        assert met == {v for c in CONFIGS if role < len(c.cache.storage.roles) for v in c.choice}
