"""Page tables: every form answers which page holds a token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvgen import CSR, Continuous, Dense, Indirect, Layout, Mapped, Paged, PerKV, Ragged, Ring
from kvgen.reference import TableView
from kvgen.reference.tables import RowRange, bad_total, request_of_row
from kvgen.runtime import Fault

PAGES = 10


def view(table: Any, page_size: int = 4, counts: Any = "before", layout: Any = None, **arrays: Any) -> TableView:
    extra = {"layout": layout} if layout else {}
    cache = Paged(dtype="f32", kv_heads=1, head_dim=4, page_size=page_size, table=table, lengths=counts, **extra)
    return TableView(cache, {n: np.array(a) for n, a in arrays.items()}, PAGES, page_size)


def test_dense() -> None:
    found = view(Dense(), page_table=[[3, 9, 10]], lengths=[5])
    assert found.requests == 1 and found.length(0) == 5
    assert found.page(0, 1) == (9, 9)
    assert found.page(0, 2) is Fault.PAGE_ID
    assert found.page(0, 3) is Fault.POSITION
    assert found.holds(0, 12) and not found.holds(0, 13)


def test_ids_are_checked_after_scaling() -> None:
    found = view(Dense(dtype="i32", id_multiplier=3), page_table=[[3, 4, -1]], lengths=[0])
    assert found.page(0, 0) == (9, 9)
    assert found.page(0, 1) is Fault.PAGE_ID
    assert found.page(0, 2) is Fault.PAGE_ID


def test_lengths_that_are_none() -> None:
    found = view(Dense(), page_table=[[0], [0], [0]], lengths=np.array([-1, 2**32 - 1, 2**32 - 2]))
    assert [found.length(b) for b in range(3)] == [None, None, 2**32 - 2]


def test_csr() -> None:
    found = view(CSR(), page_indices=[5, 6, 7, 1], page_indptr=[0, 1, 3, 2, 9], lengths=[0] * 4)
    assert found.page(1, 1) == (7, 7)
    assert found.page(0, 1) is Fault.POSITION
    assert found.page(2, 0) is Fault.TABLE and found.page(3, 0) is Fault.TABLE
    assert found.holds(1, 8) and not found.holds(1, 9) and not found.holds(2, 1) and found.holds(2, 0)


def test_csr_last_page() -> None:
    found = view(
        CSR(last_page_len=True),
        counts="after",
        page_indices=[5, 6, 7],
        page_indptr=[0, 0, 3, 1],
        last_page_len=[0, 2, 1],
    )
    assert [found.length(b) for b in range(3)] == [0, 10, None]


def test_per_kv() -> None:
    layout = Layout(kv="page layer token head dim")
    found = view(PerKV(), layout=layout, page_table=[[[1, 2], [3, 99]]], lengths=[0])
    assert found.page(0, 0) == (1, 3)
    assert found.page(0, 1) is Fault.PAGE_ID


def test_indirect() -> None:
    found = view(Indirect(), page_size=1, req_to_token=[[7, 8], [5, 6]], request_ids=[1, 2, -1], lengths=[0] * 3)
    assert found.page(0, 1) == (6, 6)
    assert found.page(0, 2) is Fault.POSITION
    assert found.page(1, 0) is Fault.TABLE and found.page(2, 0) is Fault.TABLE
    assert found.holds(0, 2) and not found.holds(0, 3) and not found.holds(1, 1)


def test_mapped() -> None:
    found = view(Mapped(id_multiplier=2), page_table=[[1, 2], [4, 5]], idx_mapping=[1, 0, 2, -1], lengths=[0] * 4)
    assert found.requests == 4
    assert found.page(0, 0) == (8, 8) and found.page(1, 1) == (4, 4)
    assert found.page(0, 1) is Fault.PAGE_ID and found.page(0, 2) is Fault.POSITION
    assert found.page(2, 0) is Fault.TABLE and found.page(3, 0) is Fault.TABLE
    assert found.holds(0, 8) and not found.holds(0, 9) and not found.holds(2, 1) and found.holds(2, 0)


def test_ring() -> None:
    found = view(Ring(window=5), page_table=[[7, 8]], lengths=[0])
    assert [found.page(0, i) for i in range(4)] == [(7, 7), (8, 8)] * 2
    assert found.first_token(5) == 0 and found.first_token(9) == 4
    assert found.holds(0, 8) and found.holds(0, 9)
    # Tokens 6 to 10 lie in pages 1 and 2; 3 to 7 in 0 and 1; a window of 6 over 3 to 8 needs three pages.
    assert found.holds(0, 11)
    assert not view(Ring(window=6), page_table=[[7, 8]], lengths=[0]).holds(0, 9)


def test_continuous() -> None:
    cache = Continuous(dtype="f32", kv_heads=1, head_dim=4, max_tokens=6)
    found = TableView(cache, {"page_table": np.array([2, 10]), "lengths": np.array([1, 1])}, PAGES, 6)
    assert found.page(0, 0) == (2, 2) and found.page(0, 1) is Fault.POSITION and found.page(1, 0) is Fault.PAGE_ID
    assert found.holds(0, 6) and not found.holds(0, 7)


def test_ragged() -> None:
    """Rows [1, 4), none, none, and offsets that decrease or leave the ten rows."""
    cache = Ragged(dtype="f32", kv_heads=1, head_dim=4)
    found = TableView(cache, {"kv_offsets": np.array([1, 4, 4, 2, 10, 11, -1])}, PAGES, 1)
    assert found.requests == 6
    assert [found.length(b) for b in range(6)] == [3, 0, None, 8, None, None]
    assert found.page(0, 2) == (3, 3) and found.page(3, 7) == (9, 9)
    assert found.page(0, 3) is Fault.POSITION and found.page(1, 0) is Fault.POSITION
    assert all(found.page(b, 0) is Fault.TABLE for b in (2, 4, 5))
    assert found.holds(0, 3) and not found.holds(0, 4) and found.holds(2, 0) and not found.holds(2, 1)


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        ([0, 2, 2, 5], [(0, 0, 2), (0, 0, 2), (2, 2, 5), (2, 2, 5), (2, 2, 5), None]),
        ([1, 3], [None, (0, 1, 3), (0, 1, 3), None, None, None]),
        ([0], [None] * 6),
    ],
)
def test_request_of_row(offsets: list[int], expected: list[tuple[int, int, int] | None]) -> None:
    found = [request_of_row(np.array(offsets), row, 6) for row in range(6)]
    assert found == [RowRange(*e, True) if e else None for e in expected]


@pytest.mark.parametrize(
    "offsets", [[0, 3, 1, 9], [0, 3, 100, 9], [0, 3, 8, 6], [100, 3, 5, 9], [0, 3, 5, 10], [0, -1, 5, 9]]
)
def test_contradictory_offsets(offsets: list[int]) -> None:
    """One offset out of order: no row is taken for another request's without a fault."""
    rows = 9
    honest = {0: range(0, 3), 1: range(3, 5), 2: range(5, 9)}
    bad = 0
    for row in range(rows):
        found = request_of_row(np.array(offsets), row, rows)
        if found is None or not found.valid:
            bad += 1
        elif found.b in honest:
            assert found.end <= rows and found.begin <= row < found.end
    assert bad or bad_total(np.array(offsets), rows)


def test_bad_total() -> None:
    assert bad_total(np.array([0, 4]), 3) and bad_total(np.array([0, 4, 2]), 9) and bad_total(np.array([0, -1]), 3)
    assert not bad_total(np.array([0, 4]), 4) and not bad_total(np.array([0]), 0)
