"""Every arithmetic opcode in every form that is translated, against Python integers and exact rationals."""

from __future__ import annotations

import pytest

from tests.emulator import compare_cases, convert_cases, float_cases, integer_cases, memory_cases
from tests.emulator.conftest import Build

SUITES = {
    s.name: s
    for s in (
        integer_cases.SUITE,
        float_cases.SUITE,
        compare_cases.SUITE,
        *convert_cases.SUITES,
        memory_cases.SUITE,
    )
}


@pytest.mark.parametrize("name", SUITES)
def test_results(name: str, build: Build) -> None:
    """Hundreds of instructions share a build, which costs more than running them."""
    suite = SUITES[name]
    failures = suite.failures(build([suite.ptx()], mode="check" if suite.slots else "fast"))
    assert not failures, "\n".join([f"{len(failures)} wrong:", *failures[:12]])
