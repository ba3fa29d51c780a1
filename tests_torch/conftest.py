"""The record of what engines show: docs/engines/status.json."""

from tests.support.engine_runs import pytest_runtest_logreport, pytest_sessionfinish, shown

__all__ = ["pytest_runtest_logreport", "pytest_sessionfinish", "shown"]
