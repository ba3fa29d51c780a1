"""slot_mapping against the oracle, and append by its slots; bad ids, lengths, offsets, tokens past the table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import KernelSet, Paged, ops
from kvgen.layout.dtypes import dtype
from kvgen.reference import append, remap_indices
from kvgen.runtime import Fault, describe
from kvgen.runtime.cpu import machine
from tests.support.batches import PLAIN, batches
from tests.support.harness import Run, hold_memory, index_name, launcher, new_rows, offsets_of, package
from tests.support.memory import Raw
from tests.support.scenes import Scene
from tests.support.slots import (
    AXES,
    BATCH,
    BYTES,
    NARROW,
    SETS,
    STORING,
    check_remap,
    check_slots,
    checked,
    picks,
    spoilt,
    wide,
)
from tests.support.step_lengths import scene_of


@pytest.mark.parametrize("name", SETS)
@settings(max_examples=5)
@given(data=st.data())
def test_slot_mapping(name: str, data: Any) -> None:
    batch = data.draw(batches(SETS[name]))
    scene = scene_of(SETS[name], batch)
    offsets = offsets_of(batch.new, index_name(SETS[name], "slot_mapping"), batch.leading)
    for op in ("slot_mapping", "slots32") if name[6:] in NARROW else ("slot_mapping",):
        word, _ = check_slots(scene, op, batch.leading + sum(batch.new) + batch.padding, offsets)
        assert describe(word) is None


@pytest.mark.parametrize("name", STORING)
@settings(max_examples=4)
@given(data=st.data())
def test_append_takes_the_slots(name: str, data: Any) -> None:
    """slot_mapping, then append by slots: the memory that append by offsets makes."""
    batch = replace(data.draw(batches(STORING[name])), shared=False)
    scene = scene_of(STORING[name], batch)
    rows = batch.leading + sum(batch.new) + batch.padding
    offsets = offsets_of(batch.new, scene.cache.lengths_dtype, batch.leading)
    new, expected, slots = new_rows(scene, rows), scene.snapshot(), np.zeros(rows, np.int64)
    append(scene.view, scene.rows(expected), list(new.values()), row_offsets=offsets)
    Run(scene, "slot_mapping", launcher(scene, "slot_mapping"), row_offsets=offsets, slots=slots)
    Run(scene, "append_slots", launcher(scene, "append_slots"), **new, slots=slots)
    hold_memory(scene, expected)


@pytest.mark.parametrize("value", [-1, 2**31 - 2, 1, 2**32 - 2])
@pytest.mark.parametrize("name", ["slots_dense", "slots_hnd", "slots_kv_inside", "slots_continuous_open", "slots_ring"])
def test_bad_lengths(name: str, value: int) -> None:
    """Rows past the page table; remap asks for no length."""
    scene = scene_of(SETS[name], BATCH)
    clean = Scene(SETS[name], BATCH, scene.tables["lengths"])
    scene.tables["lengths"] = spoilt(scene.tables["lengths"], 1, value)
    offsets, indices = offsets_of(BATCH.new, "i64"), picks(scene, (0, 0, 1, 1, 1, 2, -1), 9)
    slots_word, remap_word = checked(scene, offsets, indices)
    assert remap_word == remap_indices(clean.view, offsets, indices, np.zeros_like(indices))
    report = describe(slots_word)
    if value == -1:
        assert report is not None and (report.code, report.request) == (Fault.LENGTH, 1)


@pytest.mark.parametrize("value", [-1, 2**31 - 1, "pages"])
@pytest.mark.parametrize("name", SETS)
def test_bad_ids(name: str, value: int | str) -> None:
    """Tokens in pages that are none have no place: -1, and reported."""
    scene = scene_of(SETS[name], BATCH)
    number = -(-scene.pages // scene.cache.page_table.id_multiplier) if isinstance(value, str) else value
    tables = scene.tables
    if "page_indices" in tables:
        begin, end = tables["page_indptr"][1:3]
        tables["page_indices"] = spoilt(tables["page_indices"], slice(int(begin), int(end)), number)
    elif "req_to_token" in tables:
        tables["req_to_token"] = spoilt(tables["req_to_token"], scene.row(1), number)
    else:
        tables["page_table"] = spoilt(tables["page_table"], scene.row(1), number)
    for report in map(describe, checked(scene, offsets_of(BATCH.new, "i64"))):
        assert report is not None and (report.code, report.request) == (Fault.PAGE_ID, 1)


@pytest.mark.parametrize(("at", "value"), [(2, 0), (0, 90), (2, 90), (1, 6), (-1, 90), (-1, 1), (1, -1)])
@pytest.mark.parametrize("name", ["slots_dense", "slots_kv_inside", "slots_continuous_open"])
def test_bad_offsets(name: str, at: int, value: int) -> None:
    """Rows whose offsets contradict are nobody's."""
    scene = scene_of(SETS[name], BATCH)
    offsets = spoilt(offsets_of(BATCH.new, "i64"), at, value)
    for report in map(describe, checked(scene, offsets)):
        assert report is not None and report.code is Fault.ROW_OFFSETS


def test_places_past_thirty_two_bits(tmp_path: Path) -> None:
    """Slots and rows that their type cannot hold, in a pool of more than 2^31 tokens (a sparse file)."""
    page = 2**20
    cache = Paged(dtype="bf16", kv_heads=1, head_dim=1, page_size=page, layout=AXES, stores="k", quant=BYTES)
    operations = (ops.SlotMapping(), ops.SlotMapping(name="slots32", slots_dtype="i32"), ops.RemapIndices())
    generated = package(KernelSet(name="slots_far", q_heads=1, cache=cache, ops=operations))
    shape = (2**11 + 2, 1, page, 1, 1)
    pool: Raw = np.memmap(tmp_path / "pool", dtype("e4m3").numpy(), "w+", shape=shape)
    table = np.array([[2**11 - 1, 2**11 + 1]], np.int32)
    offsets, slots, narrow = np.array([0, 2], np.int32), np.zeros(2, np.int64), np.zeros(2, np.int32)
    indices, out = np.array([[page - 1, page, -1], [page + 5, 0, 1]], np.int32), np.zeros((2, 3), np.int32)
    words = np.zeros((3, 1), np.uint64)
    with machine(mode="check"):
        held = generated.Cache(pool, lengths=np.array([page - 1], np.int32), page_table=table)[0]
        generated.slot_mapping(held, offsets, slots, errors=words[0])
        generated.slots32(held, offsets, narrow, errors=words[1])
        generated.remap_indices(held, indices, offsets, out, errors=words[2])
    assert slots.tolist() == [2**31 - 1, 2**31 + page] and describe(words[0]) is None
    assert narrow.tolist() == [2**31 - 1, -1]
    first = 2**31 - page
    assert out.tolist() == [[2**31 - 1, -1, -1], [-1, first, first + 1]]
    for report in map(describe, words[1:]):
        assert report is not None and (report.code, report.request, report.position) == (Fault.SLOT, 0, page)


def test_nobody() -> None:
    """An empty batch: its rows are padding; no rows, no launch."""
    scene = scene_of(SETS["slots_dense"], PLAIN)
    _, slots = check_slots(scene, "slot_mapping", 3, np.zeros(1, np.uint32))
    assert slots.tolist() == [-1] * 3
    _, places = check_remap(scene, np.array([[3, -5]], np.int32), np.zeros(1, np.int64))
    assert places.tolist() == [[-1, -5]]
    with machine() as log:
        cache = package(scene.kernels).Cache(**scene.arguments())[0]
        package(scene.kernels).slot_mapping(cache, np.zeros(1, np.uint32), np.zeros(0, np.int64))
    assert not log.launches


def test_one_launch_each() -> None:
    scene, offsets, indices = wide("slots_dense", 40, 20)
    with machine(mode="check") as log:
        generated = package(scene.kernels)
        cache = generated.Cache(**scene.arguments())[0]
        generated.slot_mapping(cache, offsets.astype(np.uint32), np.zeros(40, np.int64))
        generated.remap_indices(cache, indices, offsets, np.zeros_like(indices))
    assert [done.entry for done in log.launches] == ["slots_dense_slot_mapping", "slots_dense_remap_indices"]
