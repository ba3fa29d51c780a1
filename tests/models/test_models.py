"""config.json -> spec: facts of real checkpoints, and the specs checked in for them."""

from __future__ import annotations

import math
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvgen import models
from kvgen.errors import ConfigError
from kvgen.models.layers import Checkpoint
from kvgen.schema.kernel_set import KernelSet
from kvgen.schema.model import LinearScaling, Llama3Scaling, LongRopeScaling, Mla, Rope, YarnScaling
from tests.sets import spec_path

from .checkpoints import CONFIGS, NAMES, ROOT, WRITTEN, changed, config, model_in, without

SPECS = {
    "llama3_8b": "llama_3_1_8b",
    "llama2_7b": "llama_2_7b",
    "qwen25_7b": "qwen2_5_7b",
    "qwen3_235b": "qwen3_235b_a22b",
    "qwen3_30b": "qwen3_30b_a3b",
    "gemma2_9b": "gemma_2_9b_it",
    "gemma3_4b": "gemma_3_4b_it",
    "phi3_mini": "phi_3_mini_4k",
    "falcon_7b": "falcon_7b",
    "gpt_oss_20b": "gpt_oss_20b",
    "deepseek_v3": "deepseek_v3",
}


# Facts ---------------------------------------------------------------------------------------------------------------

GEMMA_UNIT = ("local", "local", "local", "local", "local", "full")


@dataclass(frozen=True)
class Golden:
    """Facts of the model cards and papers, by hand."""

    shape: tuple[int, int, int, int]  # query heads, KV heads, head dim, group
    layers: int
    theta: float
    scaling: object = None
    window: int | None = None
    pattern: tuple[str, ...] | None = None
    sinks: bool = False
    qk_norm: str | None = None
    mla: Mla | None = None
    dtype: str = "bf16"
    style: str = "neox"
    rope_dim: int | None = None
    local_theta: float | None = None
    softcap: float | None = None
    alibi: bool = False


GOLDEN = {
    "llama_3_1_8b": Golden(
        (32, 8, 128, 4),
        32,
        500_000.0,
        Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192),
    ),
    "llama_2_7b": Golden((32, 32, 128, 1), 32, 10_000.0, dtype="f16"),
    "mistral_7b_v03": Golden((32, 8, 128, 4), 32, 1_000_000.0),
    "qwen2_5_7b": Golden((28, 4, 128, 7), 28, 1_000_000.0),
    "qwen3_8b": Golden((32, 8, 128, 4), 36, 1_000_000.0, qk_norm="head"),
    "qwen3_235b_a22b": Golden((64, 4, 128, 16), 94, 1_000_000.0, qk_norm="head"),
    "qwen3_30b_a3b": Golden((32, 4, 128, 8), 48, 1_000_000.0, qk_norm="head"),
    "gemma_2_9b_it": Golden((16, 8, 256, 2), 42, 10_000.0, window=4096, pattern=("local", "full"), softcap=50.0),
    "gemma_3_4b_it": Golden(
        (8, 4, 256, 2),
        34,
        1_000_000.0,
        LinearScaling(factor=8.0),
        window=1024,
        pattern=GEMMA_UNIT,
        qk_norm="head",
        local_theta=10_000.0,
    ),
    "gemma_3_27b_it": Golden(
        (32, 16, 128, 2),
        62,
        1_000_000.0,
        LinearScaling(factor=8.0),
        window=1024,
        pattern=GEMMA_UNIT,
        qk_norm="head",
        local_theta=10_000.0,
    ),
    "phi_3_mini_4k": Golden((32, 32, 96, 1), 32, 10_000.0, window=2047),
    "phi_3_5_mini": Golden((32, 32, 96, 1), 32, 10_000.0, LongRopeScaling, window=262_144),
    "falcon_7b": Golden((71, 1, 64, 71), 32, 10_000.0),
    "gpt_oss_20b": Golden(
        (64, 8, 64, 8),
        24,
        150_000.0,
        YarnScaling(factor=32.0, original_max_positions=4096, truncate=False),
        window=128,
        pattern=("local", "full"),
        sinks=True,
    ),
    "bloom_560m": Golden((16, 16, 64, 1), 24, math.nan, alibi=True),
    "mpt_7b": Golden((32, 32, 128, 1), 32, math.nan, alibi=True),
    "deepseek_v2_lite": Golden(
        (16, 1, 576, 16),
        27,
        10_000.0,
        YarnScaling(factor=40.0, original_max_positions=4096, mscale=0.707, mscale_all_dim=0.707),
        mla=Mla(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128),
        style="interleaved",
        rope_dim=64,
    ),
    "deepseek_v3": Golden(
        (128, 1, 576, 128),
        61,
        10_000.0,
        YarnScaling(factor=40.0, original_max_positions=4096, mscale=1.0, mscale_all_dim=1.0),
        mla=Mla(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, q_lora_rank=1536),
        style="interleaved",
        rope_dim=64,
    ),
}


GOLDEN["llama_3_1_8b_fp8"] = GOLDEN["llama_3_1_8b"]
GOLDEN["kimi_k2"] = Golden(
    (64, 1, 576, 64),
    61,
    50_000.0,
    YarnScaling(factor=32.0, original_max_positions=4096, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0),
    mla=GOLDEN["deepseek_v3"].mla,
    style="interleaved",
    rope_dim=64,
)


def test_golden_facts_are_of_configs_that_are_here() -> None:
    """The others are compared with transformers' modules, layer by layer, by benchmarks/model_sweep.py."""
    assert set(GOLDEN) <= set(NAMES)


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_facts(name: str) -> None:
    found, want = models.facts(config(name)), GOLDEN[name]
    model, rope = found.model, found.model.rope
    assert (found.q_heads, found.kv_heads, found.head_dim, found.group) == want.shape
    assert (found.dtype, found.stores) == (want.dtype, "k" if want.mla else "kv")
    assert model.architecture == config(name)["architectures"][0]
    assert (model.layers, model.window, model.window_pattern) == (want.layers, want.window, want.pattern)
    assert (model.sinks, model.qk_norm, model.mla) == (want.sinks, want.qk_norm, want.mla)
    assert (model.alibi, model.logit_softcap) == (want.alibi, want.softcap)
    if want.alibi:
        assert rope is None
        return
    assert rope is not None
    assert (rope.style, rope.theta, rope.dim, rope.local_theta) == (
        want.style,
        want.theta,
        want.rope_dim,
        want.local_theta,
    )
    if want.scaling is LongRopeScaling:
        assert isinstance(rope.scaling, LongRopeScaling)
    else:
        assert rope.scaling == want.scaling


def test_configs_reach_the_shapes_that_matter() -> None:
    found = [models.facts(config(name)) for name in NAMES]
    assert {1, 4, 7, 8, 16, 71} <= {facts.group for facts in found}
    assert {64, 96, 128, 256} <= {facts.head_dim for facts in found}


def test_scales() -> None:
    def scale(name: str) -> float:
        facts = models.facts(config(name))
        return facts.model.softmax_scale(facts.head_dim)

    assert scale("llama_3_1_8b") == pytest.approx(128**-0.5)
    assert scale("gemma_3_27b_it") == pytest.approx(168**-0.5)
    assert scale("deepseek_v3") == pytest.approx(192**-0.5 * (0.1 * math.log(40.0) + 1.0) ** 2)
    assert scale("deepseek_v3") == pytest.approx(0.13523378, rel=1e-6)

    def cos_sin(name: str) -> float:
        rope = models.facts(config(name)).model.rope
        assert rope is not None and isinstance(rope.scaling, YarnScaling | LongRopeScaling)
        return rope.scaling.cos_sin_factor

    assert cos_sin("gpt_oss_20b") == pytest.approx(1.34657359)
    assert cos_sin("deepseek_v3") == 1.0
    assert cos_sin("phi_3_5_mini") == pytest.approx(1.19023807)


def test_layer_windows() -> None:
    gemma = models.facts(config("gemma_3_4b_it")).model
    assert [i for i in range(34) if gemma.layer_window(i) is None] == [5, 11, 17, 23, 29]
    assert gemma.layer_window(0) == 1024
    oss = models.facts(config("gpt_oss_20b")).model
    assert [oss.layer_window(i) for i in range(4)] == [128, None, 128, None]
    assert models.facts(config("phi_3_mini_4k")).model.layer_window(31) == 2047
    assert models.facts(config("llama_3_1_8b")).model.layer_window(0) is None


def test_gemma_2_cap_absent_and_null_differ() -> None:
    assert models.facts(without("gemma_2_9b_it", "attn_logit_softcapping")).model.logit_softcap == 50.0
    assert models.facts(changed("gemma_2_9b_it", attn_logit_softcapping=None)).model.logit_softcap is None
    assert models.facts(changed("gemma_2_9b_it", attn_logit_softcapping=30)).model.logit_softcap == 30.0
    gemma_27b = models.facts(changed("gemma_2_9b_it", query_pre_attn_scalar=144, head_dim=128))
    assert gemma_27b.model.softmax_scale(128) == pytest.approx(1 / 12)
    assert [models.facts(config("gemma_2_9b_it")).model.layer_window(i) for i in range(3)] == [4096, None, 4096]


def test_falcon_kv_heads() -> None:
    falcon_40b = changed(
        "falcon_7b",
        hidden_size=8192,
        num_attention_heads=128,
        num_hidden_layers=60,
        num_kv_heads=8,
        new_decoder_architecture=True,
    )
    assert models.facts(falcon_40b).kv_heads == 8
    assert models.facts(changed("falcon_7b", multi_query=False)).kv_heads == 71
    assert models.facts(without("falcon_7b", "multi_query", "num_kv_heads")).kv_heads == 1
    old = models.facts(changed("falcon_7b", alibi=True)).model
    assert (old.alibi, old.rope) == (True, None)


def test_bloom_spellings() -> None:
    """bigscience/bloom-560m itself still has the older ones."""
    old = without("bloom_560m", "n_head", "hidden_size") | {"num_attention_heads": 16, "n_embed": 1024}
    assert models.facts(old) == models.facts(config("bloom_560m"))


def test_mpt_attention() -> None:
    attention = config("mpt_7b")["attn_config"]

    def facts(**fields: Any) -> Checkpoint:
        return models.facts(changed("mpt_7b", attn_config={**attention, **fields}))

    assert facts(attn_type="multiquery_attention").kv_heads == 1
    assert facts(attn_type="grouped_query_attention", kv_n_heads=8).kv_heads == 8
    assert facts(softmax_scale=0.05).model.softmax_scale(128) == pytest.approx(0.05)
    assert facts(alibi=False).model.alibi is False
    assert models.facts(changed("mpt_7b", attn_config=None)) == models.facts(config("mpt_7b"))
    with pytest.raises(ConfigError, match=r"attn_config\.qk_ln: got true; append has RMS norms"):
        facts(qk_ln=True)


def test_qwen_window_counts_only_when_used() -> None:
    used = models.facts(changed("qwen2_5_7b", use_sliding_window=True, sliding_window=4096, max_window_layers=21)).model
    assert used.window == 4096
    assert [i for i in range(28) if used.layer_window(i) is not None] == list(range(21, 28))
    all_local = models.facts(changed("qwen2_5_7b", use_sliding_window=True, max_window_layers=0)).model
    assert (all_local.window, all_local.window_pattern) == (131_072, None)


def test_mistral_window_absent_and_null_differ() -> None:
    assert models.facts(without("mistral_7b_v03", "sliding_window")).model.window == 4096
    assert models.facts(config("mistral_7b_v03")).model.window is None
    assert models.facts(changed("mistral_7b_v03", sliding_window=1000)).model.window == 1000


def test_partial_rotary() -> None:
    phi4_mini = changed(
        "phi_3_mini_4k", num_attention_heads=24, num_key_value_heads=8, partial_rotary_factor=0.75, sliding_window=None
    )
    found = models.facts(phi4_mini)
    assert (found.head_dim, found.group, found.model.rope) == (128, 3, Rope(style="neox", theta=10_000.0, dim=96))


def test_transformers_5_spelling() -> None:
    old = config("llama_3_1_8b")
    new = {k: v for k, v in old.items() if k not in ("rope_scaling", "rope_theta", "torch_dtype")}
    new |= {"dtype": "bfloat16", "rope_parameters": {**old["rope_scaling"], "rope_theta": 500_000.0}}
    assert models.facts(new) == models.facts(old)

    gemma = config("gemma_3_4b_it")
    text = {k: v for k, v in gemma["text_config"].items() if k != "rope_scaling"}
    text["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0},
    }
    text["layer_types"] = [f"{'full' if i % 6 == 5 else 'sliding'}_attention" for i in range(34)]
    rope = models.facts({**gemma, "text_config": text}).model.rope
    assert rope == Rope(style="neox", theta=1_000_000.0, scaling=LinearScaling(factor=8.0), local_theta=20_000.0)


def test_yarn_defaults_come_from_the_model() -> None:
    qwen = changed("qwen2_5_7b", rope_scaling={"type": "yarn", "factor": 4.0}, max_position_embeddings=32_768)
    rope = models.facts(qwen).model.rope
    assert rope is not None and rope.scaling == YarnScaling(factor=4.0, original_max_positions=32_768)


@pytest.mark.parametrize("name", WRITTEN)
def test_model_type_stands_in_for_architectures(name: str) -> None:
    """But for the class that the spec names: a multimodal file's model_type stands for its text model."""
    given, implied = (models.facts(values) for values in (config(name), without(name, "architectures")))
    assert implied.model.architecture is not None
    named = implied.model.model_copy(update={"architecture": given.model.architecture})
    assert replace(implied, model=named) == given


def test_shipped_example_is_the_tested_config() -> None:
    shipped = ROOT / "kvgen" / "models" / models.EXAMPLE
    assert shipped.read_bytes() == (CONFIGS / "llama_3_1_8b.json").read_bytes()
    assert models.example() == config("llama_3_1_8b")


# Specs ---------------------------------------------------------------------------------------------------------------


def spec_of(stem: str) -> str:
    source = f"tests/models/configs/{SPECS[stem]}.json"
    return models.spec_text(models.read(ROOT / source), source=source, name=stem)


@pytest.mark.parametrize("stem", SPECS)
def test_checked_in_specs_are_what_init_writes(stem: str) -> None:
    """The specs of specs/, and of tests/sets."""
    assert spec_path(stem).read_bytes() == spec_of(stem).encode()


@pytest.mark.parametrize("stem", SPECS)
def test_specs_load_as_the_same_facts(stem: str) -> None:
    kernels = runpy.run_path(str(spec_path(stem)))["kernels"]
    facts = models.facts(config(SPECS[stem]))
    if facts.model.mla:  # and a set of the heads of prompts
        kernels, prompts = kernels
        assert prompts.cache.kv_heads == facts.q_heads and prompts.name == f"{stem}_prompts"
    assert isinstance(kernels, KernelSet)
    assert (kernels.q_heads, kernels.cache.kv_heads, kernels.cache.head_dim) == (
        facts.q_heads,
        facts.kv_heads,
        facts.head_dim,
    )
    assert (kernels.cache.dtype, kernels.cache.stores, kernels.model) == (facts.dtype, facts.stores, facts.model)
    assert kernels.cache.rope_part == (facts.model.mla.qk_rope_head_dim if facts.model.mla else 0)


@pytest.mark.parametrize("name", WRITTEN)
def test_text_says_exactly_the_facts(name: str) -> None:
    assert model_in(models.spec_text(config(name), source=name)) == models.facts(config(name)).model


def test_text_is_formatted_as_ruff_would(tmp_path: Path) -> None:
    for name in WRITTEN:
        (tmp_path / f"{name}.py").write_text(models.spec_text(config(name), source=f"{name}.json"))
    for command in (["format", "--check"], ["check", "--select", "E,F,I,UP,B,SIM,RUF"]):
        ran = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--isolated", "--line-length", "120", str(tmp_path)],
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_arch_and_name() -> None:
    assert 'arch=["sm_89"],' in models.spec_text(config("llama_3_1_8b"), source="x", arch=["sm_89"])
    assert models.default_name(config("llama_3_1_8b")) == "llama_32x8x128"
    assert models.default_name(config("gpt_oss_20b")) == "gpt_oss_64x8x64"
    assert models.default_name(config("qwen3_30b_a3b")) == "qwen3_moe_32x4x128"
    assert all(re.fullmatch(r"[a-z][a-z0-9_]{0,39}", models.default_name(config(name))) for name in NAMES)
