"""The oracles themselves, on examples worked out by hand."""

from __future__ import annotations

import math

import numpy as np

from kvgen import Dense, Paged, Ring
from kvgen.reference import FaultLog, Rows, TableView, append, attend, decode, gather
from kvgen.reference.elements import Elements
from kvgen.reference.segments import Plain
from kvgen.runtime import Fault, describe
from kvgen.runtime.faults import NO_FAULT

AXES = "page token head dim"


def small(lengths: list[int], table: list[list[int]], *, after: bool = False, window: int = 0) -> TableView:
    form = Ring(window=window, dtype="i32") if window else Dense(dtype="i32")
    cache = Paged(dtype="f32", kv_heads=1, head_dim=2, page_size=2, table=form, lengths="after" if after else "before")
    return TableView(cache, {"lengths": np.array(lengths), "page_table": np.array(table)}, 4, 2)


def pools() -> tuple[Rows, Rows]:
    k, v = (np.zeros((4, 2, 1, 2), np.float32) for _ in range(2))
    return Rows([Plain(Elements(k, AXES, heads=1, dim=2))]), Rows([Plain(Elements(v, AXES, heads=1, dim=2))])


def rows(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)[:, None, None] + np.zeros((1, 1, 2), np.float32)


def test_append_before_and_after_agree() -> None:
    found = []
    for lengths, after in (([1, 0], False), ([3, 1], True)):
        k, v = pools()
        word = append(
            small(lengths, [[3, 1], [0, 2]], after=after),
            (k, v),
            (rows(1, 2, 3), rows(4, 5, 6)),
            row_offsets=np.array([0, 2, 3]),
        )
        assert word == NO_FAULT
        found.append((k.logical()[..., 0, 0], v.logical()[..., 0, 0]))
    expected = [[3, 0], [2, 0], [0, 0], [0, 1]]  # request 0: tokens 1 and 2; request 1: token 0
    for keys, values in found:
        np.testing.assert_array_equal(keys, expected)
        np.testing.assert_array_equal(values, [[6, 0], [5, 0], [0, 0], [0, 4]])


def test_append_reports_the_first_position() -> None:
    k, v = pools()
    table = small([0, 3], [[1, -1], [2, 3]])
    word = append(table, (k, v), (rows(1, 2, 3, 4, 5),) * 2, row_offsets=np.array([0, 3, 5]))
    report = describe(word)
    assert report is not None
    assert (report.code, report.request, report.position) == (Fault.PAGE_ID, 0, 2)  # before POSITION of request 1 at 4
    np.testing.assert_array_equal(k.logical()[..., 0, 0], [[0, 0], [1, 2], [0, 0], [0, 4]])


def test_append_in_a_ring_keeps_the_newest() -> None:
    """Six tokens through two pages of two: tokens 0 and 1 give way to 4 and 5."""
    k, v = pools()
    append(small([0], [[1, 2]], window=3), (k, v), (rows(1, 2, 3, 4, 5, 6),) * 2, row_offsets=np.array([0, 6]))
    np.testing.assert_array_equal(k.logical()[..., 0, 0], [[0, 0], [5, 6], [3, 4], [0, 0]])


def test_append_slots() -> None:
    k, v = pools()
    word = append(small([0], [[0]]), (k, v), (rows(1, 2, 3, 4),) * 2, slots=np.array([7, -1, 8, 2]))
    report = describe(word)
    assert report is not None and (report.code, report.position) == (Fault.SLOT, 2)
    np.testing.assert_array_equal(k.logical()[..., 0, 0], [[0, 0], [4, 0], [0, 0], [0, 1]])


def test_append_bad_length() -> None:
    k, v = pools()
    word = append(small([1], [[0]], after=True), (k, v), (rows(1, 2),) * 2, row_offsets=np.array([0, 2]))
    report = describe(word)
    assert report is not None and (report.code, report.request, report.position) == (Fault.LENGTH, 0, 0)
    assert not k.logical().any()


def test_gather() -> None:
    k, v = pools()
    for page in range(4):
        for token in range(2):
            k.write(page, token, rows(10 * page + token)[0])
    before = [np.full((5, 1, 2), -1, np.float32) for _ in range(2)]
    found = gather(
        small([0, 0], [[3, 1], [2, 9]]),
        (k, v),
        before,
        row_offsets=np.array([0, 2, 4]),
        starts=np.array([1, 1]),
    )
    np.testing.assert_array_equal(found.outputs[0][:, 0, 0], [31, 10, 21, np.nan, -1])
    np.testing.assert_array_equal(found.failed, [False, False, False, True, False])
    report = describe(found.errors)
    assert report is not None and (report.code, report.request, report.position) == (Fault.PAGE_ID, 1, 2)


def test_attend_by_hand() -> None:
    """Scores ln 1 and ln 3: weights 1/4 and 3/4; two query heads share the one kv head."""
    k = np.array([[[0.0]], [[math.log(3)]]])
    v = np.array([[[4.0, 0.0]], [[8.0, 4.0]]])
    out, lse = attend(np.array([[1.0], [0.0]]), k, v, 1.0)
    np.testing.assert_allclose(out, [[7, 3], [6, 2]])
    np.testing.assert_allclose(lse, [math.log(4), math.log(2)])


def test_attend_heads() -> None:
    """Query head h reads kv head h // group."""
    v = np.arange(2, dtype=float).reshape(1, 2, 1)
    out, _ = attend(np.zeros((6, 1)), np.zeros((1, 2, 1)), v, 1.0)
    np.testing.assert_array_equal(out[:, 0], [0, 0, 0, 1, 1, 1])


def test_decode() -> None:
    k, v = pools()
    for token, value in enumerate((1.0, 3.0, 100.0)):
        v.write(1 + token // 2, token % 2, rows(value)[0])
    q = np.zeros((4, 1, 2), np.float32)
    found = decode(small([1, 5, -1], [[1, 2], [1, 2], [1, 2]]), (k, v), q)
    np.testing.assert_array_equal(found.out[:, 0, 0], [2, np.nan, np.nan, 0])
    np.testing.assert_allclose(found.lse[:, 0], [math.log(2), np.nan, np.nan, -np.inf])
    report = describe(found.errors)
    assert report is not None and (report.code, report.request, report.position) == (Fault.LENGTH, 1, 6)


def test_decode_empty_and_offsets() -> None:
    k, v = pools()
    v.write(1, 0, rows(5)[0])
    table = small([0, 1], [[3, 3], [1, 2]], after=True)
    q = np.zeros((3, 1, 2), np.float32)
    assert not decode(table, (k, v), q[:1]).out.any()
    found = decode(table, (k, v), q, row_offsets=np.array([0, 0, 1]))
    np.testing.assert_array_equal(found.out[:, 0, 0], [5, 0, 0])
    assert found.errors == NO_FAULT
    twice = decode(table, (k, v), q, row_offsets=np.array([0, 0, 2]))
    assert np.isnan(twice.out[:2]).all() and not twice.out[2].any()
    report = describe(twice.errors)
    assert report is not None and (report.code, report.request, report.position) == (Fault.ROW_OFFSETS, 1, 0)


def test_decode_window() -> None:
    """A ring of window 3 after 5 tokens: tokens 2, 3 and 4."""
    k, v = pools()
    for token in range(2, 5):
        v.write([1, 2][token // 2 % 2], token % 2, rows(token)[0])
    found = decode(small([5], [[1, 2]], after=True, window=3), (k, v), np.zeros((1, 1, 2), np.float32))
    np.testing.assert_allclose(found.out[0, 0], 3)


def test_word_is_the_smallest_report() -> None:
    log = FaultLog()
    assert log.word == NO_FAULT
    log.add(Fault.TABLE, 3, 7)
    log.add(Fault.PAGE_ID, 2**30, 7)
    log.add(Fault.SLOT, 3, 7)
    assert str(describe(log.word)).startswith("SLOT")
    log.add(Fault.TABLE, 0, 6)
    report = describe(log.word)
    assert report is not None and (report.position, report.request) == (6, 0)
