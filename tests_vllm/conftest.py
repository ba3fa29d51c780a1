"""Models that the tests share, and the record of what they show."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.engine_runs import pytest_runtest_logreport, pytest_sessionfinish, shown
from tests_vllm import models

os.environ.setdefault("KVGEN_CPU_COMPILE", "quick")  # processes of engines have it too

__all__ = ["pytest_runtest_logreport", "pytest_sessionfinish", "shown"]


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of 8 query heads over 2 KV heads of 64."""
    return models.save(models.llama(), tmp_path_factory.mktemp("llama"))
