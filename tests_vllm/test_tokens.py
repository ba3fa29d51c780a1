"""vLLM's engine with kvgen attending makes the tokens that it makes with its own attention, whatever its scheduler does."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    PretrainedConfig,
    Qwen3Config,
)
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

from tests.support.engine_runs import Show
from tests_vllm import models
from tests_vllm.engine import Result, run

HYBRID = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
}


def gemma3() -> PretrainedConfig:
    """Two sliding layers of 32 tokens to one full, in groups of their own; the scale is no 1 / sqrt(head_dim)."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    own = {"num_hidden_layers": 3, "layer_types": kinds, "sliding_window": 32, "query_pre_attn_scalar": 100}
    return Gemma3TextConfig(**{**models.COMMON, **own, "tie_word_embeddings": True})


def gemma2() -> PretrainedConfig:
    """A soft cap of 5, which scores reach."""
    own = {**HYBRID, "query_pre_attn_scalar": 64, "attn_logit_softcapping": 5.0}
    return Gemma2Config(**{**models.COMMON, **own, "tie_word_embeddings": True})


def gpt_oss() -> PretrainedConfig:
    """Sinks; a sliding layer and a full one."""
    own = {
        **HYBRID,
        "intermediate_size": 256,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": YARN,
    }
    return GptOssConfig(**{**models.COMMON, **own})


def gemma4() -> PretrainedConfig:
    """Sliding layers with heads of 64, full ones with heads of 128; the last three read the K and V of others."""
    own = {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "sliding_window": 32,
        "global_head_dim": 128,
        "num_kv_shared_layers": 3,
        "vocab_size_per_layer_input": 512,
        "hidden_size_per_layer_input": 32,
    }
    return Gemma4TextConfig(**{**models.COMMON, **own, "tie_word_embeddings": True})


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": models.llama,
    "qwen3": lambda: Qwen3Config(**models.COMMON),
    "gemma3": gemma3,
    "gemma4": gemma4,
    "gemma2": gemma2,
    "gpt_oss": gpt_oss,
}
# Layers that attend for each that stores K and V, where these are not as many.
SHARED = {"gemma4": 2}
# Seven prompts of which four begin alike, twice over: the second round finds the first's pages.
CHUNKED: dict[str, Any] = {"max_num_batched_tokens": 96, "enable_prefix_caching": True}


def tokens(count: int, seed: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(3, 512) for _ in range(count)]


PREFIX = tokens(130, 0)
PROMPTS = [PREFIX + tokens(n, n) for n in (3, 40, 9, 70)] + [tokens(n, n) for n in (200, 1, 33)]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model by its name in CONFIGS; saved once."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = models.save(CONFIGS[name](), tmp_path_factory.mktemp(name))
        return made[name]

    return folder


def agree(got: Result, wanted: Result) -> None:
    """Every token is the same; kvgen attended alone in one, vLLM alone in the other."""
    assert got.tokens == wanted.tokens
    assert got.own == 0 and wanted.own > 0
    assert not wanted.launches
    assert got.launches["append"] > 0


def report(shown: Show, what: str, name: str, got: Result) -> None:
    """All of the tokens were those wanted."""
    count = sum(map(len, got.tokens))
    shown(what, model=f"tiny {name}", dtype="float32", equal=count, of=count, launches=got.launches)


@pytest.mark.parametrize("name", CONFIGS)
def test_prefix_hits_and_chunked_prompts(model: Callable[[str], Path], name: str, shown: Show) -> None:
    wanted = run(model(name), PROMPTS, rounds=2, backend=None, **CHUNKED)
    got = run(model(name), PROMPTS, rounds=2, **CHUNKED)
    agree(got, wanted)
    assert got.cached == wanted.cached and min(got.cached[1:4]) >= 128
    assert got.launches["extend"] and got.launches["decode"]
    # Each layer attends once a step.
    assert got.launches["append"] * SHARED.get(name, 1) == got.launches["extend"] + got.launches["decode"]
    report(shown, "prefix hits, chunked prompts", name, got)


def test_preempted_requests(model: Callable[[str], Path], shown: Show) -> None:
    """Blocks for three of seven requests: some are thrown out in the middle and begin anew."""
    few: dict[str, Any] = {"num_gpu_blocks_override": 24, "enable_prefix_caching": False, "max_num_batched_tokens": 512}
    prompts = [tokens(n, n) for n in (90, 100, 110, 120, 95, 105, 115)]
    wanted = run(model("llama"), prompts, tokens=60, backend=None)
    got = run(model("llama"), prompts, tokens=60, **few)
    agree(got, wanted)
    assert got.metrics["vllm:num_preemptions"] > 0 and wanted.metrics["vllm:num_preemptions"] == 0
    report(shown, f"{got.metrics['vllm:num_preemptions']:.0f} preemptions", "llama", got)


def test_windows_of_drafts(model: Callable[[str], Path], shown: Show) -> None:
    """N-gram drafts of three tokens, some right and some wrong, beside decoding rows: several rows a request."""
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    wanted = run(model("llama"), PROMPTS, tokens=40, backend=None)
    got = run(model("llama"), PROMPTS, tokens=40, speculative_config=ngram)
    agree(got, wanted)
    accepted, drafted = (got.metrics[f"vllm:spec_decode_num_{n}_tokens"] for n in ("accepted", "draft"))
    assert 0 < accepted < drafted
    assert got.launches["verify"] > 0
    report(shown, f"n-gram speculation, {accepted:.0f} of {drafted:.0f} drafts accepted", "llama", got)


@pytest.mark.parametrize("order", ["LBNHC", "LBHNC", "BLNHC", "BLHNC", "LHBNC", "BHLNC"])
def test_every_layout_of_pages(model: Callable[[str], Path], order: str, wanted_of_gemma3: Result, shown: Show) -> None:
    """Groups of sliding and of full layers over the same memory."""
    got = run(model("gemma3"), PROMPTS[:4], env={"VLLM_KV_CACHE_LAYOUT": order}, **CHUNKED)
    assert f"Using {order} KV cache layout" in got.log
    agree(got, wanted_of_gemma3)
    report(shown, f"pages of {order}", "gemma3", got)


@pytest.fixture(scope="session")
def wanted_of_gemma3(model: Callable[[str], Path]) -> Result:
    return run(model("gemma3"), PROMPTS[:4], backend=None, **CHUNKED)


# Of K and V in each layer of a checkpoint that brings them.
SCALES = [(0.013, 0.007), (0.017, 0.009)]


def test_an_fp8_cache(model: Callable[[str], Path], shown: Show) -> None:
    """K and V of e4m3 with scales of 1: as eager attention over K and V that went through e4m3, in f32.

    vLLM's own kernels for CPUs soon make other tokens over such a cache; how many are alike is reported.
    """
    folder = model("llama")
    wanted = eager(folder, PROMPTS, 20, torch.float8_e4m3fn)
    got = run(folder, PROMPTS, kv_cache_dtype="fp8", **CHUNKED)
    assert got.tokens == wanted
    assert got.own == 0 and got.launches["decode"] > 0 and got.launches["extend"] > 0
    assert wanted != eager(folder, PROMPTS, 20, torch.float32), "a model whose tokens codes do not change shows nothing"
    theirs = run(folder, PROMPTS, kv_cache_dtype="fp8", backend=None, **CHUNKED)
    alike = sum(same_from_the_start(*pair) for pair in zip(theirs.tokens, wanted, strict=True))
    report(shown, f"fp8 cache, beside eager over rounded K and V, of which vLLM's own fp8 has {alike}", "llama", got)


def test_an_fp8_cache_with_the_checkpoints_scales(model: Callable[[str], Path], tmp_path: Path, shown: Show) -> None:
    """A scale of K and one of V a layer, which the checkpoint brings: it also asks for fp8."""
    folder = with_scales(model("llama"), tmp_path / "scaled")
    wanted = eager(model("llama"), PROMPTS, 20, torch.float8_e4m3fn, SCALES)
    got = run(folder, PROMPTS, **CHUNKED)
    assert got.tokens == wanted
    assert wanted != eager(model("llama"), PROMPTS, 20, torch.float8_e4m3fn), "scales that change no token show nothing"
    report(shown, "fp8 cache with the checkpoint's scales, beside eager over rounded K and V", "llama", got)


def with_scales(folder: Path, scaled: Path) -> Path:
    """The checkpoint `folder` with SCALES, as llm-compressor writes them."""
    shutil.copytree(folder, scaled)
    weights = load_file(scaled / "model.safetensors")
    for layer, scales in enumerate(SCALES):
        for name, scale in zip("kv", scales, strict=True):
            weights[f"model.layers.{layer}.self_attn.{name}_scale"] = torch.tensor([scale])
    save_file(weights, scaled / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((scaled / "config.json").read_text(encoding="utf-8"))
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "compressed",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": scheme,
    }
    (scaled / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return scaled


def same_from_the_start(made: list[int], wanted: list[int]) -> int:
    """Tokens up to the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(made, wanted, strict=True)) if a != b), len(wanted))


def eager(
    folder: Path,
    prompts: list[list[int]],
    new: int,
    codes: torch.dtype,
    scales: Sequence[tuple[float, float]] | None = None,
) -> list[list[int]]:
    """transformers' greedy tokens in f32 with K and V rounded to `codes` times a layer's scales, by default 1."""

    def attention(module: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        of_layer = (1.0, 1.0) if scales is None else scales[module.layer_idx]
        k, v = (
            (x / scale).clamp(-448, 448).to(codes).to(x.dtype) * scale
            for x, scale in zip((k, v), of_layer, strict=True)
        )
        return eager_attention_forward(module, q, k, v, *args, **kwargs)

    AttentionInterface.register("rounded", attention)
    AttentionMaskInterface.register("rounded", eager_mask)
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="rounded")
    made = []
    for prompt in prompts:
        ids = found.generate(
            torch.tensor([prompt]), max_new_tokens=new, min_new_tokens=new, do_sample=False, eos_token_id=None
        )
        made.append(ids[0, len(prompt) :].tolist())
    return made
