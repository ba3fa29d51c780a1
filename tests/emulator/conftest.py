"""One place that asks for a build, and a cache for tests of builds."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvgen import emulator
from kvgen.emulator import host
from tests.emulator.programs import HEADER, entry

Build = Callable[..., emulator.Library]


@pytest.fixture(scope="session")
def build() -> Build:
    def make(ptx: Sequence[str], mode: emulator.launch.Mode = "check") -> emulator.Library:
        return emulator.build(ptx, mode=mode)

    return make


def cache_with_runtime(folder: Path, mode: host.Mode) -> Path:
    """A cache that holds nothing but a mode's runtime, which takes seconds to compile."""
    folder.mkdir()
    shutil.copy(host.build_object([HEADER + entry("nothing", "")], mode, None).runtime, folder)
    return folder


@pytest.fixture
def own_cache(tmp_path: Path) -> Path:
    """Of fast mode."""
    return cache_with_runtime(tmp_path / "cache", "fast")


@pytest.fixture
def check_cache(tmp_path: Path) -> Path:
    """Of check mode."""
    return cache_with_runtime(tmp_path / "check cache", "check")
