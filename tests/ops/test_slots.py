"""slot_mapping and remap_indices: every place against the oracle, memory around them untouched, bad data reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import KernelSet, Paged, Quant, ops
from kvgen.layout.dtypes import dtype
from kvgen.reference import append, remap_indices, slot_mapping
from kvgen.runtime import Fault, describe
from kvgen.runtime.cpu import machine
from kvgen.spec.cache import Cache, Continuous
from kvgen.spec.kernel_set import Op
from tests.ops.batches import PLAIN, batches
from tests.ops.chosen import CHOSEN, chosen
from tests.ops.harness import Run, hold_memory, index_name, launcher, new_rows, offsets_of, package, surroundings
from tests.ops.memory import CANARY, Raw, rows_array
from tests.ops.scenes import Scene
from tests.ops.test_lengths import go, hold, scene_of, vector

STORED = ("dense", "kv_inside", "ring", "continuous_open", "indirect")  # append by slots stores where slot_mapping says


def _operations(cache: Cache) -> Sequence[Op]:
    found: list[Op] = [ops.SlotMapping(), ops.RemapIndices(index_dtype="i64")]
    if any(cache is CHOSEN[name] for name in NARROW):
        found.append(ops.SlotMapping(name="slots32", slots_dtype="i32"))
    if any(cache is CHOSEN[name] for name in STORED):
        found.append(ops.Append(name="append_slots", rows="slots"))
    return found


_AXES: Final = "page layer token head dim"
_BYTES: Final = Quant(dtype="e4m3")

# Every form of table but PerKV, which has no slots; known and unknown sizes of a page.
NARROW = ("flashinfer", "indirect")
SETS = chosen("slots", _operations, ("dense", "hnd", "kv_inside", "ring", "continuous_open", *NARROW))
STORING = {f"slots_{name}": SETS[f"slots_{name}"] for name in STORED}


def check_slots(scene: Scene, op: str, rows: int, offsets: Raw) -> tuple[int, Raw]:
    """Slots of so many rows against the oracle; the error word and the slots."""
    slots = vector(rows, "i32" if op == "slots32" else "i64")
    wanted = slots[0].copy()
    word = slot_mapping(scene.view, offsets, wanted)
    found = go(scene, op, row_offsets=offsets, slots=slots[0])
    hold(slots, wanted)
    assert not scene.batch.errors or found == word, f"{describe(found)}, not {describe(word)}"
    return word, wanted


def check_remap(scene: Scene, indices: Raw, offsets: Raw, *, in_place: bool = False) -> tuple[int, Raw]:
    """Rows in the pool of these tokens against the oracle; the error word and the rows."""
    given, _ = rows_array(len(indices), indices.shape[1:], "i32", strided=scene.batch.strided)
    given[...] = indices
    out, around = rows_array(len(indices), indices.shape[1:], "i32", strided=not scene.batch.strided)
    wanted = out.copy()
    word = remap_indices(scene.view, offsets, indices, wanted)
    found = go(scene, "remap_indices", indices=given, row_offsets=offsets, out=given if in_place else out)
    np.testing.assert_array_equal(given if in_place else out, wanted)
    assert in_place or (surroundings(out, around) == CANARY).all(), "written beside the rows"
    assert not scene.batch.errors or found == word, f"{describe(found)}, not {describe(word)}"
    return word, wanted


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


def picks(scene: Scene, rows: Sequence[int], width: int) -> Raw:
    """Tokens at random of each row's request, some of them -1."""
    found = np.full((len(rows), width), -1)
    for row, b in enumerate(rows):
        count = scene.batch.totals[b] if b >= 0 else 9
        if count:
            found[row] = scene.rng.integers(0, count, width)
    found[scene.rng.random(found.shape) < 0.2] = -1
    return found.astype(np.int32)


@pytest.mark.parametrize("name", SETS)
@settings(max_examples=5)
@given(data=st.data())
def test_remap_indices(name: str, data: Any) -> None:
    batch = data.draw(batches(SETS[name]))
    scene = scene_of(SETS[name], batch)
    offsets = offsets_of(batch.new, "i64", batch.leading)
    whose = [-1] * batch.leading + [b for b, n in enumerate(batch.new) for _ in range(n)] + [-1] * batch.padding
    indices = picks(scene, whose, data.draw(st.sampled_from((1, 3, 64))))
    word, _ = check_remap(scene, indices, offsets, in_place=data.draw(st.booleans()))
    # A ring's table may have columns that no token has taken yet.
    assert describe(word) is None or name == "slots_ring"


def _wide(name: str, requests: int, width: int) -> tuple[Scene, Raw, Raw]:
    """A decode step of many requests with random tables: the scene, its offsets, and picks."""
    rng = np.random.default_rng(requests)
    scene = Scene(SETS[name], PLAIN, ())
    pages, tokens = 5, scene.tokens
    scene.batch = replace(PLAIN, totals=(pages * tokens,) * requests, new=(1,) * requests)
    scene.tables["lengths"] = rng.integers(0, pages * tokens - 1, requests).astype(scene.tables["lengths"].dtype)
    scene.tables["page_table"] = rng.integers(0, 2, (requests, pages)).astype(np.uint32)
    indices = rng.integers(-1, pages * tokens, (requests, width)).astype(np.int32)
    return scene, offsets_of([1] * requests, "i64"), indices


@pytest.mark.parametrize(("requests", "width"), [(1, 2100), (9, 700), (1500, 2)])
def test_many_in_one_launch(requests: int, width: int) -> None:
    """Rows that several warps share; batches whose offsets a block keeps, and does not."""
    scene, offsets, indices = _wide("slots_dense", requests, width)
    _, places = check_remap(scene, indices, offsets)
    _, slots = check_slots(scene, "slot_mapping", requests + 3, offsets.astype(np.uint32))
    table, lengths = scene.tables["page_table"].astype(np.int64), scene.tables["lengths"].astype(np.int64)
    everyone = np.arange(requests)
    np.testing.assert_array_equal(slots[:requests], table[everyone, lengths // 16] * 16 + lengths % 16)
    wanted = np.take_along_axis(table, np.maximum(indices, 0) // 16, axis=1) * 16 + indices % 16
    np.testing.assert_array_equal(places, np.where(indices < 0, indices, wanted))


def test_one_launch_each() -> None:
    scene, offsets, indices = _wide("slots_dense", 40, 20)
    with machine(mode="check") as log:
        generated = package(scene.kernels)
        cache = generated.Cache(**scene.arguments())[0]
        generated.slot_mapping(cache, offsets.astype(np.uint32), np.zeros(40, np.int64))
        generated.remap_indices(cache, indices, offsets, np.zeros_like(indices))
    assert [done.entry for done in log.launches] == ["slots_dense_slot_mapping", "slots_dense_remap_indices"]


def test_no_sector_is_moved_twice() -> None:
    """Indices, places and slots of a bulk size: the sectors they consist of, once."""
    scene, offsets, indices = _wide("slots_dense", 512, 512)
    out, slots = rows_array(512, (512,), "i32", strided=False)[0], vector(512, "i64")[0]
    given, _ = rows_array(512, (512,), "i32", strided=False)
    given[...] = indices
    with machine(mode="check") as log:
        cache = package(scene.kernels).Cache(**scene.arguments())[0]
        package(scene.kernels).remap_indices(cache, given, offsets, out)
        package(scene.kernels).slot_mapping(cache, offsets.astype(np.uint32), slots)
    remapped, mapped = (done.counters.per_buffer for done in log.launches)
    assert remapped["indices"].load_sectors == remapped["out"].store_sectors == 512 * 512 * 4 // 32
    assert mapped["slots"].store_sectors <= 512 * 8 // 32 * 1.02


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


# Bad data ----------------------------------------------------------------------------------------------------------------

BATCH = replace(PLAIN, totals=(7, 12, 5), new=(2, 3, 1), padding=1)


def _spoilt(array: Raw, at: Any, value: int) -> Raw:
    found = array.copy()
    found[at] = np.array(value, np.int64).astype(array.dtype)
    return found


def _checked(scene: Scene, offsets: Raw, indices: Raw | None = None) -> list[int]:
    """Both operations on a scene; their error words."""
    chosen_tokens = picks(scene, (0, 0, 1, 1, 1, 2, -1), 9) if indices is None else indices
    words = [check_slots(scene, "slot_mapping", 7, offsets.astype(_offsets(scene.kernels).dtype))[0]]
    return [*words, check_remap(scene, chosen_tokens, offsets)[0]]


def _offsets(kernels: KernelSet) -> Raw:
    return offsets_of(BATCH.new, index_name(kernels, "slot_mapping"))


@pytest.mark.parametrize("value", [-1, 2**31 - 1, "pages"])
@pytest.mark.parametrize("name", SETS)
def test_bad_ids(name: str, value: int | str) -> None:
    """Tokens in pages that are none have no place: -1, and reported."""
    scene = scene_of(SETS[name], BATCH)
    number = -(-scene.pages // scene.cache.page_table.id_multiplier) if isinstance(value, str) else value
    tables = scene.tables
    if "page_indices" in tables:
        begin, end = tables["page_indptr"][1:3]
        tables["page_indices"] = _spoilt(tables["page_indices"], slice(int(begin), int(end)), number)
    elif "req_to_token" in tables:
        tables["req_to_token"] = _spoilt(tables["req_to_token"], int(tables["request_ids"][1]), number)
    else:
        tables["page_table"] = _spoilt(tables["page_table"], 1, number)
    for report in map(describe, _checked(scene, offsets_of(BATCH.new, "i64"))):
        assert report is not None and (report.code, report.request) == (Fault.PAGE_ID, 1)


@pytest.mark.parametrize("value", [-1, 2**31 - 2, 1, 2**32 - 2])
@pytest.mark.parametrize("name", ["slots_dense", "slots_hnd", "slots_kv_inside", "slots_continuous_open", "slots_ring"])
def test_bad_lengths(name: str, value: int) -> None:
    """Rows past the page table; remap asks for no length."""
    scene = scene_of(SETS[name], BATCH)
    clean = Scene(SETS[name], BATCH, scene.tables["lengths"])
    scene.tables["lengths"] = _spoilt(scene.tables["lengths"], 1, value)
    offsets, indices = offsets_of(BATCH.new, "i64"), picks(scene, (0, 0, 1, 1, 1, 2, -1), 9)
    slots_word, remap_word = _checked(scene, offsets, indices)
    assert remap_word == remap_indices(clean.view, offsets, indices, np.zeros_like(indices))
    report = describe(slots_word)
    if value == -1:
        assert report is not None and (report.code, report.request) == (Fault.LENGTH, 1)


@pytest.mark.parametrize("token", [36, 100, 2**31 - 1])
@pytest.mark.parametrize("name", SETS)
def test_tokens_past_the_table(name: str, token: int) -> None:
    """Picks that no column of the table is for."""
    scene = scene_of(SETS[name], BATCH)
    indices = np.full((7, 2), -1, np.int32)
    indices[2, 1] = token
    word, places = check_remap(scene, indices, offsets_of(BATCH.new, "i64"))
    report = describe(word)
    open_ended = name == "slots_ring" or (isinstance(scene.cache, Continuous) and token == 36)
    if not open_ended:
        assert report is not None and (report.request, report.position) == (1, token)
        assert report.code is Fault.POSITION or token == 36  # which spare columns of the table may be for
        assert (places == -1).all()


@pytest.mark.parametrize(("at", "value"), [(2, 0), (0, 90), (2, 90), (1, 6), (-1, 90), (-1, 1), (1, -1)])
@pytest.mark.parametrize("name", ["slots_dense", "slots_kv_inside", "slots_continuous_open"])
def test_bad_offsets(name: str, at: int, value: int) -> None:
    """Rows whose offsets contradict are nobody's."""
    scene = scene_of(SETS[name], BATCH)
    offsets = _spoilt(offsets_of(BATCH.new, "i64"), at, value)
    for report in map(describe, _checked(scene, offsets)):
        assert report is not None and report.code is Fault.ROW_OFFSETS


def test_places_past_thirty_two_bits(tmp_path: Path) -> None:
    """Slots and rows that their type cannot hold, in a pool of more than 2^31 tokens (a sparse file)."""
    page = 2**20
    cache = Paged(dtype="bf16", kv_heads=1, head_dim=1, page_size=page, layout=_AXES, stores="k", quant=_BYTES)
    operations = (ops.SlotMapping(), ops.SlotMapping(name="slots32", slots_dtype="i32"), ops.RemapIndices())
    generated = package(KernelSet(name="slots_far", q_heads=1, cache=cache, ops=operations))
    shape = (2**11 + 2, 1, page, 1, 1)
    pool: Raw = np.memmap(tmp_path / "pool", dtype("e4m3").numpy(), "w+", shape=shape)
    table = np.array([[2**11 - 1, 2**11 + 1]], np.uint32)
    offsets, slots, narrow = np.array([0, 2], np.uint32), np.zeros(2, np.int64), np.zeros(2, np.int32)
    indices, out = np.array([[page - 1, page, -1], [page + 5, 0, 1]], np.int32), np.zeros((2, 3), np.int32)
    words = np.zeros((3, 1), np.uint64)
    with machine(mode="check"):
        held = generated.Cache(pool, lengths=np.array([page - 1], np.uint32), page_table=table)[0]
        generated.slot_mapping(held, offsets, slots, errors=words[0])
        generated.slots32(held, offsets, narrow, errors=words[1])
        generated.remap_indices(held, indices, offsets, out, errors=words[2])
    assert slots.tolist() == [2**31 - 1, 2**31 + page] and describe(words[0]) is None
    assert narrow.tolist() == [2**31 - 1, -1]
    first = 2**31 - page
    assert out.tolist() == [[2**31 - 1, -1, -1], [-1, first, first + 1]]
    for report in map(describe, words[1:]):
        assert report is not None and (report.code, report.request, report.position) == (Fault.SLOT, 0, page)
