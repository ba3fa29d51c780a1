"""decode against the oracle in float64: every element within what f32 arithmetic owes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import KernelSet
from tests.support.batches import PLAIN, Batch, batches, capacity
from tests.support.harness import (
    check_decode,
    index_name,
    offsets_of,
    queries,
    raise_edges,
)
from tests.support.memory import Raw
from tests.support.scenes import Scene
from tests.support.sets import ALL, CAMPAIGN, RUN, SETS

# Append and gather tell how their rows lie, and decode reads them as another of these sets': a campaign decodes them.
_ALIKE = ("vllm_interleaved", "vllm_packed", "tensorrt_llm", "flash_attention", "heads_outermost", "drawn_1_1")
DECODES = [n for n, s in RUN.items() if any(o.kind == "decode" for o in s.ops) and (CAMPAIGN or n not in _ALIKE)]


def decode_scene(which: str | KernelSet, batch: Batch, rows: int) -> tuple[Scene, Raw]:
    """A scene with every token stored, dominant where losing one would hardly show, and queries."""
    kernels = ALL[which] if isinstance(which, str) else which
    counts = batch.totals if kernels.cache.lengths == "after" else [n - 1 for n in batch.totals]
    scene = Scene(kernels, batch, counts)
    scene.fill(batch.totals)
    q = queries(scene, rows)
    raise_edges(scene, q, batch.totals)
    return scene, q


@pytest.mark.parametrize("name", DECODES)
@settings(max_examples=4)
@given(data=st.data())
def test_row_per_request(name: str, data: Any) -> None:
    """Row t is request t's; rows past the batch are padding. Unused pages and tails hold NaN or infinity."""
    batch = data.draw(batches(SETS[name], least=0 if SETS[name].cache.lengths == "after" else 1))
    scene, q = decode_scene(name, batch, len(batch.totals) + batch.padding)
    check_decode(scene, q, lse=data.draw(st.booleans()))


@pytest.mark.parametrize("name", DECODES)
@settings(max_examples=2)
@given(data=st.data())
def test_row_offsets(name: str, data: Any) -> None:
    """With offsets, requests without rows are left out and the others close up."""
    batch = data.draw(batches(SETS[name], least=1))
    has_row = [data.draw(st.booleans()) for _ in batch.totals]
    scene, q = decode_scene(name, batch, batch.leading + sum(has_row) + batch.padding)
    offsets = offsets_of(has_row, index_name(SETS[name], "decode"), batch.leading)
    check_decode(scene, q, row_offsets=offsets)


_AGREE = ("max_paged", "falcon", "dim_three", "max_continuous", "splits", *(("splits_csr",) if CAMPAIGN else ()))


@pytest.mark.parametrize("name", _AGREE)
def test_schedules_agree(name: str) -> None:
    """Three orders of the threads, the same bits."""
    results = []
    for schedule in ("ascending", "descending", 12345):
        longest = capacity(SETS[name])
        batch = replace(PLAIN, totals=(longest - 4, 1, longest // 2), new=(1, 1, 1), schedule=schedule)
        scene, q = decode_scene(name, batch, 3)
        out, lse, _ = check_decode(scene, q)
        assert lse is not None
        results.append((out.tobytes(), lse.tobytes()))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("name", ["vllm", "max_f32"])
def test_extreme_scores(name: str) -> None:
    """Scores of hundreds neither overflow nor lose the log-sum-exp; equal scores average."""
    batch = replace(PLAIN, totals=(5, 3), new=(1, 1))
    scene, q = decode_scene(name, batch, 2)
    q[0] = (q[0].astype(np.float32) * 100).astype(q.dtype)
    q[1] = 0
    out, lse, wanted = check_decode(scene, q)
    assert lse is not None and np.abs(wanted.lse[0]).max() > 50
    np.testing.assert_allclose(lse[1], np.log(3.0), rtol=1e-5)
    assert wanted.seen[1] is not None
    mean = np.repeat(wanted.seen[1].v.mean(axis=0), scene.kernels.group, axis=0)
    np.testing.assert_allclose(out[1].astype(np.float64), mean, atol=8e-3)
