"""advance against the oracle: any batch, by offsets and by counts, some of which cannot be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.runtime import Fault, describe
from tests.support.batches import batches
from tests.support.harness import index_name, offsets_of
from tests.support.step_lengths import (
    ADVANCED,
    BATCH,
    SETS,
    check_advance,
    scene_of,
)


@pytest.mark.parametrize("name", ADVANCED)
@settings(max_examples=5)
@given(data=st.data())
def test_advance(name: str, data: Any) -> None:
    """By offsets, by counts and by one, into another array and into the lengths themselves."""
    kernels = SETS[name]
    batch = data.draw(batches(kernels))
    offsets = offsets_of(batch.new, index_name(kernels, "advance"), batch.leading)
    check_advance(scene_of(kernels, batch), "advance", offsets, in_place=data.draw(st.booleans()))
    check_advance(scene_of(kernels, batch), "accept", np.array(batch.new, np.int32), in_place=data.draw(st.booleans()))
    check_advance(scene_of(kernels, batch), "advance", None, in_place=True)


@pytest.mark.parametrize("name", ["lengths_dense", "lengths_continuous"])
def test_bad_counts(name: str) -> None:
    scene = scene_of(SETS[name], BATCH)
    report = describe(check_advance(scene, "accept", np.array([1, -1, 2**31 - 1], np.int32)))
    assert report is not None and (report.code, report.request) == (Fault.LENGTH, 1)
