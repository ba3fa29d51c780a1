"""The tiles' kernels on the CPU machine in check mode."""

from __future__ import annotations

import pytest

from kvgen import emulator
from kvgen.emulator import Library
from tests.emulator.programs import nvrtc_ptx
from tests.tma.kernels import GATHERS, LOADS, STORES, text


@pytest.fixture(scope="session")
def library() -> Library:
    """gather4 is of sm_100f; what it does is the same."""
    texts = [
        nvrtc_ptx(text([*LOADS, *STORES]), arch="compute_90a", name="tiles.cu"),
        nvrtc_ptx(text(GATHERS), arch="compute_100f", name="tiles.cu"),
    ]
    return emulator.build(texts, mode="check")
