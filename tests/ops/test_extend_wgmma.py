"""extend by warpgroups (sm_90a) against the oracle in float64, on the CPU machine in check mode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvgen import KernelSet, Mask, Paged, ops
from tests.support.batches import PLAIN
from tests.support.extend_steps import step


def _set(name: str, cache: Any, group: int, **fields: Any) -> KernelSet:
    return KernelSet(
        name=f"extend_{name}",
        q_heads=cache.kv_heads * group,
        cache=cache,
        ops=(ops.Append(), ops.Extend(**fields)),
        arch=("sm_90a",),
    )


PAGED = _set("wg_paged", Paged(dtype="bf16", kv_heads=1, head_dim=64, page_size=16), 4)


@pytest.mark.parametrize("rows", [1, 33, 100])
def test_prompts(rows: int) -> None:
    batch = replace(PLAIN, totals=(rows,))
    step(PAGED, batch, (rows,)).check()
