"""list_keys against the oracle and engines' rules: windows, entries of several tokens, rings; what is wrong stays in its row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.reference import mla_decode, mla_decode_sparse
from kvgen.reference.mla_decode import Listed
from kvgen.runtime import Fault, describe
from tests.support.batches import batches
from tests.support.key_lists import BATCH, ENTRIES, RING, check_list_keys, step
from tests.support.slots import spoilt

RATE = ENTRIES.kv.entry_tokens


@pytest.mark.parametrize("kernels", [ENTRIES, RING], ids=lambda k: k.name)
@settings(max_examples=5)
@given(data=st.data())
def test_list_keys(kernels: Any, data: Any) -> None:
    """Every row's list, in columns that it fills and in more, in steps of every phase; in a ring, rows of long prompts have lost
    what the step took over."""
    batch = data.draw(batches(kernels))
    scene, offsets, rows = step(kernels, batch)
    most = max([1, *(n // RATE for n in batch.totals)]) if kernels is ENTRIES else 10
    word, _, counts = check_list_keys(scene, rows, offsets, most + data.draw(st.sampled_from((0, 1, 300))))
    assert describe(word) is None or kernels is RING
    assert (counts[: batch.leading] == 0).all() and (counts[rows - batch.padding :] == 0).all()


def test_a_window_as_vllm_says_it() -> None:
    """Positions max(pos - w + 1, 0) to pos through the table; length min(pos + 1, w); the tail -1."""
    scene, offsets, rows = step(RING, replace(BATCH, new=(1, 1, 1), padding=0))
    _, keys, counts = check_list_keys(scene, rows, offsets, 16)
    table = scene.tables["page_table"].astype(np.int64)
    for b, pos in enumerate(total - 1 for total in scene.batch.totals):
        positions = np.arange(max(pos - 10 + 1, 0), pos + 1)
        wanted = table[b, positions // 3 % table.shape[1]] * 3 + positions % 3
        assert counts[b] == min(pos + 1, 10)
        np.testing.assert_array_equal(keys[b], [*wanted, *[-1] * (16 - len(wanted))])


def test_lists_see_what_attention_over_the_cache_sees() -> None:
    """In float64, attention over the lists is attention over the request's entries, row by row."""
    scene, offsets, rows = step(ENTRIES, replace(BATCH, new=(1, 1, 1), padding=0))
    scene.fill(scene.batch.totals)
    _, keys, counts = check_list_keys(scene, rows, offsets, 16)
    q, (latent,) = scene.values(rows, 1, 16), scene.rows()
    whole = mla_decode(scene.view, latent, q, scale=0.5)
    listed = mla_decode_sparse(
        [Listed(latent, scene.pages, scene.tokens, keys, counts)], q, v_dim=ENTRIES.kv.latent_part, scale=0.5
    )
    np.testing.assert_array_equal(listed.out, whole.out)


@pytest.mark.parametrize("damage", ["page", "length", "offsets", "columns"])
def test_what_is_wrong_stays_in_its_rows(damage: str) -> None:
    """Their count is -1, so that attention gives NaN; the other requests' lists are whole."""
    scene, offsets, rows = step(ENTRIES, BATCH)
    width, bad = 12, slice(5, 14)  # request 1's rows
    if damage == "page":
        scene.tables["page_table"][1, 1] = scene.pages
    elif damage == "length":
        scene.tables["lengths"] = spoilt(scene.tables["lengths"], 1, -1)
    elif damage == "offsets":
        offsets, bad = spoilt(offsets, 2, 4), slice(0, 16)  # no request beside it can be told from it
    else:
        width = 7  # request 1 has rows with 8 to 10 entries
    word, keys, counts = check_list_keys(scene, rows, offsets, width)
    report = describe(word)
    codes = {"page": Fault.PAGE_ID, "offsets": Fault.ROW_OFFSETS}
    assert report is not None and report.code is codes.get(damage, Fault.LENGTH)
    assert (counts[bad] == -1).any() and (counts[np.r_[0 : bad.start, bad.stop : rows]] >= 0).all()
    if damage != "page":
        assert (keys[counts == -1] == -1).all()


def test_a_bad_total_of_few_rows() -> None:
    """A last offset of 0 makes every row padding; what is wrong is reported nevertheless."""
    scene, offsets, rows = step(ENTRIES, replace(BATCH, new=(1, 1, 0), padding=0))
    offsets[-1] = 0
    word, _, counts = check_list_keys(scene, rows, offsets, 12)
    report = describe(word)
    assert report is not None and (report.code, report.position) == (Fault.ROW_OFFSETS, rows) and not counts.any()


def test_a_bad_page_of_a_window() -> None:
    """Whichever column of the ring's table it is in, and so whichever lane of the row's warp finds it: the row's count is -1."""
    for column in range(4):
        scene, offsets, rows = step(RING, replace(BATCH, new=(1, 1, 1), padding=0))
        scene.tables["page_table"][1, column] = scene.pages
        word, _, counts = check_list_keys(scene, rows, offsets, 16)
        report = describe(word)
        lost = report is not None and report.code is Fault.PAGE_ID
        assert (counts[1] == -1) == lost and (counts[[0, 2]] >= 0).all()
        assert lost or column > 2, "a window of 10 tokens lies in at least three pages"
