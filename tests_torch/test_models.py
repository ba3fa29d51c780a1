"""A decode step of a layer of each kind of every published config, against transformers' eager attention in f32.

DeepSeek V3.2 and GLM-5 (`deepseek_v32`, `glm_moe_dsa` in transformers): the tokens that the module's own indexer picks are
the lists of mla_decode with sparse=True. GLM-5.2's shared layers take an earlier layer's, as its modules do. Kimi K2 is
run by transformers' DeepSeek V3, whose code its checkpoint names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="make test-torch installs it")

from kvgen import models
from tests.models.steps import RECORDED, Step, hold
from tests_torch.eager import kinds_of_steps, steps

CONFIGS = Path(__file__).parents[1] / "tests" / "models" / "configs"
# Layers with compressed entries are tests_torch/test_compressed.py's.
NAMES = sorted(
    path.stem
    for path in CONFIGS.glob("*.json")
    if all(kind.compressed is None for kind in models.facts(models.read(path)).kinds)
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Rows are few here: to wait for PyTorch's other threads takes longer than the work, most of all beside other processes."""
    kept = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(kept)


@pytest.mark.parametrize("name", NAMES)
def test_a_decode_step_of_each_kind_of_layer(name: str) -> None:
    config = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    found = 0
    for step in steps(name, config):
        hold(step)
        found += 1
    assert found >= sum(kind.cache for kind in kinds_of_steps(config)), "a step of each kind that kvgen knows"


def test_falcon_with_alibi() -> None:
    """falcon-rw-1b: slopes are scaled together with q . k, as the spec that init writes says.

    transformers 5.23's eager code adds them twice, in its mask and once more (FalconModel.forward, FalconAttention.forward);
    its SDPA code, like Falcon's own, has them in the mask alone. So the slopes found are twice those that a call brings.
    """
    config = {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "alibi": True,
        "bias": True,
        "hidden_size": 2048,
        "multi_query": False,
        "new_decoder_architecture": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 24,
        "torch_dtype": "bfloat16",
    }
    (step,) = steps("falcon_rw_1b", config)
    wanted = [2.0 ** (-8.0 * (head + 1) / 32) * 64**-0.5 for head in range(32)]
    assert step.slopes == pytest.approx([2 * slope for slope in wanted], rel=2.0**-8)  # transformers rounds to bf16
    hold(step, allowed=2.0**-6)  # as it does every product of slope and distance


def test_longrope_beyond_its_original_length() -> None:
    """A step of more tokens than original_max_position_embeddings turns by the long factors; by the short ones it is far off."""
    config = json.loads((CONFIGS / "phi_3_5_mini.json").read_text(encoding="utf-8"))
    config["original_max_position_embeddings"] = 16
    (step,) = steps("phi_3_5_mini", config)
    assert step.tokens > 16
    hold(step)
    scaling = {**config["rope_scaling"], "long_factor": config["rope_scaling"]["short_factor"]}
    with pytest.raises(AssertionError, match="of the largest output"):
        hold(replace(step, config={**step.config, "rope_scaling": scaling}))


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.npz")), ids=lambda path: path.stem)
def test_recordings_are_what_transformers_answers(path: Path) -> None:
    import numpy as np

    recorded = Step.read(path)
    config = json.loads((CONFIGS / f"{recorded.name}.json").read_text(encoding="utf-8"))
    (now,) = (step for step in steps(recorded.name, config) if step.layer == recorded.layer)
    assert recorded.output is not None and now.output is not None
    np.testing.assert_allclose(recorded.output, now.output, rtol=1e-4, atol=1e-5)
