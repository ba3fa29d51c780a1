"""append with options drawn together, over caches drawn with them, against the oracle. KVGEN_DRAWN: how many sets."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.ops import Append
from tests.ops.test_fused import call_of, check, places_of
from tests.support.batches import batches
from tests.support.drawn_appends import drawn
from tests.support.scenes import Scene

SETS = int(os.environ.get("KVGEN_DRAWN", "8"))


@pytest.mark.parametrize("seed", range(SETS))
@settings(max_examples=2)
@given(data=st.data())
def test_drawn_sets(seed: int, data: Any) -> None:
    kernels = drawn(seed)
    batch = replace(data.draw(batches(kernels)), errors=True)
    before = [n - new for n, new in zip(batch.totals, batch.new, strict=True)]
    scene = Scene(kernels, batch, batch.totals if kernels.cache.lengths == "after" else before)
    scene.fill(before)
    op = kernels.ops[0]
    assert isinstance(op, Append)
    check(call_of(scene, *places_of(scene, op)))


def test_every_option_is_drawn() -> None:
    """Of 150 sets each new option is in several, beside every other kind of row."""
    found: Counter[str] = Counter()
    for seed in range(150):
        op = drawn(seed).ops[0]
        assert isinstance(op, Append)
        found[f"rows {op.rows}"] += 1
        found[f"inputs {op.inputs}"] += 1
        found["after"] += op.norm_order == "after"
        found["v_norm"] += op.v_norm is not None
        found["scale"] += op.position_scale is not None
        found["interleaved"] += op.sections_order == "interleaved"
        found[f"hadamard {op.hadamard}"] += 1
        found["proportional"] += op.rope is not None and not isinstance(op.rope, str) and op.rope.proportional
    assert min(found.values()) >= 5 and len(found) == 15, found
