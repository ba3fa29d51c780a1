"""rows_add against the oracle: the whole memory byte for byte, for slices of a batch's offsets too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import KernelSet, ops
from kvgen.reference import rows_add
from kvgen.runtime import Fault, describe
from kvgen.runtime.cpu import machine
from tests.ops.test_lora_add import flat_rows, index_of, sectors_of, stored_scene
from tests.support.batches import PLAIN, batches
from tests.support.cache_matrix import FEW_BITS, chosen
from tests.support.harness import Run, hold_memory, launcher, offsets_of, package
from tests.support.memory import Raw
from tests.support.scenes import Scene
from tests.support.sets import ALL

# Widths of which V's half begins in the middle of an access too.
SETS = chosen(
    "rows_add",
    lambda cache: (ops.RowsAdd(),),
    ("dense", "kv_inside", "ring", "mixed", "given", "int4_in_page", *FEW_BITS),
)
# Rows of 38 elements, of which K's vectors of 8 cannot be read at once.
_ODD = KernelSet(name="rows_add_odd", q_heads=2, cache=ALL["half_bytes"].cache, ops=(ops.RowsAdd(index_dtype="i32"),))
SETS[_ODD.name] = _ODD


def width_of(scene: Scene) -> int:
    return sum(r.heads * r.dim for r in scene.rows())


def check_rows(scene: Scene, a: Raw, row_offsets: Raw, batch_offset: int) -> int:
    """Add and compare all memory with the oracle's; returns the error word."""
    expected = scene.snapshot()
    word = rows_add(scene.view, scene.rows(expected), a, row_offsets=row_offsets, batch_offset=batch_offset)
    call = launcher(scene, "rows_add")
    run = Run(scene, "rows_add", call, a=a, row_offsets=row_offsets, batch_offset=batch_offset)
    hold_memory(scene, expected)
    run.expect_word(word)
    return word


@pytest.mark.parametrize("name", SETS)
@settings(max_examples=6)
@given(data=st.data())
def test_drawn(name: str, data: Any) -> None:
    """The requests from `first` on, their offsets a slice of the batch's, with rows of padding behind them."""
    batch = data.draw(batches(SETS[name]))
    scene = stored_scene(SETS[name], batch)
    first = data.draw(st.integers(0, len(batch.new)))
    last = data.draw(st.integers(first, len(batch.new)))
    offsets = offsets_of(batch.new, index_of(SETS[name]), batch.leading)[first : last + 1]
    rows = int(offsets[-1] - offsets[0]) + batch.padding
    check_rows(scene, flat_rows(scene, rows, width_of(scene)), offsets, first)


BATCH = replace(PLAIN, totals=(9, 17, 5), new=(2, 3, 4), fill="bytes")


@pytest.mark.parametrize("first", [1, 3, 2**31, 2**32 - 1])
def test_a_slice_past_the_batch(first: int) -> None:
    """Requests that the cache does not have get nothing, and are reported."""
    scene = stored_scene(SETS["rows_add_dense"], BATCH)
    offsets = offsets_of(BATCH.new, "u32")
    word = check_rows(scene, flat_rows(scene, 9, width_of(scene)), offsets, first)
    report = describe(word)
    assert report is not None and report.code is Fault.TABLE
    assert (report.request, report.position) == ((3, 5) if first == 1 else (min(first, 0xFFFFFF), 0))


OFFSETS = {
    "decrease": (2, 1),
    "first_too_large": (0, 90),
    "first_minus_one": (0, 2**32 - 1),
    "first_huge": (0, 2**32 - 8),
    "first_too_large_by_one": (0, 2**32 - 10),
    "past_the_rows": (2, 90),
    "last_past_the_rows": (-1, 90),
    "last_decreases": (-1, 1),
}


@pytest.mark.parametrize("label", OFFSETS)
@pytest.mark.parametrize("name", ["rows_add_dense", "rows_add_ring"])
def test_row_offsets(name: str, label: str) -> None:
    at, value = OFFSETS[label]
    scene = stored_scene(SETS[name], BATCH)
    offsets = offsets_of(BATCH.new, index_of(SETS[name]))
    offsets[at] = np.array(value, np.int64).astype(offsets.dtype)
    word = check_rows(scene, flat_rows(scene, 9, width_of(scene)), offsets, 0)
    # Rows count from the first offset: a large one alone leaves them all before their requests' ends.
    assert describe(word) is not None or label == "first_too_large"


def test_a_bad_page() -> None:
    scene = stored_scene(SETS["rows_add_dense"], BATCH)
    scene.tables["page_table"][2, 0] = 2**31 - 1
    offsets = offsets_of(BATCH.new, "u32")[1:]
    report = describe(check_rows(scene, flat_rows(scene, 7, width_of(scene)), offsets, 1))
    assert report is not None and (report.code, report.request, report.position) == (Fault.PAGE_ID, 2, 1)


def test_no_sector_is_moved_twice() -> None:
    kernels = SETS["rows_add_dense"]
    made, pool, a = package(kernels), sectors_of(130, 2, 1, 16, 2, 64), sectors_of(2048, 256)
    table = np.random.default_rng(1).permutation(128).reshape(1, 128).astype(np.uint32)
    with machine(mode="check") as log:
        cache = made.Cache(pool, page_table=table, lengths=np.zeros(1, np.uint32))
        made.rows_add(cache[0], a, np.array([0, 2048], np.uint32), 0)
    (launched,) = log.launches
    minimum, traffic = 2048 * 512 // 32, launched.counters.per_buffer
    assert traffic["a"].load_sectors == traffic["pool"].load_sectors == traffic["pool"].store_sectors == minimum
    assert (pool == 2).sum() == 2048 * 256
