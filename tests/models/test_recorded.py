"""A decode step of a layer of each kind of a few models: init's set on the CPU machine, against what transformers answered.

`python -m tests_torch.record_models` records them; all published configs are run in `make test-torch`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from .steps import RECORDED, Step, hold, kvgen_output

PATHS = sorted(RECORDED.glob("*.npz"))


def test_there_are_recordings_of_every_kind() -> None:
    found = [Step.read(path) for path in PATHS]
    assert {bool(s.latent) for s in found} == {True, False}
    assert any(s.sinks for s in found) and any("q" in s.weights for s in found)
    assert any(s.slopes for s in found) and any(s.positions for s in found)
    assert any(s.picked for s in found) and any(s.source for s in found)
    assert any(s.v_dim != s.k_dim and not s.latent for s in found)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_as_transformers_answered(path: Path) -> None:
    assert path.stat().st_size < 100_000
    hold(Step.read(path))


def test_a_wrong_fact_is_seen() -> None:
    """Another base of RoPE's frequencies is far outside of what is allowed: the comparison can fail."""
    from dataclasses import replace

    step = Step.read(RECORDED / "minimax_m2_5_0.npz")
    assert step.output is not None
    wrong = replace(step, config={**step.config, "rope_theta": 10_000, "rope_parameters": None})
    off = np.abs(kvgen_output(wrong) - step.output).max() / np.abs(step.output).max()
    assert off > 1e-3
