"""extend against the oracle in float64: any number of rows a request, over any prefix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import KernelSet, Mask, Paged, Ring, Score, ops, presets
from tests.support.batches import PLAIN, Batch
from tests.support.extend_steps import Step, step, steps


def _set(name: str, cache: Any, group: int, **fields: Any) -> KernelSet:
    return KernelSet(
        name=f"extend_{name}",
        q_heads=cache.kv_heads * group,
        cache=cache,
        ops=(ops.Append(), ops.Extend(**fields)),
        arch=("sm_80",),
    )


PAGED = _set("paged", Paged(dtype="bf16", kv_heads=2, head_dim=32, page_size=16), 4)
SETS = {
    "paged": PAGED,
}


@pytest.mark.parametrize("name", SETS)
@settings(max_examples=4)
@given(data=st.data())
def test_drawn_steps(name: str, data: Any) -> None:
    data.draw(steps(SETS[name])).check(lse=data.draw(st.booleans()))
