"""row_offsets against the oracle: any batch, many requests, offsets and lengths that cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.runtime import Fault, describe
from kvgen.runtime.cpu import machine
from tests.support.batches import PLAIN, batches
from tests.support.harness import index_name, offsets_of, package
from tests.support.scenes import Scene
from tests.support.step_lengths import (
    BAD_OFFSETS,
    BATCH,
    MANY,
    SETS,
    bad,
    check_advance,
    check_row_offsets,
    scene_of,
)


@pytest.mark.parametrize("name", SETS)
@settings(max_examples=5)
@given(data=st.data())
def test_row_offsets(name: str, data: Any) -> None:
    batch = data.draw(batches(SETS[name]))
    offsets = offsets_of(batch.new, index_name(SETS[name], "row_offsets"), batch.leading)
    assert describe(check_row_offsets(scene_of(SETS[name], batch), offsets)) is None
    if SETS[name].cache.lengths == "before":
        check_row_offsets(scene_of(SETS[name], batch), None)


@pytest.mark.parametrize("requests", MANY)
def test_many_requests(requests: int) -> None:
    """Blocks that begin in the middle of the batch, in one launch."""
    rng = np.random.default_rng(requests)
    new = rng.integers(0, 3, requests)
    scene = Scene(SETS["lengths_dense"], replace(PLAIN, totals=(1,) * 2, new=(0,) * 2), (1, 1))
    scene.batch = replace(PLAIN, totals=(1,) * requests, new=tuple(new.tolist()))
    scene.tables["lengths"] = rng.integers(0, 50, requests).astype(np.uint32)
    scene.tables["page_table"] = np.zeros((requests, 4), np.uint32)
    with machine(mode="check") as log:
        cache = package(scene.kernels).Cache(**scene.arguments())[0]
        out, lengths = np.zeros(requests + 1, np.uint32), np.zeros(requests, np.uint32)
        offsets = offsets_of(new.tolist(), "u32")
        package(scene.kernels).row_offsets(cache, out, row_offsets=offsets)
        package(scene.kernels).advance(cache, lengths, row_offsets=offsets)
    assert [done.entry for done in log.launches] == ["lengths_dense_row_offsets", "lengths_dense_advance"]
    np.testing.assert_array_equal(lengths, scene.tables["lengths"] + new)
    np.testing.assert_array_equal(out, np.cumsum([0, *lengths]))


@pytest.mark.parametrize("label", [*BAD_OFFSETS, "minus_one"])
@pytest.mark.parametrize("name", ["lengths_dense", "lengths_continuous", "lengths_hnd"])
def test_bad_offsets(name: str, label: str) -> None:
    """Requests next to offsets that decrease have no tokens, stay as long as they are, and are reported."""
    at, value = BAD_OFFSETS.get(label, (2, -1))
    offsets = bad(offsets_of(BATCH.new, index_name(SETS[name], "advance")), at, value)
    for word in (
        check_row_offsets(scene_of(SETS[name], BATCH), offsets),
        check_advance(scene_of(SETS[name], BATCH), "advance", offsets),
    ):
        report = describe(word)
        assert report is not None and report.code is Fault.ROW_OFFSETS


@pytest.mark.parametrize("value", [-1, -2, 2**31 - 1, 2**31 - 3, 2**32 - 4, 2**32 - 2])
@pytest.mark.parametrize("name", ["lengths_dense", "lengths_continuous", "lengths_hnd", "lengths_ring"])
def test_bad_lengths(name: str, value: int) -> None:
    """Lengths that cannot be, that overflow with the new tokens, and sums past the largest index."""
    scene = scene_of(SETS[name], BATCH)
    scene.tables["lengths"] = bad(scene.tables["lengths"], 1, value)
    offsets = offsets_of(BATCH.new, index_name(SETS[name], "advance"))
    for word in (check_row_offsets(scene, offsets), check_advance(scene, "advance", offsets)):
        report = describe(word)
        assert report is None or (report.code is Fault.LENGTH and report.request in (1, 2))
    if value == -1:
        report = describe(check_advance(scene, "accept", np.array([1, 1, 1], np.int32), in_place=True))
        assert report is not None and report.request == 1


def test_bad_page_lists() -> None:
    """Lengths that follow from lists: a slice that leaves the list, a last page that is none."""
    for key, value in (("page_indptr", -1), ("page_indptr", 10_000), ("last_page_len", -1)):
        scene = scene_of(SETS["lengths_flashinfer"], BATCH)
        scene.tables[key] = bad(scene.tables[key], 2, value)
        assert str(describe(check_row_offsets(scene, None))).startswith("LENGTH")


def test_more_new_rows_than_tokens() -> None:
    """Lengths after the step have its rows in them."""
    scene = scene_of(SETS["lengths_hnd"], BATCH)
    report = describe(check_row_offsets(scene, np.array([0, 2, 2, 9], np.int32)))
    assert report is not None and (report.code, report.request) == (Fault.LENGTH, 2)


def test_nobody() -> None:
    """An empty batch: one sum of nothing, and no launch that could advance."""
    scene = scene_of(SETS["lengths_dense"], PLAIN)
    with machine() as log:
        cache = package(scene.kernels).Cache(**scene.arguments())[0]
        out = np.ones(1, np.uint32)
        package(scene.kernels).row_offsets(cache, out)
        package(scene.kernels).advance(cache, np.zeros(0, np.uint32))
    assert len(log.launches) == 1 and out[0] == 0
