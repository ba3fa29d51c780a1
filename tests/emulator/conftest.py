"""One place that asks for a build."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvgen import emulator
from kvgen.emulator.host import cache_directory

Build = Callable[..., emulator.Library]


@pytest.fixture(scope="session")
def build() -> Build:
    def make(ptx: Sequence[str], mode: emulator.host.Mode = "check") -> emulator.Library:
        return emulator.build(ptx, mode=mode)

    return make


@pytest.fixture
def new_cache(build: Build, tmp_path: Path) -> Path:
    """A cache that has no kernels yet, but the runtimes, which take longest to compile."""
    for mode in ("check", "fast"):
        build([".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry nothing() { ret; }\n"], mode)
    folder = tmp_path / "emulator"
    folder.mkdir()
    for path in cache_directory(None).glob("runtime-*"):
        if path.suffix != ".lock":
            shutil.copy2(path, folder)
    return folder
