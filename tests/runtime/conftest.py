"""The CPU machine in check mode, so that a set is built for it once, and device arrays without a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvgen.runtime import cuda
from kvgen.runtime.cpu import machine
from tests.runtime.launching import NotingDriver


@pytest.fixture
def checking() -> Iterator[None]:
    """Launches look for races, bad accesses and uninitialised reads."""
    with machine(mode="check"):
        yield


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> NotingDriver:
    """Device arrays can be made; launches are written down."""
    noting = NotingDriver()
    monkeypatch.setattr(cuda, "driver", lambda: noting)
    return noting
