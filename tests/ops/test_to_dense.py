"""to_dense against the oracle; CSR's slices and Indirect's requests that cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import Indirect, KernelSet, Paged, ops
from kvgen.reference import to_dense
from kvgen.runtime import Fault, describe
from tests.support.batches import PLAIN, batches
from tests.support.harness import index_name, offsets_of, surroundings
from tests.support.memory import CANARY, rows_array
from tests.support.page_lists import (
    BATCH,
    SETS,
    TO_CSR,
    TO_DENSE,
    check_to_csr,
    check_to_dense,
    having,
    spoil,
)
from tests.support.scenes import Scene
from tests.support.step_lengths import go, scene_of


@pytest.mark.parametrize("name", TO_DENSE)
@settings(max_examples=5)
@given(data=st.data())
def test_to_dense(name: str, data: Any) -> None:
    """Tables as wide as needed, wider, and too narrow."""
    kernels = SETS[name]
    batch = data.draw(batches(kernels))
    scene = scene_of(kernels, batch)
    offsets = offsets_of(batch.new, index_name(kernels, "to_dense"), batch.leading)
    pages = max(map(len, scene.entries), default=0)
    columns = data.draw(st.sampled_from((pages, pages + 3, max(pages - 1, 0))))
    word = check_to_dense(scene, data.draw(st.sampled_from(having(kernels, "to_dense", "signed"))), columns, offsets)
    assert (describe(word) is None) == (columns >= pages)


@pytest.mark.parametrize("at", [0, 1, 2, 3])
@pytest.mark.parametrize("value", [-1, 0, 3, 2**31 - 1])
def test_bad_slices(at: int, value: int) -> None:
    """Slices that decrease or leave the list."""
    for name in ("lists_flashinfer", "lists_kv_inside"):
        scene = scene_of(SETS[name], BATCH)
        spoil(scene, "page_indptr", at, value)
        check_to_dense(scene, "to_dense", 4, None)


@pytest.mark.parametrize("value", [-1, 2**31 - 1])
def test_bad_last_page(value: int) -> None:
    scene = scene_of(SETS["lists_flashinfer"], BATCH)
    spoil(scene, "last_page_len", 1, value)
    report = describe(check_to_dense(scene, "to_dense", 3, None))
    assert report is not None and (report.code, report.request) == (Fault.LENGTH, 1)


@pytest.mark.parametrize("value", [-1, 2**31 - 1, 3])
@pytest.mark.parametrize(("form", "rows"), [("indirect", "request_ids"), ("mapped", "idx_mapping")])
def test_bad_requests(form: str, rows: str, value: int) -> None:
    """Rows of the table that are none, or another request's."""
    scene = scene_of(SETS[f"lists_{form}"], BATCH)
    spoil(scene, rows, 1, value)
    offsets = offsets_of(BATCH.new, scene.cache.lengths_dtype)
    check_to_csr(scene, "to_csr", 40, offsets)
    check_to_dense(scene, "to_dense", 21, offsets)


@pytest.mark.parametrize("value", [-1, 2**31 - 1, "pages"])
@pytest.mark.parametrize("name", SETS)
def test_bad_ids(name: str, value: int | str) -> None:
    """Ids outside the pool become the null entry, and are reported by request and token."""
    scene = scene_of(SETS[name], BATCH)
    multiplier = scene.cache.page_table.id_multiplier
    number = -(-scene.pages // multiplier) if isinstance(value, str) else value
    if "page_indices" in scene.tables:
        spoil(scene, "page_indices", int(scene.tables["page_indptr"][1]) + 1, number)
    elif "req_to_token" in scene.tables:
        spoil(scene, "req_to_token", (scene.row(1), 1), number)
    else:
        spoil(scene, "page_table", (scene.row(1), 1), number)
    offsets = offsets_of(BATCH.new, scene.cache.lengths_dtype)
    words = [check_to_dense(scene, "to_dense", 21, offsets)] if name in TO_DENSE else []
    words += [check_to_csr(scene, "to_csr", 40, offsets)[0]] if name in TO_CSR else []
    for report in map(describe, words):
        assert report is not None
        assert (report.code, report.request, report.position) == (Fault.PAGE_ID, 1, scene.tokens)


@pytest.mark.parametrize(("at", "value"), [(2, 0), (0, 90), (1, 6), (3, 2), (2, -1)])
def test_bad_offsets(at: int, value: int) -> None:
    for name in TO_CSR:
        scene = scene_of(SETS[name], BATCH)
        offsets = offsets_of(BATCH.new, scene.cache.lengths_dtype)
        offsets[at] = np.array(value, np.int64).astype(offsets.dtype)
        report = describe(check_to_csr(scene, "to_csr", 40, offsets)[0])
        assert report is not None and report.code is Fault.ROW_OFFSETS


SLOTS = KernelSet(
    name="lists_of_grouped_slots",
    q_heads=1,
    cache=Paged(dtype="f16", kv_heads=1, head_dim=8, page_size=1, table=Indirect()),
    ops=[ops.ToDense(page_tokens=4, fill=-1)],
    arch=["sm_90a"],
)


@pytest.mark.parametrize("damage", ["none", "columns", "slot", "past", "length"])
def test_slots_of_whole_pages(damage: str) -> None:
    """Slots of an allocator that hands out pages of 4 tokens: one id for each of them, the page of its first slot. A page that
    does not begin at a multiple of 4, or past the pool, is reported and left out."""
    totals = (9, 0, 16, 3)
    scene = Scene(SLOTS, replace(PLAIN, totals=(12, 0, 16, 8), new=(2, 0, 1, 3)), (7, 0, 15, 0))
    pages, table = iter(scene.rng.permutation(scene.pages // 4).tolist()), scene.tables["req_to_token"]
    wanted = np.full((4, 3 if damage == "columns" else 5), -1)
    for b, total in enumerate(totals):
        for i in range(-(-total // 4)):
            page = next(pages)
            wanted[b, i : i + 1] = page
            table[scene.row(b), 4 * i : 4 * i + 4] = (page * 4 + np.arange(4))[: table.shape[1] - 4 * i]
    faults = {"slot": (Fault.SLOT, 2, 8), "past": (Fault.PAGE_ID, 2, 8), "length": (Fault.LENGTH, 2, 0)}
    if damage in ("slot", "past"):
        table[scene.row(2), 8] += 1 if damage == "slot" else scene.pages
        wanted[2, 2] = -1
    elif damage == "length":
        scene.tables["lengths"] = np.array([7, 0, -1, 0], scene.tables["lengths"].dtype)
        wanted[2] = -1
    out, around = rows_array(4, (wanted.shape[1],), "i32", strided=True)
    oracle, offsets = out.copy(), offsets_of((2, 0, 1, 3), scene.cache.lengths_dtype)
    word = to_dense(scene.view, oracle, fill=-1, row_offsets=offsets, page_tokens=4)
    assert go(scene, "to_dense", page_table=out, row_offsets=offsets) == word
    for found in (out, oracle):
        np.testing.assert_array_equal(found, wanted)
    assert (surroundings(out, around) == CANARY).all(), "written beside the table"
    report = describe(word)
    expected = {"none": None, "columns": (Fault.POSITION, 2, 12)} | faults
    assert (report and (report.code, report.request, report.position)) == expected[damage]
