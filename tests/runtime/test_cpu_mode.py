"""The mode in which launches on host arrays run: an enclosing `with`, else the environment's, else hardware."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import kvgen
from kvgen.errors import ArgumentError
from kvgen.runtime import cpu
from kvgen.runtime.cpu_mode import MODES
from kvgen.testing import Check
from tests.support.calls import Call

QUICK = (
    "got 'quick'; it is the mode of launches on host arrays: 'fast' checks nothing, 'hardware' finds what a GPU can get wrong, "
    "'check' all that PTX does not promise; give one of these"
)


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of every launch that is made, which then runs nothing; the environment says nothing yet."""
    found: list[str] = []

    def kernel(module: Any, file: str, entry: str, arch: str, mode: str) -> Any:
        return SimpleNamespace(launch=lambda *_, **__: found.append(mode))

    monkeypatch.setattr(cpu, "cpu_kernel", kernel)
    monkeypatch.delenv("KVGEN_CPU_MODE", raising=False)
    return found


def test_what_overrides_what(modes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call("paged", "append")
    call.run()
    with kvgen.cpu_machine() as log:
        call.run()
    with kvgen.cpu_machine(mode="check"):
        call.run()
        with kvgen.cpu_machine(arch="sm_80"):
            call.run()
        with kvgen.cpu_machine(mode="fast"):
            call.run()
    assert modes == ["hardware", "hardware", "check", "check", "fast"]
    assert [launch.entry for launch in log.launches] == ["paged_append"]
    for mode in MODES:
        modes.clear()
        monkeypatch.setenv("KVGEN_CPU_MODE", mode)
        call.run()
        with kvgen.cpu_machine():
            call.run()
        with kvgen.cpu_machine(mode="hardware"):
            call.run()
        assert modes == [mode, mode, "hardware"]
    modes.clear()
    monkeypatch.setenv("KVGEN_CPU_MODE", "")  # as if it were not set
    call.run()
    assert modes == ["hardware"]


def test_a_bound_launch_keeps_the_mode_that_it_was_bound_in(modes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    step = Call("paged", "append").bind()
    monkeypatch.setenv("KVGEN_CPU_MODE", "check")
    step()
    with kvgen.cpu_machine(mode="fast"):
        step()
    assert modes == ["hardware", "hardware"]


def test_checks_have_a_mode_of_their_own(modes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGEN_CPU_MODE", "fast")
    Check(schedules=("ascending",))(Call("paged", "append").run)
    assert modes == ["check"]


def test_what_is_no_mode(modes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call("paged", "append")
    for given in ("quick", "Check", 2):
        with pytest.raises(ArgumentError) as raised, kvgen.cpu_machine(mode=given):  # type: ignore[arg-type]
            pass
        assert str(raised.value).startswith(f"mode: got {given!r}; it is the mode of launches on host arrays: ")
    monkeypatch.setenv("KVGEN_CPU_MODE", "quick")
    for refused in (call.run, call.bind, kvgen.cpu_machine().__enter__):
        with pytest.raises(ArgumentError) as raised:
            refused()
        assert str(raised.value) == f"KVGEN_CPU_MODE: {QUICK}"
    with kvgen.cpu_machine(mode="check"):  # which does not ask the environment
        call.run()
    assert modes == ["check"]
