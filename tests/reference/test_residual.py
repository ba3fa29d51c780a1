"""Residual caches and scales with a page table of their own, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvgen import Block, Layout, Paged, Quant
from kvgen.reference import Rows, TableView, append, cache_rows, decode, gather, seal
from kvgen.runtime import Fault, describe
from kvgen.runtime.faults import NO_FAULT
from tests.reference.variants import CANARY, bits, blank, paged

F32 = np.float32
KIVI = Paged(
    dtype="f32",
    kv_heads=1,
    head_dim=2,
    page_size=4,
    layout=Layout(k="page layer token head dim", v="page layer token head dim"),
    k_quant=Quant(dtype="i8", scale_dtype="f32", zero=True, block=Block(token=2, dim=1), residual=2),
)


def rows(*numbers: float) -> np.ndarray:
    """`[T, 1, 2]`: the number, and ten times as much."""
    return np.array([[[n, 10 * n]] for n in numbers], F32)


class Kivi:
    """One request in pages 1 and 3 of four, layer 1 of two."""

    def __init__(self, ids: tuple[int, ...] = (1, 3)) -> None:
        self.length, self.ids = 0, ids
        self.arrays: dict[str, Any] = {
            "k_pool": blank((4, 2, 4, 1, 2)),
            "v_pool": blank((4, 2, 4, 1, 2), F32),
            "k_scales": blank((4, 2, 2, 1, 4), F32),
            "k_tail": blank((2, 1, 2, 1, 2), F32),
            "k_sealed": np.zeros(1, np.int32),
        }
        self.pools = cache_rows(KIVI, self.arrays, 1)

    @property
    def table(self) -> TableView:
        return TableView(KIVI, {"lengths": np.array([self.length]), "page_table": np.array([self.ids])}, 4, 4)

    def step(self, *numbers: float) -> tuple[int, int]:
        """Seal, then append; their error words."""
        new, offsets = [rows(*numbers), rows(*(-n for n in numbers))], np.array([0, len(numbers)])
        words = (
            seal(self.table, self.pools, new, row_offsets=offsets),
            append(self.table, self.pools, new, row_offsets=offsets),
        )
        self.length += len(numbers)
        return words

    def gathered(self) -> list[np.ndarray]:
        """First dims of K and V."""
        before = [np.zeros((self.length, 1, 2), F32) for _ in range(2)]
        offsets = np.array([0, self.length])
        return [out[:, 0, 0] for out in gather(self.table, self.pools, before, row_offsets=offsets).outputs]


def test_first_token_waits() -> None:
    kivi = Kivi()
    assert kivi.step(1) == (NO_FAULT, NO_FAULT)
    assert (bits(kivi.arrays["k_pool"]) == CANARY).all() and (bits(kivi.arrays["k_scales"]) == CANARY).all()
    np.testing.assert_array_equal(kivi.arrays["k_tail"][1, 0, 0], [[1, 10]])
    assert (bits(kivi.arrays["k_tail"][1, 0, 1]) == CANARY).all() and (bits(kivi.arrays["k_tail"][0]) == CANARY).all()
    np.testing.assert_array_equal(kivi.arrays["v_pool"][1, 1, 0], [[-1, -10]])
    assert kivi.pools[0].sealed[0] == 0


def test_a_full_group_is_sealed() -> None:
    """Tokens 1 (from the tail) and 256 (of the step): scale (256 - 1) / 255 = 1, zero -1, codes 0 and 255."""
    kivi = Kivi()
    kivi.step(1)
    assert kivi.step(256) == (NO_FAULT, NO_FAULT)
    assert kivi.arrays["k_sealed"][0] == 2
    np.testing.assert_array_equal(kivi.arrays["k_pool"][1, 1, :2, 0], [[0, 0], [255, 255]])
    np.testing.assert_array_equal(kivi.arrays["k_scales"][1, 1, 0, 0], [1, -1, 10, -1])
    assert (bits(kivi.arrays["k_pool"][1, 1, 2:]) == CANARY).all() and (
        bits(kivi.arrays["k_pool"][1, 0]) == CANARY
    ).all()
    assert (bits(kivi.arrays["k_scales"][1, 1, 1]) == CANARY).all()
    # The step's token was sealed, not put in the tail.
    assert (bits(kivi.arrays["k_tail"][1, 0, 1]) == CANARY).all()
    np.testing.assert_array_equal(kivi.gathered(), [[1, 256], [-1, -256]])


def test_several_groups_and_a_page_boundary() -> None:
    """Six tokens after one: tokens 0 to 5 are sealed, in two pages; token 6 waits in place 0."""
    kivi = Kivi()
    kivi.step(0)
    kivi.step(255, 0, 510, 1, 1, 3)
    assert kivi.arrays["k_sealed"][0] == 6
    np.testing.assert_array_equal(kivi.arrays["k_pool"][1, 1, :, 0, 0], [0, 255, 0, 255])
    np.testing.assert_array_equal(kivi.arrays["k_scales"][1, 1, :, 0, :2], [[1, 0], [2, 0]])
    np.testing.assert_array_equal(kivi.arrays["k_scales"][3, 1, 0, 0, :2], [1, -1])  # constant 1
    np.testing.assert_array_equal(kivi.arrays["k_tail"][1, 0, :, 0, 0][:1], [3])
    np.testing.assert_array_equal(kivi.gathered(), [[0, 255, 0, 510, 1, 1, 3], [0, -255, 0, -510, -1, -1, -3]])


def test_decode_reads_pages_and_tail() -> None:
    """Three tokens, attended to alike: K plays no part in the mean of V; K's own numbers are seen."""
    kivi = Kivi()
    kivi.step(0, 255, 7)
    table = TableView(
        KIVI.model_copy(update={"lengths": "after"}), {"lengths": np.array([3]), "page_table": np.array([[1, 3]])}, 4, 4
    )
    found = decode(table, kivi.pools, np.zeros((1, 1, 2), F32))
    np.testing.assert_allclose(found.out[0, 0], [-(0 + 255 + 7) / 3, -(0 + 2550 + 70) / 3])
    assert found.seen[0] is not None
    np.testing.assert_array_equal(found.seen[0].k[:, 0, 0], [0, 255, 7])


def test_readers_go_by_what_is_sealed() -> None:
    """k_sealed decides, not the length: a token at or past it is the tail's."""
    kivi = Kivi()
    kivi.step(0, 255, 7)
    kivi.arrays["k_sealed"][0] = 0
    kivi.arrays["k_tail"][1, 0, 1] = 9
    np.testing.assert_array_equal(kivi.gathered()[0], [7, 9, 7])


def test_a_group_without_a_page() -> None:
    """Reported at its first token, and lost; nothing is written, and the rows of V are skipped too."""
    kivi = Kivi(ids=(9, 3))
    kivi.step(1)
    words = kivi.step(2)
    for word, position in zip(words, (0, 1), strict=True):
        report = describe(word)
        assert report is not None and (report.code, report.request, report.position) == (Fault.PAGE_ID, 0, position)
    assert (bits(kivi.arrays["k_pool"]) == CANARY).all() and (bits(kivi.arrays["v_pool"]) == CANARY).all()
    assert kivi.arrays["k_sealed"][0] == 2


def test_a_bad_length_seals_nothing() -> None:
    kivi = Kivi()
    kivi.length = -1
    report = describe(kivi.step(1, 2)[0])
    assert report is not None and (report.code, report.position) == (Fault.LENGTH, 0)
    assert (bits(kivi.arrays["k_pool"]) == CANARY).all() and kivi.arrays["k_sealed"][0] == 0


def test_requests_without_rows_keep_what_they_have() -> None:
    kivi = Kivi()
    kivi.arrays["k_sealed"][0] = 77
    assert seal(kivi.table, kivi.pools, [rows()] * 2, row_offsets=np.array([0, 0])) == NO_FAULT
    assert kivi.arrays["k_sealed"][0] == 77


# --- scales with a table of their own -------------------------------------------------------------------------------------

OWN = paged(kv_heads=1, quant=Quant(dtype="i8", scale_dtype="f32", own_table=True))


def own(table: list[list[int]], scales: list[list[int]], lengths: list[int]) -> tuple[TableView, tuple[Rows, ...], Any]:
    arrays = {"pool": blank((4, 2, 1, 2, 1, 4)), "scales": blank((6, 2, 1, 2, 1, 1), F32)}
    tables = {"lengths": np.array(lengths), "page_table": np.array(table), "scales_page_table": np.array(scales)}
    return TableView(OWN, tables, 4, 2, scale_pages=6), cache_rows(OWN, arrays, 0), arrays


def test_scales_are_where_their_table_says() -> None:
    """Values in page 1, scales in page 5; the page of scales with the values' number is a decoy and stays as it is."""
    view, pools, arrays = own([[1]], [[5]], [0])
    new = [np.array([[[254, 2, 0, 0]]], F32)] * 2
    assert append(view, pools, new, row_offsets=np.array([0, 1])) == NO_FAULT
    np.testing.assert_array_equal(arrays["scales"][5, :, 0, 0, 0, 0], [2, 2])
    assert (bits(arrays["scales"][:5]) == CANARY).all() and (bits(arrays["pool"][[0, 2, 3]]) == CANARY).all()
    found = gather(view, pools, [np.zeros((1, 1, 4), F32)] * 2, row_offsets=np.array([0, 1]))
    np.testing.assert_array_equal(found.outputs[0][0, 0], [254, 2, 0, 0])
    out = decode(view, pools, np.zeros((1, 1, 4), F32)).out
    np.testing.assert_array_equal(out[0, 0], [254, 2, 0, 0])


@pytest.mark.parametrize(
    ("table", "scales", "code"),
    [
        ([[1]], [[6]], Fault.PAGE_ID),
        ([[1]], [[-1]], Fault.PAGE_ID),
        ([[4]], [[5]], Fault.PAGE_ID),
        ([[1]], [[]], Fault.POSITION),
    ],
)
def test_a_bad_page_of_scales_skips_the_row(table: list[list[int]], scales: list[list[int]], code: Fault) -> None:
    view, pools, arrays = own(table, scales, [0])
    report = describe(append(view, pools, [np.ones((1, 1, 4), F32)] * 2, row_offsets=np.array([0, 1])))
    assert report is not None and (report.code, report.position) == (code, 0)
    assert all((bits(a) == CANARY).all() for a in arrays.values())
    found = gather(view, pools, [np.zeros((1, 1, 4), F32)] * 2, row_offsets=np.array([0, 1]))
    assert np.isnan(found.outputs[1]).all() and found.failed[0]
    attended = decode(view, pools, np.zeros((1, 1, 4), F32))
    report = describe(attended.errors)
    assert report is not None and report.code == (code if code is Fault.PAGE_ID else Fault.LENGTH)
    assert np.isnan(attended.out).all()


def test_slots_name_no_page_of_scales() -> None:
    view, pools, _ = own([[1]], [[5]], [0])
    with pytest.raises(ValueError, match="scales_page_table"):
        append(view, pools, [np.ones((1, 1, 4), F32)] * 2, slots=np.array([0]))
