"""MLA models in vLLM's engine by KVGEN_MLA: tiny DeepSeek V3 against transformers in f32, and against vLLM's own attention.

Kernels over latent rows compute in 16 bits, so tokens are held to a rule: what the engine chose is, at every position, within
`within` of what the reference, given the engine's own tokens so far, likes best; and the log probabilities agree as far.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig

from tests.support.engine_runs import Show
from tests_vllm import engine, models
from tests_vllm.engine import Result

MODEL = "DeepSeek V3, 2 layers, 4 heads, latent rows of 512 + 64"
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


def hold(model: Path, made: Result, asked: list[list[int]], dtype: str, within: float) -> dict[str, int]:
    """The rule of this module, for every token of every request; how many of them the reference likes best."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).float()
    reference.set_attn_implementation("eager")
    equal = 0
    rounds = asked * (len(made.tokens) // len(asked))
    for prompt, tokens, found in zip(rounds, made.tokens, made.logprobs, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        chosen = expected[torch.arange(len(tokens)), torch.tensor(tokens)]
        assert float((expected.amax(-1) - chosen).max()) <= within
        assert float((torch.tensor(found) - chosen).abs().max()) <= within
        equal += int((expected.argmax(-1) == torch.tensor(tokens)).sum())
    return {"equal": equal, "of": sum(len(tokens) for tokens in made.tokens)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefixes_and_chunks(deepseek: Path, dtype: str, shown: Show) -> None:
    """Prompts in chunks of 96 rows, twice, so that the second round finds all of them cached."""
    asked = prompts()
    options = {"dtype": dtype, "max_num_batched_tokens": 96, "enable_prefix_caching": True, "block_size": 16}
    made = engine.run(deepseek, asked, rounds=2, backend="KVGEN_MLA", **options)
    found = hold(deepseek, made, asked, dtype, DTYPES[dtype])
    assert made.launches.keys() >= KERNELS | CONTEXT and made.own == 0
    assert all(cached >= len(prompt) - 16 for cached, prompt in zip(made.cached[len(asked) :], asked, strict=True))
    shown("MLA: prefix hits, chunked prefill", model=MODEL, dtype=dtype, launches=made.launches, **found)


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


def test_speculative_windows(deepseek: Path, shown: Show) -> None:
    """Windows of a token and 3 drafts, found by n-grams in prompts that repeat themselves; pages run out meanwhile."""
    rng = random.Random(2)
    asked = [[rng.randrange(3, 512) for _ in range(20)] * 4 for _ in range(4)]
    options = {
        "dtype": "float16",
        "block_size": 16,
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": 20,
        "max_model_len": 256,
    }
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    made = engine.run(deepseek, asked, backend="KVGEN_MLA", speculative_config=drafts, **options)
    found = hold(deepseek, made, asked, "float16", DTYPES["float16"])
    assert made.own == 0 and made.launches["mla_window"] > 2
    assert made.metrics["vllm:spec_decode_num_draft_tokens"] > 0
    assert made.metrics["vllm:num_preemptions"] > 0
    shown("MLA: n-gram drafts, preemption", model=MODEL, dtype="float16", launches=made.launches, **found)


def test_two_ranks(tmp_path: Path, shown: Show) -> None:
    """Each rank has 2 of 4 heads, and every latent row; rows of 64 + 16 dims, which vLLM's own kernel does not have."""
    small = models.deepseek(kv_lora_rank=64, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=32)
    model = models.save(small, tmp_path / "small", gain=1.5)
    asked = prompts()
    parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    env = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    options = {"dtype": "float16", "max_num_batched_tokens": 96, "block_size": 32}
    made = engine.run(model, asked, backend="KVGEN_MLA", env=env, **options, **parallel)
    found = hold(model, made, asked, "float16", DTYPES["float16"])
    ranks = [counts for counts in made.by_process.values() if counts]
    assert len(ranks) == 2 and ranks[0] == ranks[1] and ranks[0] >= Counter(KERNELS | CONTEXT) and made.own == 0
    name = "DeepSeek V3, 2 layers, 4 heads, latent rows of 64 + 16"
    shown("MLA: tensor parallelism, 2 ranks", model=name, dtype="float16", launches=made.launches, **found)


def test_prompts_by_vllm(deepseek: Path) -> None:
    """A prefill backend of vLLM's that the user names takes the prompts; decodes stay kvgen's."""
    asked = prompts()
    choice = {"mla_prefill_backend": "CPU"}
    options = {"dtype": "float16", "max_num_batched_tokens": 96, "block_size": 16, "attention_config": choice}
    made = engine.run(deepseek, asked, backend="KVGEN_MLA", **options)
    hold(deepseek, made, asked, "float16", DTYPES["float16"])
    assert made.own > 0 and made.launches["mla_decode"] > 0 and "extend" not in made.launches


class Stored(DynamicCache):
    """A cache of latent rows as the engine stores them; a prompt, with nothing cached before it, sees its own as they came."""

    def __init__(self, config: PretrainedConfig, kind: str) -> None:
        super().__init__(config=config)
        self.kind = kind

    def update(self, latent: torch.Tensor, rope: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.kind == "fp8":
            stored = _codes(latent), _codes(rope)
        else:
            blocks = latent.unflatten(-1, (-1, 128))
            scales = blocks.abs().amax(-1, keepdim=True) / 448
            stored = (_codes(blocks / scales) * scales).flatten(-2), rope
        found = super().update(*stored, *args, **kwargs)
        return (latent, rope) if latent.shape[2] > 1 else found


def _codes(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).float()


@pytest.mark.parametrize("kind", ["fp8", "fp8_ds_mla"])
def test_fp8_rows(deepseek: Path, kind: str, shown: Show) -> None:
    """Against transformers over rows rounded alike, a token at a time: what is left is a fraction of what codes cost.

    Codes next to a tie round differently where activations are f16.
    """
    rng = random.Random(3)
    asked = [[rng.randrange(3, 512) for _ in range(count)] for count in (200, 75, 90)]  # too long for the absorbed form
    made = engine.run(deepseek, asked, backend="KVGEN_MLA", dtype="float16", block_size=16, kv_cache_dtype=kind)
    reference = AutoModelForCausalLM.from_pretrained(deepseek, dtype=torch.float16).float()
    reference.set_attn_implementation("eager")
    away, rounded, equal = [], [], 0
    for prompt, tokens, found in zip(asked, made.tokens, made.logprobs, strict=True):
        cache, steps = Stored(reference.config, kind), [prompt, *([token] for token in tokens[:-1])]
        with torch.no_grad():
            logits = [reference(torch.tensor([step]), past_key_values=cache).logits[0, -1] for step in steps]
            plain = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        chosen = torch.arange(len(tokens)), torch.tensor(tokens)
        expected = torch.stack(logits).log_softmax(-1)
        assert float((expected.amax(-1) - expected[chosen]).max()) <= 0.1
        equal += int((expected.argmax(-1) == chosen[1]).sum())
        away.append(torch.tensor(found) - expected[chosen])
        rounded.append(expected[chosen] - plain[chosen])
    assert float(torch.cat(away).square().mean()) <= 0.1 * float(torch.cat(rounded).square().mean())
    assert made.own == 0 and {"append", "extend", "mla_decode"} <= made.launches.keys()
    count = sum(len(tokens) for tokens in made.tokens)
    what = f"MLA: rows of {kind}, beside transformers over rows rounded alike"
    shown(what, model=MODEL, dtype="float16", equal=equal, of=count, launches=made.launches)
