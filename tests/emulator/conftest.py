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


@pytest.fixture
def own_cache(tmp_path: Path) -> Path:
    """A cache that holds nothing but fast mode's runtime, which takes seconds to compile."""
    folder = tmp_path / "cache"
    folder.mkdir()
    shutil.copy(host.build_object([HEADER + entry("nothing", "")], "fast", None).runtime, folder)
    return folder
