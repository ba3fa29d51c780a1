"""to_csr against the oracle; there and back, long lists, lengths that cannot be."""

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
from tests.support.harness import index_name, offsets_of, optimized, package
from tests.support.memory import rows_array
from tests.support.page_lists import (
    BATCH,
    SETS,
    TO_CSR,
    TO_DENSE,
    check_to_csr,
    check_to_dense,
    having,
    long,
    spoil,
)
from tests.support.step_lengths import go, scene_of, vector


@pytest.mark.parametrize("name", TO_CSR)
@settings(max_examples=5)
@given(data=st.data())
def test_to_csr(name: str, data: Any) -> None:
    """Lists with just the room, with more, and with too little."""
    kernels = SETS[name]
    batch = data.draw(batches(kernels))
    scene = scene_of(kernels, batch)
    offsets = offsets_of(batch.new, index_name(kernels, "to_csr"), batch.leading)
    pages = sum(map(len, scene.entries))
    room = data.draw(st.sampled_from((pages, pages + 5, max(pages - 1, 0))))
    op, last = data.draw(st.sampled_from(having(kernels, "to_csr", "wide"))), data.draw(st.booleans())
    word, lists = check_to_csr(scene, op, room, offsets, last=last)
    assert (describe(word) is None) == (room >= pages)
    if room >= pages and op == "to_csr":
        assert lists[0][:pages].tolist() == [page[0] for request in scene.entries for page in request]
    if kernels.cache.lengths == "before":
        check_to_csr(scene, op, room, None)


@pytest.mark.parametrize("op", ["to_dense", "to_csr"])
def test_there_and_back(op: str) -> None:
    """A request's pages in the other form say the same tokens."""
    batch = replace(PLAIN, totals=(0, 33, 16, 1), new=(0, 1, 2, 1))
    scene = scene_of(SETS["lists_flashinfer" if op == "to_dense" else "lists_dense"], batch)
    offsets = offsets_of(batch.new, "u32")
    if op == "to_csr":
        _, (indices, indptr, last) = check_to_csr(scene, op, 7, offsets)
        assert indptr.tolist() == [0, 0, 3, 4, 5] and last.tolist() == [0, 1, 16, 1]
        assert indices[:5].tolist() == [page[0] for request in scene.entries for page in request]
    else:
        check_to_dense(scene, op, 4, None)
        out, lengths = np.zeros((4, 4), np.int32), np.zeros(4, np.int32)
        go(scene, op, page_table=out, lengths=lengths)
        assert lengths.tolist() == [0, 33, 16, 1]
        assert out.tolist() == [[p[0] for p in pages] + [scene.pages] * (4 - len(pages)) for pages in scene.entries]


@pytest.mark.parametrize(("requests", "pages"), [(1, 1700), (9, 600), (9, 512), (1030, 3)])
def test_many_pages_in_one_launch(requests: int, pages: int) -> None:
    """Requests that several warps share, and batches that several blocks do."""
    scene, counts = long("lists_dense", requests, pages)
    _, (indices, indptr, _) = check_to_csr(scene, "to_csr", int(counts.sum()), None)
    table = scene.tables["page_table"]
    np.testing.assert_array_equal(indptr, np.cumsum([0, *counts]))
    np.testing.assert_array_equal(indices, np.concatenate([row[:n] for row, n in zip(table, counts, strict=True)]))
    scene, _ = long("lists_flashinfer", requests, pages)
    check_to_dense(scene, "to_dense", pages + 1, None)


@pytest.mark.parametrize("counts", [(3, 512), (8, 512), (1, 505), (7, 1024), (5, 0)])
def test_the_last_ids_of_a_warp(counts: tuple[int, ...]) -> None:
    """Slices that begin inside a sector, whose last ids are the next warp's."""
    scene, _ = long("lists_dense", 2, max(counts), counts)
    for op in ("to_csr", "wide"):
        _, (indices, _, _) = check_to_csr(scene, op, sum(counts), None)
        assert indices.tolist() == [
            int(x) for row, n in zip(scene.tables["page_table"], counts, strict=True) for x in row[:n]
        ]


@pytest.mark.parametrize("value", [-1, 2**31 - 1, 500, 21_000])
@pytest.mark.parametrize("name", TO_CSR)
def test_bad_lengths(name: str, value: int) -> None:
    """A length that the table has no pages for: the request has none, the others all of theirs."""
    scene = scene_of(SETS[name], BATCH)
    spoil(scene, "lengths", 1, value)
    offsets = offsets_of(BATCH.new, scene.cache.lengths_dtype)
    words = [check_to_csr(scene, "to_csr", 40, offsets)[0]]
    words += [check_to_dense(scene, "to_dense", 21, offsets)] if name in TO_DENSE else []
    for report in map(describe, words):
        assert report is not None and (report.code, report.request) == (Fault.LENGTH, 1)


def test_one_launch_each() -> None:
    batch = replace(PLAIN, totals=(20, 3), new=(1, 1))
    for name, op in (("lists_dense", "to_csr"), ("lists_flashinfer", "to_dense"), ("lists_indirect", "to_csr")):
        scene = scene_of(SETS[name], batch)
        outs = {
            "to_csr": {"page_indices": np.zeros(40, np.int32), "page_indptr": np.zeros(3, np.int32)},
            "to_dense": {"page_table": np.zeros((2, 3), np.int32)},
        }[op]
        with machine(mode="check") as log:
            getattr(package(scene.kernels), op)(package(scene.kernels).Cache(**scene.arguments())[0], **outs)
        assert [done.entry for done in log.launches] == [f"{name}_{op}"]


def test_sectors() -> None:
    """A list is written a sector once, whatever lies where, but where slices meet; rows of a table so too."""
    scene, counts = long("lists_dense", 16, 1700)
    total = int(counts.sum())
    lists = [vector(total, "i32")[0], np.zeros(17, np.int32)]
    with optimized(scene.kernels) as generated, machine(mode="check") as log:
        generated.to_csr(generated.Cache(**scene.arguments())[0], *lists)
    found = log.launches[0].counters.per_buffer
    # The counters take a lane's n-th store at a place with the other lanes' n-th: one that sits out the first is a trip late.
    assert found["page_indices"].store_sectors <= 1.02 * (-(-total * 4 // 32) + 16)
    assert found["page_table"].load_sectors <= 1.25 * total * 4 / 32 + 2 * 16  # the list's sectors are not the table's
    scene, counts = long("lists_flashinfer", 16, 1700)
    out = rows_array(16, (1704,), "i32", strided=False)[0]
    with machine(mode="check") as log:
        package(scene.kernels).to_dense(package(scene.kernels).Cache(**scene.arguments())[0], out)
    assert log.launches[0].counters.per_buffer["page_table"].store_sectors == out.nbytes // 32


def test_nobody() -> None:
    """Of an empty batch to_csr writes where its first request would begin; to_dense has nothing to write."""
    check_to_csr(scene_of(SETS["lists_dense"], PLAIN), "to_csr", 0, None)
    check_to_dense(scene_of(SETS["lists_flashinfer"], PLAIN), "to_dense", 3, None)
    check_to_dense(scene_of(SETS["lists_flashinfer"], replace(PLAIN, totals=(3,), new=(1,))), "to_dense", 0, None)
