"""benchmarks/beside_fa3.py without anybody's cubins: what it says of kernels that are not there, and its count of tiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import beside_fa3
from kvgen.cycles.core import Role
from tests.compile.test_sass import needs_tool
from tests.cycles.programs import ROUND, program


def test_without_cubins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert beside_fa3.main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.count("| no fa3_") == len(beside_fa3.PEERS) and "| FA3 full | 64 | no fa3_d64_full.cubin |" in said
    assert said.count("\n|") == len(beside_fa3.PEERS) + 1  # and no set that nobody has named


@pytest.mark.campaign
@needs_tool
def test_a_set_beside_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """64 dims: a tile takes between what its products take and twice that, the copying warps included."""
    assert beside_fa3.main([str(tmp_path), "gpt_oss_20b/extend"]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "gpt_oss_20b/extend_sm_90a" in line)
    _, _, dims, tile, cycles, products, _, _ = (cell.strip() for cell in row.split("|"))
    assert (dims, tile, products) == ("64", "128 x 128", "1024") and 1024 < int(cycles) < 2048


def test_the_slowest_role_by_its_tiles() -> None:
    slow, fast = (Role(name, program(f"[-:-:-:{n}] NOP"), 1) for name, n in (("slow", 90), ("fast", 40)))
    assert beside_fa3.settled((slow, fast), {}, ROUND, {"slow": 3}) == pytest.approx(40, abs=1)
