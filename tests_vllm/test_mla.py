"""MLA models in vLLM's engine by KVGEN_MLA: tiny DeepSeek V3 against transformers in f32, and against vLLM's own attention.

Kernels over latent rows compute in 16 bits, so tokens are held to a rule: what the engine chose is, at every position, within
`within` of what the reference, given the engine's own tokens so far, likes best; and the log probabilities agree as far.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests_vllm import engine, models
from tests_vllm.engine import Result

SHARED = 130  # tokens that several prompts have in common
DTYPES = {"float16": 0.02, "bfloat16": 0.15}
# What runs for prompts behind a cached prefix, for decodes, and for the last few rows of a prompt.
KERNELS = {"append", "mla_decode", "mla_decode_plan", "mla_window", "mla_window_plan", "extend", "extend_plan"}
CONTEXT = {"gather", "extend_context", "extend_context_plan", "merge_states"}


@pytest.fixture(scope="session")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of 4 heads over latent rows of 512 + 64."""
    return models.save(models.deepseek(), tmp_path_factory.mktemp("deepseek"), gain=1.5)


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    shared = [rng.randrange(3, 512) for _ in range(SHARED)]
    tails = [[rng.randrange(3, 512) for _ in range(count)] for count in (3, 40, 9)]
    return [shared + tail for tail in tails] + [[rng.randrange(3, 512) for _ in range(count)] for count in (200, 1, 33)]


def hold(model: Path, made: Result, asked: list[list[int]], dtype: str, within: float) -> None:
    """The rule of this module, for every token of every request."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).float()
    reference.set_attn_implementation("eager")
    rounds = asked * (len(made.tokens) // len(asked))
    for prompt, tokens, found in zip(rounds, made.tokens, made.logprobs, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        chosen = expected[torch.arange(len(tokens)), torch.tensor(tokens)]
        assert float((expected.amax(-1) - chosen).max()) <= within
        assert float((torch.tensor(found) - chosen).abs().max()) <= within


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefixes_and_chunks(deepseek: Path, dtype: str) -> None:
    """Prompts in chunks of 96 rows, twice, so that the second round finds all of them cached."""
    asked = prompts()
    options = {"dtype": dtype, "max_num_batched_tokens": 96, "enable_prefix_caching": True, "block_size": 16}
    made = engine.run(deepseek, asked, rounds=2, backend="KVGEN_MLA", **options)
    hold(deepseek, made, asked, dtype, DTYPES[dtype])
    assert made.launches.keys() >= KERNELS | CONTEXT and made.own == 0
    assert all(cached >= len(prompt) - 16 for cached, prompt in zip(made.cached[len(asked) :], asked, strict=True))


def test_beside_vllm(deepseek: Path) -> None:
    """vLLM's own attention over the same latent rows errs as much, and tokens differ where the reference has a tie."""
    asked = prompts()
    ours, theirs = (
        engine.run(deepseek, asked, backend=backend, dtype="float16", block_size=16) for backend in ("KVGEN_MLA", None)
    )
    hold(deepseek, theirs, asked, "float16", DTYPES["float16"])
    hold(deepseek, ours, asked, "float16", DTYPES["float16"])
    assert ours.own == 0 and theirs.own > 0 and not theirs.launches
    assert sum(a == b for a, b in zip(ours.tokens, theirs.tokens, strict=True)) >= len(asked) - 1
