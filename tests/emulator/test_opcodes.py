"""Every arithmetic and memory opcode in every form that is translated, against Python integers and exact rationals."""

from __future__ import annotations

import pytest

from tests.emulator import atomic_cases, compare_cases, convert_cases, float_cases, integer_cases, memory_cases
from tests.emulator.conftest import Build

_MODULES = (integer_cases, float_cases, compare_cases, memory_cases, atomic_cases)
SUITES = {s.name: s for s in (*(m.SUITE for m in _MODULES), *convert_cases.SUITES)}


@pytest.mark.parametrize("name", SUITES)
def test_results(name: str, build: Build) -> None:
    """Hundreds of instructions share a build, which costs more than running them."""
    suite = SUITES[name]
    failures = suite.failures(build([suite.ptx()], mode="check" if suite.slots else "fast"))
    assert not failures, "\n".join([f"{len(failures)} wrong:", *failures[:12]])
