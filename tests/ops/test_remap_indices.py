"""remap_indices against the oracle; wide rows, tokens past the table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.runtime import Fault, describe
from kvgen.runtime.cpu import machine
from kvgen.schema.cache import Continuous
from tests.support.batches import batches
from tests.support.harness import offsets_of, package
from tests.support.key_lists import BATCH as KEYS
from tests.support.key_lists import ENTRIES, check_listed, step
from tests.support.memory import rows_array
from tests.support.slots import (
    BATCH,
    SETS,
    check_remap,
    check_slots,
    picks,
    wide,
)
from tests.support.step_lengths import scene_of, vector


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


@pytest.mark.parametrize(("requests", "width"), [(1, 2100), (9, 700), (1500, 2)])
def test_many_in_one_launch(requests: int, width: int) -> None:
    """Rows that several warps share; batches whose offsets a block keeps, and does not."""
    scene, offsets, indices = wide("slots_dense", requests, width)
    _, places = check_remap(scene, indices, offsets)
    _, slots = check_slots(scene, "slot_mapping", requests + 3, offsets.astype(np.uint32))
    table, lengths = scene.tables["page_table"].astype(np.int64), scene.tables["lengths"].astype(np.int64)
    everyone = np.arange(requests)
    np.testing.assert_array_equal(slots[:requests], table[everyone, lengths // 16] * 16 + lengths % 16)
    wanted = np.take_along_axis(table, np.maximum(indices, 0) // 16, axis=1) * 16 + indices % 16
    np.testing.assert_array_equal(places, np.where(indices < 0, indices, wanted))


def test_no_sector_is_moved_twice() -> None:
    """Indices, places and slots of a bulk size: the sectors they consist of, once."""
    scene, offsets, indices = wide("slots_dense", 512, 512)
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


@pytest.mark.parametrize("counted", [True, False])
@settings(max_examples=6)
@given(data=st.data())
def test_columns_of_lists_of_blocks(counted: bool, data: Any) -> None:
    """What columns of a list of blocks name, wherever it has numbers; columns past the list, numbers of nothing."""
    scene, offsets, rows = step(ENTRIES, data.draw(batches(ENTRIES)))
    rng, width = scene.rng, data.draw(st.sampled_from((1, 5, 40)))
    lists, indices = rng.integers(-1, 4, (rows, width)), rng.integers(-1, width * 4, (rows, 9))
    if data.draw(st.booleans()):
        wild = np.array([-7, -(2**31), 2**31 - 1, 2**29, 2**29 - 1, 2**30, 50])
        lists = np.where(rng.random(lists.shape) < 0.3, rng.choice(wild, lists.shape), lists)
        indices = np.where(rng.random(indices.shape) < 0.3, rng.choice(wild, indices.shape), indices)
    check_listed(scene, offsets, indices.astype(np.int32), lists.astype(np.int32), counted=counted)


def test_what_lists_and_columns_mean() -> None:
    """Column 4 c + j of a list of blocks of 4 is entry 4 list[c] + j: its row in the pool, of entries that the row sees."""
    scene, offsets, rows = step(ENTRIES, KEYS)
    lists = np.tile(np.array([1, -1, 0, 9, 2**30], np.int32), (rows, 1))
    # Entries 0, 5, none, 4, 3, 37, none, 2^32.
    indices = np.tile(np.array([8, 1, 4, 0, 11, 13, -1, 16], np.int32), (rows, 1))
    _, found, counts = check_listed(scene, offsets, indices, lists, counted=True)
    table = scene.tables["page_table"].astype(np.int64)[1]
    last = 13  # request 1 has rows 5 to 13, of 40 tokens: the last one sees 10 entries
    entries = np.array([0, 5, 4, 3])
    np.testing.assert_array_equal(found[last, [0, 1, 3, 4]], table[entries // 3] * 3 + entries % 3)
    assert (found[last, [2, 5, 6, 7]] == -1).all() and counts[last] == 5


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
