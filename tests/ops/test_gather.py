"""gather against the oracle: every byte, and MAX's own example."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.layout.dtypes import dtype
from kvgen.runtime.cpu import machine
from tests.support.batches import PLAIN, batches
from tests.support.harness import check_gather, index_name, offsets_of, package
from tests.support.raw_rows import STORED, check_gather_raw
from tests.support.scenes import Scene
from tests.support.sets import SETS, having


@pytest.mark.parametrize("name", SETS)
@settings(max_examples=4)
@given(data=st.data())
def test_gather(name: str, data: Any) -> None:
    """Any piece of any request; the cache may hold NaN and infinity of its own, which are copied like the rest."""
    kernels, batch = SETS[name], data.draw(batches(SETS[name]))
    scene = Scene(kernels, batch, batch.totals)
    scene.fill(batch.totals)
    first = [scene.view.first_token(n) for n in batch.totals]
    starts = [int(scene.rng.integers(f, n + 1)) for f, n in zip(first, batch.totals, strict=True)]
    whole = data.draw(st.booleans()) and not any(first)
    if whole:
        starts = [0] * len(starts)
    counts = [n - s for s, n in zip(starts, batch.totals, strict=True)]
    index = index_name(kernels, "gather")
    check_gather(
        scene,
        batch.leading + sum(counts) + batch.padding,
        row_offsets=offsets_of(counts, index, batch.leading),
        starts=None if whole else np.array(starts, dtype(index).numpy()),
    )


def test_max_example() -> None:
    """MAX's own: a pool [4, 2, 3, 2, 2, 4] of its flat index; K of layer 1, block 1, token 0, head 1, dim 2 is 118."""
    pool = np.arange(4 * 2 * 3 * 2 * 2 * 4, dtype=np.float32).reshape(4, 2, 3, 2, 2, 4)
    generated = package("max_f32")
    cache = generated.Cache(pool, lengths=np.array([2], np.int32), page_table=np.array([[1]], np.int32))
    k, v = (np.zeros((2, 2, 4), np.float32) for _ in range(2))
    with machine(mode="check"):
        generated.gather(cache[1], k_out=k, v_out=v, row_offsets=np.array([0, 2], np.int32))
    assert k[0, 1, 2] == 118
    np.testing.assert_array_equal(k, pool[1, 0, 1])
    np.testing.assert_array_equal(v, pool[1, 1, 1])


def test_empty_batch_and_no_rows() -> None:
    """Neither launches anything that could touch memory."""
    batch, kernels = replace(PLAIN, padding=2), SETS["max_f32"]
    check_gather(Scene(kernels, batch, ()), 2, row_offsets=np.zeros(1, np.int32), starts=None)
    check_gather(Scene(kernels, batch, ()), 0, row_offsets=np.zeros(1, np.int32), starts=None)


@pytest.mark.parametrize("name", having(STORED, "gather_raw"))
@settings(max_examples=3)
@given(data=st.data())
def test_raw(name: str, data: Any) -> None:
    """Codes, scales and plain values as they lie in memory; in a ring also tokens that it no longer or not yet holds."""
    kernels, batch = STORED[name], data.draw(batches(STORED[name]))
    scene = Scene(kernels, batch, batch.totals)
    scene.fill(batch.totals)
    starts = [data.draw(st.integers(0, n)) for n in batch.totals]
    counts = [n - s for s, n in zip(starts, batch.totals, strict=True)]
    index = index_name(kernels, "gather_raw")
    check_gather_raw(
        scene,
        batch.leading + sum(counts) + batch.padding,
        row_offsets=offsets_of(counts, index, batch.leading),
        starts=np.array(starts, dtype(index).numpy()),
    )


@pytest.mark.parametrize("value", [-1, 2**31 - 1, None])
@pytest.mark.parametrize("name", ["stored_int8_own_table", "stored_latent_row", "stored_per_kv"])
def test_raw_of_bad_pages(name: str, value: int | None) -> None:
    """Rows without a valid page have NaN scales, codes of ones, and are reported."""
    batch = replace(PLAIN, totals=(3, 9, 2), new=(3, 9, 2), seed=9)
    scene = Scene(STORED[name], batch, batch.totals)
    scene.fill(batch.totals)
    table = scene.tables["page_table"]
    table[1] = np.array(scene.pages if value is None else value, np.int64).astype(table.dtype)
    offsets = offsets_of(batch.totals, index_name(STORED[name], "gather_raw"))
    found = check_gather_raw(scene, 14, row_offsets=offsets, starts=None)
    for key, array in found.items():
        if key.endswith("_codes"):
            assert (array[3:12] == 0xFF).all()
        else:
            assert np.isnan(array[3:12].astype(np.float32)).all()
