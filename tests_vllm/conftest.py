"""Models that the tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests_vllm import models


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of 8 query heads over 2 KV heads of 64."""
    return models.save(models.llama(), tmp_path_factory.mktemp("llama"))
