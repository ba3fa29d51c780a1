"""A decode step of a layer of each kind of every published config, against transformers' eager attention in f32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="make test-torch installs it")

from kvgen import models
from kvgen.errors import ConfigError
from tests.models.steps import RECORDED, Step, hold
from tests_torch.eager import Unable, steps, with_short_windows

CONFIGS = Path(__file__).parents[1] / "tests" / "models" / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))
# Attention that computes its own scores, and so cannot be called with tensors of the test's; each has a test of its own.
OWN_SCORES = {"bloom_560m", "falcon_7b", "mpt_7b"}


@pytest.mark.parametrize("name", NAMES)
def test_a_decode_step_of_each_kind_of_layer(name: str) -> None:
    config = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    try:
        models.spec_text(with_short_windows(config), source="config.json")
    except ConfigError as error:
        pytest.xfail(f"no spec is written: {str(error)[:200]}")
    if name in OWN_SCORES:
        with pytest.raises(Unable):
            list(steps(name, config))
        return
    for step in steps(name, config):
        hold(step)


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.npz")), ids=lambda path: path.stem)
def test_recordings_are_what_transformers_answers(path: Path) -> None:
    import numpy as np

    recorded = Step.read(path)
    config = json.loads((CONFIGS / f"{recorded.name}.json").read_text(encoding="utf-8"))
    (now,) = (step for step in steps(recorded.name, config) if step.layer == recorded.layer)
    assert recorded.output is not None and now.output is not None
    np.testing.assert_allclose(recorded.output, now.output, rtol=1e-4, atol=1e-5)
