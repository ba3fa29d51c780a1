"""append against the oracle: the whole pool, byte for byte."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import KernelSet
from kvgen.layout.dtypes import dtype
from tests.support.batches import Batch, batches
from tests.support.harness import check_append, index_name, offsets_of
from tests.support.scenes import Scene
from tests.support.sets import ALL, RUN, SETS, having


def scene_before(which: str | KernelSet, batch: Batch) -> Scene:
    """A scene in which the step's tokens are not stored yet."""
    kernels = ALL[which] if isinstance(which, str) else which
    before = [n - new for n, new in zip(batch.totals, batch.new, strict=True)]
    scene = Scene(kernels, batch, batch.totals if kernels.cache.lengths == "after" else before)
    scene.fill(before)
    return scene


@pytest.mark.parametrize("name", RUN)
@settings(max_examples=5)
@given(data=st.data())
def test_ragged(name: str, data: Any) -> None:
    batch = data.draw(batches(SETS[name]))
    scene = scene_before(name, batch)
    offsets = offsets_of(batch.new, index_name(SETS[name], "append"), batch.leading)
    check_append(scene, batch.leading + sum(batch.new) + batch.padding, row_offsets=offsets)


# Append by slots stores as append does, whose sets are all of them; it finds a row's place in its own way, which depends on the
# form of table and its pages, on the slots' type, and on how the place's parts lie: one of each. test_slot_mapping has it too.
_SLOTS = (
    "max_paged", "sglang", "csr_multiplied", "ring_f32", "continuous_hnd", "flashmla", "vllm_xpacked", "split_token",
    "transposed_v", "dim_three", "falcon",
)  # fmt: skip
SLOTS = [n for n in having(SETS, "append_slots") if n in _SLOTS or "KVGEN_DRAWN" in os.environ]


@pytest.mark.parametrize("name", SLOTS)
@settings(max_examples=4)
@given(data=st.data())
def test_slots(name: str, data: Any) -> None:
    """Rows go where the slots say, all over the pool; -1 rows nowhere."""
    batch = data.draw(batches(SETS[name]))
    scene = scene_before(name, batch)
    rows = sum(batch.new) + batch.padding
    slots = scene.rng.permutation(scene.pages * scene.tokens)[:rows]
    if index_name(SETS[name], "append_slots")[0] == "i":
        slots = np.where(scene.rng.random(len(slots)) < 0.3, -1, slots)
    rows = len(slots)
    check_append(scene, rows, slots=slots.astype(dtype(index_name(SETS[name], "append_slots")).numpy()))
