"""A cache of the test run's own, and one place that asks for a build."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvgen import emulator

Build = Callable[..., emulator.Library]


@pytest.fixture(scope="session")
def emulator_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by the workers of pytest-xdist, so that the runtime is compiled once a run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "emulator-cache"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def build(emulator_cache: Path) -> Build:
    def make(ptx: Sequence[str], mode: emulator.host.Mode = "check") -> emulator.Library:
        return emulator.build(ptx, mode=mode, cache_dir=emulator_cache)

    return make
