"""The environment is the one of the lock file, and one that kvgen allows."""

from __future__ import annotations

from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

LOCK = [Requirement(x) for x in (Path(__file__).parent / "requirements.lock").read_text().splitlines() if x[0] != "#"]


@pytest.mark.parametrize("locked", LOCK, ids=lambda r: r.name)
def test_what_is_installed_is_what_is_locked(locked: Requirement) -> None:
    assert Version(version(locked.name)).public in locked.specifier


def test_the_versions_are_those_that_kvgen_asks_for() -> None:
    versions = {r.name.lower().replace("_", "-"): next(iter(r.specifier)).version for r in LOCK}
    for text in requires("kvgen") or ():
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate({"extra": "cu13"}):
            name = wanted.name.lower().replace("_", "-")
            assert versions[name] in wanted.specifier, f"{text}: the lock file has {versions.get(name)}"
