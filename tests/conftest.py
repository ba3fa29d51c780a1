"""Shared by every test: derandomized hypothesis, and GPU tests deselected and counted where there is no GPU."""

from __future__ import annotations

import ctypes.util
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("kvgen", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("kvgen")


def _has_gpu() -> bool:
    if ctypes.util.find_library("cuda") is None:
        return False
    from kvgen.errors import DeviceError
    from kvgen.runtime import cuda

    try:
        cuda.driver().capability(0)
    except DeviceError:
        return False
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not _has_gpu():
        items[:] = [item for item in items if item not in gpu]
        config.hook.pytest_deselected(items=gpu)


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A compile cache of the test run's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
