"""A guard that no test touches the cache of whoever runs them, and the fixtures most tests use."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgen.compile import Cache, Unit

from .tiny import unit_of


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path / "default-cache"))


@pytest.fixture
def unit() -> Unit:
    return unit_of()


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")
