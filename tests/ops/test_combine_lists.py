"""combine_lists against the oracle and vLLM's rule; remap_indices with counts; wrong picks, begins and widths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.runtime import Fault, describe
from tests.support.batches import Batch, batches
from tests.support.key_lists import BATCH, ENTRIES, EVERY, check_combined, check_counted, step
from tests.support.memory import Raw
from tests.support.slots import spoilt

RATE, WINDOW = ENTRIES.kv.entry_tokens, 7


def laid(batch: Batch) -> tuple[tuple[Raw, Raw], int]:
    """(where entries and tokens begin, rows) of a buffer: of each request its entries, then the tokens that its rows see."""
    entries, tokens, at = [], [], 0
    for total, new in zip(batch.totals, batch.new, strict=True):
        first = max(0, total - new - WINDOW + 1)
        entries.append(at)
        tokens.append(at + total // RATE - first)
        at += total // RATE + total - first
    return (np.array(entries, np.int64), np.array(tokens, np.int64)), at


def picked(scene: Any, batch: Batch, rows: int, width: int) -> Raw:
    """Entries in no order, some of them not there yet, -1 among them and behind."""
    found = np.full((rows, width), -1)
    for b, (total, new) in enumerate(zip(batch.totals, batch.new, strict=True)):
        begin = batch.leading + sum(batch.new[:b])
        found[begin : begin + new] = scene.rng.integers(-1, total // RATE + 2, (new, width))
    return found.astype(np.int32)


@settings(max_examples=5)
@given(data=st.data())
def test_lists(data: Any) -> None:
    """Both operations in steps of every phase, the lists just as wide as they must be, or wider."""
    batch = data.draw(batches(ENTRIES))
    scene, offsets, rows = step(ENTRIES, batch)
    indices = picked(scene, batch, rows, data.draw(st.sampled_from((1, 5, 130))))
    begins, buffer_rows = laid(batch)
    word, _, counts = check_combined(
        scene, offsets, indices, begins, buffer_rows, indices.shape[1] + WINDOW + data.draw(st.sampled_from((0, 40)))
    )
    assert describe(word) is None and (counts >= 0).all()
    word, _, counts = check_counted(scene, offsets, indices)
    assert describe(word) is None and (counts >= 0).all()


@settings(max_examples=4)
@given(data=st.data())
def test_all_entries(data: Any) -> None:
    """Every entry that a row sees, then its window; a list of one column less is unknown."""
    batch = data.draw(batches(EVERY))
    scene, offsets, rows = step(EVERY, batch)
    begins = tuple(scene.rng.integers(0, 90, len(batch.totals)).astype(np.int32) for _ in range(2))
    width = max((total + min(total, WINDOW) for total in batch.totals), default=1)
    for columns in (width, max(width - 1, 0)):
        check_combined(scene, offsets, None, (begins[0], begins[1]), 200, columns, rows)


@pytest.mark.parametrize("length", [2**32 - 2, 2**32 - 7, 2**31 - 1, 2**31])
def test_lengths_that_no_count_holds(length: int) -> None:
    """Entries and tokens of a row are more than 32 bits count: the list is unknown, whatever the sum's lower bits are."""
    scene, offsets, rows = step(EVERY, BATCH)
    scene.tables["lengths"] = spoilt(scene.tables["lengths"], 1, length)
    begins = np.array([0, 40, 80], np.int32), np.array([0, 40, 80], np.int32)
    word, keys, counts = check_combined(scene, offsets, None, begins, 2**32 - 1, 40, rows)
    report = describe(word)
    assert report is not None and (report.code, report.request) == (Fault.LENGTH, 1)
    assert (counts[5:14] == -1).all() and (keys[5:14] == -1).all() and (counts[:5] > 0).all()


def test_as_vllm_combines_them() -> None:
    """combine_topk_swa_indices in its own words: top-k entries from row M * b on, min((pos + 1) // r, topk) of them; then the
    window from row M * b + N on, which begins at token seq_len - gather_len."""
    batch = replace(BATCH, padding=0)
    scene, offsets, rows = step(ENTRIES, batch)
    topk, m, n = 4, 40, 12
    gather_len = [new + min(total - new, WINDOW - 1) for total, new in zip(batch.totals, batch.new, strict=True)]
    begins = (
        np.array([m * b for b in range(3)], np.int64),
        np.array([m * b + n - (total - gather_len[b]) for b, total in enumerate(batch.totals)], np.int64),
    )
    indices, wanted = np.full((rows, topk), -1, np.int32), np.full((rows, 128), -1)
    lengths, row = [], 0
    for b, (total, new) in enumerate(zip(batch.totals, batch.new, strict=True)):
        for pos in range(total - new, total):
            topk_len, window = min((pos + 1) // RATE, topk), min(pos + 1, WINDOW)
            indices[row, :topk_len] = scene.rng.permutation((pos + 1) // RATE)[:topk_len]
            wanted[row, :topk_len] = indices[row, :topk_len] + m * b
            first = m * b + n + pos - window + 1 - (total - gather_len[b])
            wanted[row, topk_len : topk_len + window] = first + np.arange(window)
            lengths.append(topk_len + window)
            row += 1
    word, keys, counts = check_combined(scene, offsets, indices, begins, 3 * m, 128)
    assert describe(word) is None
    np.testing.assert_array_equal(keys, wanted)
    assert counts.tolist() == lengths


@pytest.mark.parametrize("damage", ["entries", "tokens", "rows", "columns", "length"])
def test_what_is_wrong_stays_in_its_rows(damage: str) -> None:
    """Rows outside the buffer, too few columns, a bad length: reported, a count of -1; the other requests' lists are whole."""
    scene, offsets, rows = step(ENTRIES, BATCH)
    begins, buffer_rows = laid(BATCH)
    width, bad = 12, slice(5, 14)  # request 1's rows
    if damage in ("entries", "tokens"):
        begins[damage == "tokens"][1] = -(2**40)
    elif damage == "rows":
        buffer_rows, bad = buffer_rows - 1, slice(14, 16)  # request 2's last token is the last row
    elif damage == "columns":
        width, bad = 11, slice(0, rows)
    else:
        scene.tables["lengths"] = spoilt(scene.tables["lengths"], 1, 3)
    indices = np.tile(np.arange(5, dtype=np.int32), (rows, 1))
    word, keys, counts = check_combined(scene, offsets, indices, begins, buffer_rows, width)
    report = describe(word)
    assert report is not None and report.code is (Fault.LENGTH if damage in ("columns", "length") else Fault.SLOT)
    assert (counts[bad] == -1).any() and (counts[np.r_[0 : bad.start, bad.stop : rows]] >= 0).all()
    assert keys.max() < buffer_rows


def test_a_bad_total_of_few_rows() -> None:
    """A last offset of 0 makes every row padding; what is wrong is reported nevertheless."""
    scene, offsets, rows = step(ENTRIES, replace(BATCH, new=(1, 1, 0), padding=0))
    begins, buffer_rows = laid(BATCH)
    offsets[-1] = 0
    word, _, counts = check_combined(scene, offsets, np.full((rows, 5), -1, np.int32), begins, buffer_rows, 12)
    report = describe(word)
    assert report is not None and (report.code, report.position) == (Fault.ROW_OFFSETS, rows) and not counts.any()
    word, _, _ = check_counted(scene, offsets, np.full((rows, 5), -1, np.int32))
    report = describe(word)
    assert report is not None and (report.code, report.position) == (Fault.ROW_OFFSETS, rows)


def test_counts_of_what_is_wrong() -> None:
    """remap_indices: an id outside the pool, a bad length; lists of nobody."""
    scene, offsets, rows = step(ENTRIES, BATCH)
    scene.tables["page_table"][1, 1] = scene.pages
    scene.tables["lengths"] = spoilt(scene.tables["lengths"], 2, -1)
    indices = np.tile(np.array([0, -1, 4, 1, -1], np.int32), (rows, 1))
    word, _, counts = check_counted(scene, offsets, indices)
    report = describe(word)
    assert report is not None and report.code is Fault.LENGTH
    assert counts.tolist() == [4] * 5 + [-1] * 9 + [-1] * 2 + [0]
