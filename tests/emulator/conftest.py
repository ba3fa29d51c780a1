"""A cache of the test run's own, and one place that asks for a build."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvgen import emulator

Build = Callable[..., emulator.Library]


@pytest.fixture(scope="session")
def emulator_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulator-cache")


@pytest.fixture(scope="session")
def build(emulator_cache: Path) -> Build:
    def make(ptx: Sequence[str], mode: emulator.host.Mode = "check") -> emulator.Library:
        return emulator.build(ptx, mode=mode, cache_dir=emulator_cache)

    return make
