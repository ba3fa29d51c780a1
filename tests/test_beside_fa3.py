"""benchmarks/beside_fa3.py without anybody's cubins: what it says of kernels that are not there, and its count of tiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import beside_fa3
from kvgen.cycles.core import Role
from tests.cycles.programs import ROUND, program


def test_without_cubins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert beside_fa3.main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.count("| no fa3_") == len(beside_fa3.PEERS) and "| FA3 full | 64 | no fa3_d64_full.cubin |" in said


def test_the_slowest_role_by_its_tiles() -> None:
    slow, fast = (Role(name, program(f"[-:-:-:{n}] NOP"), 1) for name, n in (("slow", 90), ("fast", 40)))
    assert beside_fa3.settled((slow, fast), {}, ROUND, {"slow": 3}) == pytest.approx(40, abs=1)
