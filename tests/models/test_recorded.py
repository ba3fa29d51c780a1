"""A decode step of a layer of each kind of a few models: init's set on the CPU machine, against what transformers answered.

`python -m tests_torch.record_models` records them; all published configs are run in `make test-torch`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from .steps import RECORDED, Step, hold

PATHS = sorted(RECORDED.glob("*.npz"))


def test_there_are_recordings_of_every_kind() -> None:
    found = [Step.read(path) for path in PATHS]
    assert {bool(s.latent) for s in found} == {True, False}
    assert any(s.sinks for s in found) and any("q" in s.weights for s in found)
    assert any(s.slopes for s in found) and any(s.positions for s in found)
    assert any(s.picked for s in found) and any(s.source for s in found)
    assert any(s.v_dim != s.k_dim and not s.latent for s in found)


# One of each way to attend; the campaign has all of them.
SOME = (
    "bloom_560m_0", "deepseek_v3_2_0", "gemma_4_e4b_24", "gpt_oss_20b_0", "llama_4_scout_0", "minimax_m2_5_0", "qwen3_vl_2b_0",
)  # fmt: skip
RUN = PATHS if "KVGEN_FAMILY" in os.environ else [path for path in PATHS if path.stem in SOME]


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_as_transformers_answered(path: Path) -> None:
    assert path.stat().st_size < 100_000
    hold(Step.read(path))


def _theta(step: Step) -> Step:
    return replace(step, config={**step.config, "rope_theta": 10_000, "rope_parameters": None})


def _slopes(step: Step) -> Step:
    return replace(step, slopes=[slope / 2 for slope in step.slopes or ()])


def _picked(step: Step) -> Step:
    assert step.picked is not None
    other = next(token for token in range(step.tokens) if token not in step.picked)
    return replace(step, picked=[other, *step.picked[1:]])


def _sections(step: Step) -> Step:
    assert step.positions is not None
    t, h, w = step.positions
    return replace(step, positions=[t, w, h])


def _source(step: Step) -> Step:
    assert step.source is not None
    return replace(step, source=replace(step.source, name="other rows"))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("minimax_m2_5_0", _theta),
        ("bloom_560m_0", _slopes),
        ("deepseek_v3_2_0", _picked),
        ("qwen3_vl_2b_0", _sections),
        ("gemma_4_e4b_24", _source),
    ],
)
def test_a_wrong_fact_is_seen(name: str, wrong: Callable[[Step], Step]) -> None:
    """One wrong fact is outside of what `hold` allows: the comparison can fail."""
    step = Step.read(RECORDED / f"{name}.npz")
    with pytest.raises(AssertionError, match="of the largest output"):
        hold(wrong(step))
