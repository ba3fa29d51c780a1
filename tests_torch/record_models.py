"""Write tests/models/recorded: python -m tests_torch.record_models. What transformers answers to decode steps of a few models."""

from __future__ import annotations

import json
import sys

from tests.models.steps import RECORDED
from tests_torch.eager import steps
from tests_torch.test_models import CONFIGS

# Full and windowed layers, head and row norms, fused and partial, YaRN, sinks, latent rows; ALiBi, M-RoPE, an indexer's
# lists, layers that read another's K and V with proportional RoPE, chunks with norms after RoPE, V narrower than K, and
# layers without positions: latent ones, and those of a hybrid.
MODELS = (
    *("gemma_3_4b_it", "gpt_oss_20b", "minimax_m2_5", "deepseek_v2_lite", "phi_3_mini_4k", "exaone_4_32b"),
    *("bloom_560m", "qwen3_vl_2b", "deepseek_v3_2", "gemma_4_e4b", "llama_4_scout", "mimo_v2_flash"),
    *("kimi_linear_48b", "nemotron_3_nano"),
)


def main(names: list[str]) -> None:
    """Record the models that are named, or all of MODELS."""
    RECORDED.mkdir(exist_ok=True)
    for name in names or MODELS:
        for step in steps(name, json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))):
            step.save(RECORDED / f"{name}_{step.layer}.npz")
            print(f"{name}, layer {step.layer}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
