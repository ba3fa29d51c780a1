"""benchmarks/strangers.py without anybody's cubins: the chunks that others' schedulers make, and what the table says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import strangers
from benchmarks.strangers import Predicted, Row, as_they_come, flashmla_chunks, predict, rows, table
from kvgen.cycles.core import Mbarrier
from kvgen.cycles.flow import blocks
from tests.cycles.test_told import COPIES, FIRST, LISTING, MBARRIERS, SECOND

DEEP = {**MBARRIERS, "free": Mbarrier(8, ahead=16)}  # a ring that no latency empties


def test_flashmlas_parts() -> None:
    # 3 requests of 10, 10 and 20 blocks, five more each: 55, so 28 and 5 for each of two parts. The first takes 15 and 15 and has
    # three left, too few for a beginning; the second 20.
    assert flashmla_chunks([10, 10, 20], 2) == ((640, 640), (1280,))
    # One request in two: 15 and 5 of its 20 blocks are left to each after the beginning.
    assert flashmla_chunks([20], 2) == ((13 * 64,), (7 * 64,))


def test_chunks_go_to_who_is_free() -> None:
    assert as_they_come([5, 4, 3, 3], 2) == ((5, 3), (4, 3))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_a_rows_chunks_are_its_work(row: Row) -> None:
    """As many slots as the GPU's multiprocessors have for blocks, or less; a tile's bytes and the whole's agree."""
    assert 0 < len(row.chunks) <= strangers.SMS * row.blocks
    assert sum(part.warps for part in row.structure.parts) in (4, 8, 9, 12)
    if row.unit == "GB/s":
        tokens = sum(map(sum, row.chunks))
        assert tokens * row.nbytes / row.structure.tile == pytest.approx(row.done, rel=0.05)


def test_the_page_leaves_no_row_out() -> None:
    page = (Path(__file__).parents[1] / "docs" / "cycles.md").read_text(encoding="utf-8")
    for row in rows():
        figure = f"{'>= ' if row.at_least else ''}{row.published:g} {row.unit}"
        assert page.count(f"| {row.name} | {row.device} | {figure} | ") == 1
        assert f"| {row.structure.cubin}" in page or f", {row.structure.cubin} |" in page


def _row(**other: object) -> Row:
    given = {
        "name": "two that take turns",
        "structure": strangers.Structure("none", (FIRST, SECOND, COPIES), 64, mbarriers=DEEP),
        "device": "H100 SXM",
        "published": 100.0,
        "unit": "TFLOP/s",
        "source": "",
        "chunks": ((64 * 1000,),) * 132,
        "nbytes": 0.0,
        "done": 2 * 64 * 256 * 16 * 2 * 1000 * 132,
    }
    return Row(**(given | other))  # type: ignore[arg-type]  # of a test's row


def test_products_alone() -> None:
    # Nothing but products: 132 x 4096 operations a cycle, by the clock of tensor cores, 1.6 GHz; of 160 us two are the beginning.
    found = predict(_row(), blocks(LISTING))
    assert found.values[1] == pytest.approx(132 * 4096 * 1.6e-3, rel=0.03) and found.tensor == pytest.approx(
        1, rel=0.01
    )
    assert found.values[0] < found.values[1] < found.values[2]
    assert found.error == pytest.approx(found.values[1] / 100 - 1)


def test_a_locked_clock() -> None:
    found = predict(_row(clock=0.8), blocks(LISTING))
    assert found.values[1] == pytest.approx(132 * 4096 * 0.8e-3, rel=0.03)


def test_no_prediction_is_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = strangers.Structure("none", (FIRST,), 64, mbarriers={"full": Mbarrier(1)})
    assert "no prediction: " in table([predict(_row(structure=wrong), blocks(LISTING))])
    assert strangers.main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("no prediction: no ") == len(rows())


def test_loops_to_tell_of() -> None:
    found = strangers.loops_of(blocks(LISTING)).splitlines()
    assert found[0] == "loop at 0x0010: 5 instructions, 1 UTMALDG"
    assert found[3].split() == ["0x0040", "UTMALDG.4D", "[UR8],", "[UR18]"]
    assert found[4] == "loop at 0x0070: 9 instructions, 1 HGMMA"
    assert len(found) == 1 + len(COPIES.meets) + 1 + len(FIRST.meets)
    assert strangers.loops_of(()) == "no loop that computes, copies or loads"


def test_the_table() -> None:
    made = table(
        [
            Predicted(_row(), (90.0, 120.0, 150.0), tile=256, ends=1000, tensor=0.5),
            Predicted(_row(unit="us", at_least=True), (50.0, 80.0, 99.0)),
            Predicted(_row(unit="us", at_least=True), (50.0, 180.0, 199.0)),
        ]
    )
    assert (
        "| 100 TFLOP/s | 120 | 90 | 150 | +20 % | 256 | 1000 | 50 % |" in made
        and "| >= 100 us | 80 | 50 | 99 | -20 % |" in made
        and "| >= 100 us | 180 | 50 | 199 | +80 %, bound kept |" in made
    )
    assert "median error of throughput: 20 % of 1 rows\n" in made
    assert "median error of latency: 50 % of 2 rows; 20 % without bounds that are kept" in made
