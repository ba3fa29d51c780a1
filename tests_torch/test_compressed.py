"""What tests/compressed compares its statement with is what this transformers answers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.compressed.drawn import EXACT, RECORDED
from tests_torch.record_compressed import output


@pytest.mark.parametrize("name", EXACT)
def test_recorded(name: str) -> None:
    with np.load(RECORDED / f"{name}.npz") as found:
        np.testing.assert_allclose(found["o"], output(name), rtol=1e-4, atol=1e-5)
