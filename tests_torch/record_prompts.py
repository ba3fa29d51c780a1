"""Write tests/models/recorded_prompts, prompts by transformers' eager attention: python -m tests_torch.record_prompts."""

from __future__ import annotations

import json
import sys

from tests.models.prompts import RECORDED
from tests_torch.prompts import prompts
from tests_torch.test_models import CONFIGS

# A group, norms before attention, local and full layers, MHA in a window, sinks, latent attention, a soft cap.
MODELS = (
    *("llama_3_1_8b", "qwen3_8b", "gemma_3_4b_it", "phi_3_mini_4k", "gpt_oss_20b", "deepseek_v3", "gemma_2_9b_it"),
)


def main(names: list[str]) -> None:
    """Record the models that are named, or all of MODELS."""
    RECORDED.mkdir(exist_ok=True)
    for name in names or MODELS:
        for prompt in prompts(name, json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))):
            prompt.save()
            print(f"{name}, layer {prompt.layer}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
