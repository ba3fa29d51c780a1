"""The record of what engines show (docs/engines/status.json), and a version of transformers taken for another."""

import os

from tests.support.engine_runs import pytest_runtest_logreport, pytest_sessionfinish, shown

os.environ.setdefault("KVGEN_CPU_COMPILE", "quick")

# tests_torch.other_transformers sets it for a version that kvgen refuses.
if taken_for := os.environ.get("KVGEN_TEST_TRANSFORMERS_AS"):
    import transformers

    transformers.__version__ = taken_for

__all__ = ["pytest_runtest_logreport", "pytest_sessionfinish", "shown"]
