"""What tests/forms/executed.txt says of a test, held to what the test launches: a plugin of every run."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

from tests.forms import cover, launched
from tests.forms.form import Subject

_held: dict[str, set[Subject]] = {}  # of the tests of this run: a campaign has some of its own


def pytest_sessionstart(session: pytest.Session) -> None:
    launched.install()
    # A run that draws other sets, or that is recorded anew, is held to nothing.
    if "KVGEN_DRAWN" in os.environ or session.config.pluginmanager.has_plugin("tests.forms.record"):
        return
    for entry in cover.table():
        if entry.campaign == ("KVGEN_FAMILY" in os.environ):
            _held.setdefault(entry.test, set()).add(entry.subject)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    launched.begin()
    result = yield
    held = _held.get(item.nodeid)
    if held is not None:
        missing = held.difference(*(kernel.subjects for kernel in launched.kernels()))
        lines = "\n".join(sorted(f"    {subject.line}" for subject in missing))
        assert not missing, (
            f"executed.txt of tests/forms says that this test launches what it does not; run `make forms`:\n{lines}"
        )
    return result


def absent(items: list[pytest.Item]) -> set[str]:
    """Tests that executed.txt names and that are not among these, of files that are."""
    names = {item.nodeid for item in items}
    files = {name.partition("::")[0] for name in names}
    return {test for test in _held if test.partition("::")[0] in files} - names
