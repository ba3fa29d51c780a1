"""The table of families: what was once read wrong, wrappers, and facts of layers that differ."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from kvgen import models
from kvgen.errors import ConfigError
from kvgen.lowering.frequencies import inverse_frequencies
from kvgen.models.families import BY_CLASS, BY_TYPE, FAMILIES
from kvgen.models.missing import MISSING
from kvgen.models.wrappers import TEXT_OF_TYPE
from kvgen.reference.rope import frequencies as reference_frequencies
from kvgen.schema.loader import load_file
from kvgen.schema.model import Indexer, LinearScaling, Llama3Scaling, LongRopeScaling, Rope, YarnScaling

from .checkpoints import changed, config, without


def rope(found: dict[str, Any]) -> Rope:
    made = models.facts(found).model.rope
    assert made is not None
    return made


# What was read wrong --------------------------------------------------------------------------------------------------

LONG = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}


@pytest.mark.parametrize(
    ("fields", "factor"),
    [
        ({}, math.sqrt(1 + math.log(32) / math.log(4096))),  # max / original
        ({"factor": 16.0}, math.sqrt(1 + math.log(16) / math.log(4096))),
        ({"factor": 16.0, "attention_factor": 1.5}, 1.5),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_longrope_factor_wins_over_the_lengths(fields: dict[str, Any], factor: float) -> None:
    found = changed(
        "phi_3_mini_4k", rope_scaling=None, rope_parameters={**LONG, **fields}, max_position_embeddings=131_072
    )
    scaling = rope(found).scaling
    assert isinstance(scaling, LongRopeScaling) and scaling.cos_sin_factor == pytest.approx(factor)


@pytest.mark.parametrize(
    ("name", "kv_heads"),
    [("mistral_7b_v03", 8), ("qwen3_8b", 32), ("qwen3_30b_a3b", 4), ("gpt_oss_20b", 8), ("gemma_2_9b_it", 4)],
)
def test_absent_kv_heads_are_the_class_default(name: str, kv_heads: int) -> None:
    assert models.facts(without(name, "num_key_value_heads")).kv_heads == kv_heads
    assert models.facts(changed(name, num_key_value_heads=None)).group == 1, "null is one a query head"


def test_gpt_oss_without_rope_has_yarn() -> None:
    yarn = YarnScaling(factor=32.0, original_max_positions=4096, truncate=False)
    for found in (without("gpt_oss_20b", "rope_scaling"), without("gpt_oss_20b", "rope_scaling", "rope_theta")):
        assert rope(found) == Rope(style="neox", theta=150_000.0, scaling=yarn)


def test_local_layers_may_be_scaled() -> None:
    gemma = config("gemma_3_4b_it")
    text = {key: value for key, value in gemma["text_config"].items() if key not in ("rope_scaling", "rope_theta")}
    text["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    }
    layers = models.facts({**gemma, "text_config": text}).layers()
    ropes = {layer.kind: layer.rope for layer in layers}
    assert ropes["local"] == Rope(style="neox", theta=1e4, scaling=LinearScaling(factor=2.0))
    assert ropes["full"] == Rope(style="neox", theta=1e6, scaling=LinearScaling(factor=8.0))


def test_rope_scaling_wins_over_rope_parameters() -> None:
    both = changed("llama_2_7b", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert rope({**both, "rope_scaling": {"type": "linear", "factor": 2.0}}).scaling == LinearScaling(factor=2.0)
    assert rope({**both, "rope_scaling": {}}) == Rope(style="neox", theta=5e5), "an empty one says nothing"


@pytest.mark.parametrize("name", ["gemma_2_9b_it", "gemma_3_4b_it"])
def test_a_model_that_looks_both_ways_is_refused(name: str) -> None:
    found = config(name)
    place = found.get("text_config", found)
    place["use_bidirectional_attention"] = True
    with pytest.raises(ConfigError, match=r"use_bidirectional_attention: got true; kvgen's decode is causal"):
        models.facts(found)
    place["use_bidirectional_attention"] = False
    models.facts(found)


@pytest.mark.parametrize("name", ["gemma_2_9b_it", "gpt_oss_20b", "qwen2_5_7b", "mistral_7b_v03"])
def test_a_null_window_is_none(name: str) -> None:
    found = changed(name, sliding_window=None, use_sliding_window=True)
    assert {layer.window for layer in models.facts(found).layers()} == {None}


def test_mscale_all_dim_scales_under_any_scaling() -> None:
    linear = {"rope_type": "linear", "factor": 40.0, "mscale_all_dim": 1.0}
    found = models.facts(changed("deepseek_v3", rope_scaling=linear))
    assert found.layers()[0].scale == pytest.approx(192**-0.5 * (0.1 * math.log(40.0) + 1.0) ** 2)
    assert found.model.softmax_scale(576) == pytest.approx(found.layers()[0].scale)
    plain = models.facts(changed("deepseek_v3", rope_scaling={"rope_type": "default", "mscale_all_dim": 1.0}))
    assert plain.layers()[0].scale == pytest.approx(192**-0.5)


def test_phi_3_own_length_comes_first() -> None:
    inside = {**LONG, "original_max_position_embeddings": 2048}
    found = changed(
        "phi_3_mini_4k", rope_scaling=inside, original_max_position_embeddings=1024, max_position_embeddings=8192
    )
    scaling = rope(found).scaling
    assert isinstance(scaling, LongRopeScaling) and scaling.original_max_positions == 1024


def test_null_multi_query_is_false() -> None:
    assert models.facts(changed("falcon_7b", multi_query=None)).kv_heads == 71


def test_partial_rotary_factor_under_default_rope() -> None:
    """transformers' Llama rotates whole heads then; where RoPE is scaled it rotates the part, and GLM's code always does."""
    found = changed("llama_2_7b", partial_rotary_factor=0.5)
    assert rope(found).dim is None
    assert "partial_rotary_factor 0.5 is not used" in models.spec_text(found, source="x")
    assert rope({**found, "rope_scaling": {"type": "linear", "factor": 2.0}}).dim == 64
    glm = {**config("llama_2_7b"), "architectures": ["GlmForCausalLM"], "num_key_value_heads": 2, "head_dim": 128}
    assert rope({**glm, "partial_rotary_factor": 0.25}).dim == 32
    assert rope(glm).dim == 64, "the class default is a half"


def test_llama3_scaling_without_its_length() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    found = rope(changed("llama_3_1_8b", rope_scaling=scaling)).scaling
    assert isinstance(found, Llama3Scaling) and found.original_max_positions == 131_072


# Layers that differ ---------------------------------------------------------------------------------------------------

BASE = {"num_attention_heads": 16, "num_hidden_layers": 8, "hidden_size": 2048, "num_key_value_heads": 4}


def layers(model_type: str, **fields: Any) -> list[models.LayerFacts]:
    return models.facts({**BASE, "model_type": model_type, **fields}).layers()


def test_layers_without_rope() -> None:
    assert [layer.rope is None for layer in layers("smollm3")] == [False, False, False, True] * 2
    cohere = layers("cohere2")
    assert [layer.rope is None for layer in cohere] == [False, False, False, True] * 2
    assert [layer.window for layer in cohere] == [4096, 4096, 4096, None] * 2
    assert all(layer.rope is not None for layer in layers("exaone4", sliding_window=None))


def test_gemma_4() -> None:
    found = layers("gemma4_text", num_hidden_layers=12, num_kv_shared_layers=4)
    assert [layer.head_dim_k for layer in found] == [256] * 5 + [512] + [256] * 5 + [512]
    assert [layer.kv_source for layer in found] == [None] * 8 + [7, 7, 7, 5]
    assert found[0].scale == 1.0 and found[0].window == 512
    assert found[5].proportional and found[5].rope is not None and found[5].rope.dim == 128
    assert found[0].v_norm is not None and not found[0].v_norm.weight
    unshared = layers("gemma4_text", attention_k_eq_v=True, num_global_key_value_heads=2)
    assert [layer.kv_heads for layer in unshared] == [4, 4, 4, 4, 4, 2, 4, 2]


def test_llama_4() -> None:
    found = layers("llama4_text", num_attention_heads=40, num_key_value_heads=8)
    assert [layer.chunk for layer in found] == [8192, 8192, 8192, None] * 2
    chunked, full = found[0], found[3]
    assert chunked.q_norm is not None and (chunked.q_norm.order, chunked.q_norm.weight) == ("after", False)
    assert full.q_norm is None and full.rope is None
    assert full.q_scale is not None and (full.q_scale.coefficient, full.q_scale.positions) == (0.1, 8192)


def test_heads_and_sinks_by_kind() -> None:
    mimo = layers("mimo_v2_flash", num_attention_heads=64)
    assert [(layer.kv_heads, layer.sinks) for layer in mimo[:2]] == [(4, False), (8, True)]
    assert (mimo[0].head_dim_k, mimo[0].head_dim_v) == (192, 128)
    step = layers(
        *("step3p5",),
        layer_types=["full_attention", "sliding_attention"] * 4,
        sliding_window=512,
        attention_other_setting={"num_attention_heads": 24},
    )
    assert [(layer.q_heads, layer.window) for layer in step[:2]] == [(16, None), (24, 512)]


def test_hybrids_name_the_layers_without_a_cache() -> None:
    assert [layer.kind for layer in layers("qwen3_next")] == ["linear", "linear", "linear", "full"] * 2
    nemotron = models.facts({**BASE, "model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-M"}).layers()
    assert [layer.kind for layer in nemotron] == ["mamba", "mlp", "mamba", "full", "mlp", "mamba"]
    assert [layer.cache for layer in nemotron] == [False, False, False, True, False, False]
    with pytest.raises(ConfigError, match="no layer of it has keys and values"):
        models.facts({**BASE, "model_type": "qwen3_next", "layer_types": ["linear_attention"] * 8})


def test_sections() -> None:
    vl = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6}
    qwen2, qwen3 = layers("qwen2_vl_text", rope_scaling=vl)[0], layers("qwen3_vl_text")[0]
    assert (qwen2.mrope, qwen2.interleaved) == ((16, 24, 24), False)
    assert (qwen3.mrope, qwen3.interleaved) == ((24, 20, 20), True)
    text = models.spec_text({**BASE, "model_type": "qwen2_vl", "rope_scaling": vl}, source="x")
    assert 'positions="given", sections=(16, 24, 24)' in text


@pytest.mark.parametrize(
    "name", ["gemma4_text", "laguna", "mellum", "cohere_compass_text", "beam", "mimo_v2_flash", "lfm3"]
)
def test_no_share_beside_parameters_by_kind(name: str) -> None:
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    kinds = {kind: linear for kind in ("full_attention", "sliding_attention")}
    plain, beside = (
        [layer.rope for layer in layers(name, rope_parameters=kinds, num_kv_shared_layers=0, **fields)]
        for fields in ({}, {"partial_rotary_factor": 0.5})
    )
    assert plain == beside


@pytest.mark.parametrize("name", ["apertus", "cwm", "muse_spark_text", "cosmos3_edge_text"])
def test_no_base_beside_whole_parameters(name: str) -> None:
    assert layers(name)[0].rope == layers(name, rope_theta=5.0)[0].rope


def test_what_counts_beside_the_parameters() -> None:
    """Some families take bases and shares from rope_parameters alone, or have whole parameters as their default."""
    alone = layers("mellum", partial_rotary_factor=0.5, rope_theta=5.0)[0].rope
    assert alone is not None and (alone.theta, alone.dim) == (500_000.0, None)
    cwm = layers("cwm", rope_theta=5.0)[0].rope
    assert cwm is not None and cwm.theta == 1e6 and isinstance(cwm.scaling, Llama3Scaling)
    oss = layers("gpt_oss", rope_theta=5.0)[0].rope
    assert oss is not None and oss.theta == 5.0


# What append does for them --------------------------------------------------------------------------------------------

PLANNED = [
    ("hunyuan_v1_dense", {}, ['norm_order="after"', "q_norm=RmsNorm(eps=1e-05)"]),
    (
        "gemma3n_text",
        {"num_kv_shared_layers": 2},
        ["v_norm=RmsNorm(weight=False)", 'name="append_local_shared"', 'inputs="q"', "kv_source="],
    ),
    (
        "gemma4_text",
        {"num_kv_shared_layers": 2},
        ["v_norm=RmsNorm(weight=False)", 'inputs="q"', "dim=128, proportional=True"],
    ),
    ("cohere", {"use_qk_norm": True}, ["q_norm=LayerNorm(per_head=True)", "k_norm=LayerNorm(per_head=True)"]),
    ("stablelm", {"qk_layernorm": True, "num_key_value_heads": 4}, ["q_norm=LayerNorm(per_head=True)"]),
    ("phi", {"qk_layernorm": True}, ["q_norm=LayerNorm(bias=True)"]),
    ("persimmon", {}, ["q_norm=LayerNorm(bias=True)", "k_norm=LayerNorm(bias=True)"]),
    ("chameleon", {}, ["q_norm=LayerNorm(bias=True, per_head=True)"]),
    (
        "llama4_text",
        {},
        [
            "ops.Append(position_scale=PositionScale(scale=0.1, period=8192, offset=1))",
            "q_norm=RmsNorm(eps=1e-05, weight=False)",
            'norm_order="after"',
            "mask=Mask(chunk=8192)",
        ],
    ),
    ("ministral3", {}, ["position_scale=PositionScale(scale=0.1, period=16_384)"]),
    (
        "mistral4",
        {"kv_lora_rank": 256, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 128},
        ["position_scale=PositionScale(scale=0.1, period=8192), q_dim=320"],
    ),
    ("qwen3_vl_text", {"num_key_value_heads": 4}, ['sections=(24, 20, 20), sections_order="interleaved"']),
    (
        "muse_spark_text",
        {"num_key_value_heads": 4, "head_dim": 64},
        ["RmsNorm(eps=1e-05, weight=False)", "scale=0.68412581079"],
    ),
    ("lfm3", {}, ["dim=64, proportional=True"]),
]


@pytest.mark.parametrize(("model_type", "fields", "said"), PLANNED, ids=[row[0] for row in PLANNED])
def test_append_has_what_the_model_asks(
    model_type: str, fields: dict[str, Any], said: list[str], tmp_path: Path
) -> None:
    """The spec's text says it, and every operation of the spec plans."""
    text = models.spec_text({**BASE, "model_type": model_type, **fields}, source="x", name="made")
    flat = " ".join(text.split()).replace("( ", "(").replace(", )", ")")
    assert [one for one in said if one not in flat] == [], text
    (tmp_path / "made.py").write_text(text, encoding="utf-8")
    for made in load_file(tmp_path / "made.py", "made.py"):
        for op in made.kernels.ops:
            assert op.plan(made.kernels)


def test_a_query_scale_needs_whole_positions() -> None:
    with pytest.raises(
        ConfigError, match=r"floor_scale: got 8192.5; it counts positions; valid: a whole number from 1"
    ):
        layers("llama4_text", floor_scale=8192.5)


def test_a_window_of_tokens_before_the_query() -> None:
    """MiMo's files count the tokens before the query's own; transformers adds it, whatever sliding_window says."""
    published = models.facts(config("mimo_v2_flash")).layers()
    assert {layer.window for layer in published if layer.kind == "local"} == {129}
    assert layers("mimo_v2_flash", num_attention_heads=64, sliding_window=77, sliding_window_size=15)[1].window == 16
    assert layers("mimo_v2_flash", num_attention_heads=64, sliding_window=77)[1].window == 77


def test_k_and_v_of_two_widths_have_a_tensor_each() -> None:
    text = models.spec_text(config("mimo_v2_flash"), source="x", kv_dtype="f32")
    assert 'layout=Layout(k="page layer token head dim", v="page layer token head dim")' in text


def test_latent_models_have_no_windows() -> None:
    """transformers' DeepSeek code masks causally, whatever layer_types says."""
    for name in ("deepseek_v3", "deepseek_v2_lite"):
        count = config(name)["num_hidden_layers"]
        found = changed(name, layer_types=["sliding_attention"] * count, sliding_window=64)
        assert {layer.window for layer in models.facts(found).layers()} == {None}


@pytest.mark.parametrize(("given", "style"), [({}, "interleaved"), ({"rope_interleave": None}, "neox")])
def test_null_rope_interleave_is_false(given: dict[str, Any], style: str) -> None:
    assert rope({**without("deepseek_v3", "rope_interleave"), **given}).style == style


@pytest.mark.parametrize("name", ["deepseek_v3", "llama_2_7b", "gemma_2_9b_it"])
def test_the_length_beside_the_scaling_wins(name: str) -> None:
    """transformers reads RoPE's parameters again as it builds a model, and then takes that field; so does vLLM."""
    inside = {"original_max_position_embeddings": 4096}
    beside = {"original_max_position_embeddings": 2048}
    for more, fields, expected in ((inside, {}, 4096), (inside, beside, 2048), ({}, beside, 2048), ({}, {}, 8192)):
        yarn = {"rope_type": "yarn", "factor": 4.0, **more}
        scaling = rope(changed(name, rope_scaling=yarn, max_position_embeddings=8192, **fields)).scaling
        assert isinstance(scaling, YarnScaling) and scaling.original_max_positions == expected


def test_the_length_beside_the_scaling_scales_q() -> None:
    """Ministral 3 scales q by the length that YaRN has."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "llama_4_scaling_beta": 0.1}
    for beside, expected in (({}, 4096), ({"original_max_position_embeddings": 2048}, 2048)):
        found = models.facts(typed("ministral3", rope_parameters=yarn, **beside)).layers()[0].q_scale
        assert found is not None and found.positions == expected


# From here: single-field changes that model_sweep found wrong in November 2026.


def typed(model_type: str, **fields: Any) -> dict[str, Any]:
    return {**BASE, "model_type": model_type, **fields}


@pytest.mark.parametrize("name", ["llama", "glm4", "gpt_neox", "phi", "olmo2", "qwen3_vl_text", "opt"])
def test_layer_types_mean_nothing_without_windows(name: str) -> None:
    sliding = typed(name, sliding_window=64, layer_types=["sliding_attention"] * BASE["num_hidden_layers"])
    assert all(layer.window is None for layer in models.facts(sliding).layers())


def test_every_layer_of_phimoe_has_the_window() -> None:
    types = ["full_attention"] * BASE["num_hidden_layers"]
    assert {layer.window for layer in models.facts(typed("phimoe", sliding_window=64, layer_types=types)).layers()} == {
        64
    }


def test_layer_types_win_over_smollm3s_flag() -> None:
    """use_sliding_window makes layer_types where a config has none."""
    types = ["sliding_attention", "full_attention"] * (BASE["num_hidden_layers"] // 2)
    found = models.facts(typed("smollm3", sliding_window=64, use_sliding_window=False, layer_types=types)).layers()
    assert [layer.window for layer in found[:2]] == [64, None]


@pytest.mark.parametrize("name", ["laguna", "mellum", "step3p5", "ministral", "moshi", "kyutai_speech_to_text"])
def test_layer_types_choose_the_windows(name: str) -> None:
    types = ["sliding_attention", "full_attention"] * (BASE["num_hidden_layers"] // 2)
    found = models.facts(typed(name, sliding_window=64, layer_types=types)).layers()
    assert [layer.window for layer in found] == [64, None] * (BASE["num_hidden_layers"] // 2)


def test_step_3_5_that_looks_both_ways_is_refused() -> None:
    with pytest.raises(ConfigError, match="use_bidirectional_attention: got true; kvgen's decode is causal"):
        models.facts(typed("step3p5", use_bidirectional_attention=True))


@pytest.mark.parametrize("name", ["cohere2", "recurrent_gemma", "zamba2"])
def test_a_head_dim_that_is_given_wins(name: str) -> None:
    field = "attention_head_dim" if name == "zamba2" else "head_dim"
    layers = 54 if name == "zamba2" else BASE["num_hidden_layers"]
    whole = {**typed(name, hidden_size=4096, num_attention_heads=32), "num_hidden_layers": layers}
    assert models.facts({**whole, field: 64}).head_dim == 64
    assert models.facts(whole).head_dim == (256 if name == "zamba2" else 128)


@pytest.mark.parametrize("name", ["zamba", "zamba2"])
def test_only_hybrid_layers_of_zamba_have_attention(name: str) -> None:
    layers = BASE["num_hidden_layers"]
    words = ["linear_attention"] * (layers - 1) + ["hybrid"]
    found = models.facts(typed(name, layers_block_type=words))
    assert [layer.cache for layer in found.layers()] == [False] * (layers - 1) + [True]
    with pytest.raises(ConfigError, match=r"full_attention"):
        models.facts(typed(name, layers_block_type=["full_attention"] * layers))


def test_a_null_multiplier_is_the_head_dims() -> None:
    assert models.facts(typed("granitemoe")).layers()[0].scale == 1.0
    null = models.facts(typed("granitemoe", attention_multiplier=None))
    assert null.layers()[0].scale == pytest.approx(null.head_dim**-0.5)


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"num_layers_per_stack": 2}, 2 * 2 * (3 + 1)),
        ({"num_layers_per_stack": None}, BASE["num_hidden_layers"] * 2 * (3 + 1)),
        ({"H_cycles": 1, "L_cycles": 1}, BASE["num_hidden_layers"] * 2),
    ],
)
def test_each_run_of_a_stack_has_a_cache(fields: dict[str, Any], layers: int) -> None:
    assert len(models.facts(typed("hrm_text", **fields)).layers()) == layers


def test_mimo_rotates_a_third_under_default_rope_alone() -> None:
    def rotary_dim(**fields: Any) -> int | None:
        both = {kind: {"rope_theta": 1e4, **fields} for kind in ("full_attention", "sliding_attention")}
        found = models.facts(typed("mimo_v2_flash", head_dim=192, rope_parameters=both)).layers()[0].rope
        assert found is not None
        return found.dim

    assert rotary_dim(rope_type="default") == 64
    assert rotary_dim(rope_type="default", partial_rotary_factor=0.5) == 96
    assert rotary_dim(rope_type="linear", factor=2.0) is None


@pytest.mark.parametrize("name", ["gemma3_text", "gemma3n_text", "olmo3", "step3p5", "modernbert-decoder"])
def test_parameters_that_are_not_by_kind_are_not_read(name: str) -> None:
    """These classes look for an entry a kind of layers, and have defaults where there is none."""
    plain, flat = (
        [layer.rope for layer in models.facts(typed(name, num_kv_shared_layers=0, **fields)).layers()]
        for fields in ({}, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e4}})
    )
    assert plain == flat


def test_the_older_name_of_a_type_loses_to_the_default_by_kind() -> None:
    found = models.facts(typed("gemma3_text", rope_scaling={"type": "linear", "factor": 8.0})).model.rope
    assert found is not None and found.scaling is None
    found = models.facts(typed("gemma3_text", rope_scaling={"rope_type": "linear", "factor": 8.0})).model.rope
    assert found is not None and found.scaling == LinearScaling(factor=8.0)


def test_step_3_5_reads_no_scaling_beside_parameters_by_kind() -> None:
    kinds = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}
    linear = {"rope_type": "linear", "factor": 2.0}
    found = models.facts(typed("step3p5", rope_parameters=kinds, rope_scaling=linear)).layers()
    assert all(layer.rope is not None and layer.rope.scaling is None for layer in found)


def test_muse_sparks_base_where_its_parameters_have_none() -> None:
    whole, part = (
        models.facts(typed("muse_spark_text", **fields)).layers()[0].rope
        for fields in ({}, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}})
    )
    assert whole is not None and whole.theta == 500_000.0
    assert part is not None and part.theta == 10_000.0


def test_llama3_scaling_without_a_band() -> None:
    """Llama 4 Scout's factors are equal: every frequency is kept or divided, and none is blended."""
    scaling = models.facts(config("llama_4_scout")).layers()[0].rope
    assert scaling is not None and isinstance(scaling.scaling, Llama3Scaling)
    assert scaling.scaling.low_freq_factor == scaling.scaling.high_freq_factor == 1.0
    plain = inverse_frequencies(scaling.model_copy(update={"scaling": None}), 128)
    divided = [2 * math.pi / f > scaling.scaling.original_max_positions for f in plain]
    assert 0 < sum(divided) < len(divided)
    expected = [f / scaling.scaling.factor if far else f for f, far in zip(plain, divided, strict=True)]
    assert inverse_frequencies(scaling, 128) == pytest.approx(expected, rel=1e-6)
    assert reference_frequencies(scaling, 128) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(
        ConfigError, match=r"high_freq_factor: got 0.5; it must not be below low_freq_factor; valid: from 1"
    ):
        bad = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 0.5}
        models.facts(changed("llama_3_1_8b", rope_scaling=bad))


# Wrappers, refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["text_config", "language_config", "llm_config"])
def test_a_text_config_names_its_own_family(place: str) -> None:
    text = {**config("qwen3_8b"), "architectures": None}
    found = models.facts({"architectures": ["SomeVisionModel"], "model_type": "new_thing", place: text})
    assert found.layers() == models.facts(config("qwen3_8b")).layers()
    assert found.model.architecture == "SomeVisionModel"


def test_a_wrapper_says_what_its_text_model_is() -> None:
    text = {key: value for key, value in config("llama_2_7b").items() if key not in ("architectures", "model_type")}
    wrapped = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    assert models.facts(wrapped).layers() == models.facts(config("llama_2_7b")).layers()


def test_every_refused_type_says_why() -> None:
    for model_type, why in MISSING.items():
        with pytest.raises(ConfigError) as error:
            models.facts({**BASE, "model_type": model_type})
        assert why in str(error.value), model_type


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        (
            {"model_type": "beam"},
            r"layers: BeamForCausalLM's full layers ask for q multiplied by \(1 \+ \(position \+ 1\) / 2048\)",
        ),
        (
            {"model_type": "ernie4_5_vl_moe_text"},
            r"asks for M-RoPE whose pairs go h w h w, then t, which no operation has yet",
        ),
    ],
)
def test_features_that_no_operation_has_are_named(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        models.spec_text({**BASE, **fields}, source="x")


def test_sections_of_elements_are_refused() -> None:
    """HunYuanVL deals the elements of a head to positions; transformers runs no config of it without such sections."""
    fields = {**BASE, "model_type": "hunyuan_vl_text", "rope_scaling": {"type": "xdrope", "xdrope_section": [16] * 4}}
    with pytest.raises(
        ConfigError, match=r"kvgen does not read it: sections of positions that are of a head's elements"
    ):
        models.facts(fields)


def test_rope_that_rotates_backwards_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"kvgen does not read it: RoPE that rotates backwards, by the opposite angle"
    ):
        models.facts({**BASE, "model_type": "nanochat"})


ROWS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}


def test_sparse_latent_models_of_2026() -> None:
    """A.X-K2 rotates pairs (2i, 2i + 1) and gates outside of the kernels; HY-V4 rotates halves, and its layers have sinks."""
    axk2 = models.facts({**BASE, **ROWS, "model_type": "axk2", "q_lora_rank": 384}).cached
    assert len(axk2) == 1 and axk2[0].indexer == Indexer(heads=16, dim=128, topk=2048) and not axk2[0].sinks
    assert axk2[0].rope is not None and axk2[0].rope.style == "interleaved"
    hy = models.facts({**BASE, **ROWS, "model_type": "hy_v4", "index_topk": 1024}).cached
    assert hy[0].indexer == Indexer(heads=16, dim=128, topk=1024) and all(kind.sinks for kind in hy)
    assert hy[0].rope is not None and hy[0].rope.style == "neox"
    text = models.spec_text({**BASE, **ROWS, "model_type": "hy_v4"}, source="x")
    assert re.search(r'ops\.MlaDecode\(scale=[\d.]+, sparse=True, sinks="lse"\)', text)


def test_the_table_names_each_type_once() -> None:
    names = [name for family in FAMILIES for name in family.types.split()]
    assert sorted(names) == sorted(set(names)) and not set(names) & set(MISSING)
    assert len(BY_TYPE) >= 140 and len(BY_CLASS) >= 100
    assert all(text in BY_TYPE or text in MISSING for text in TEXT_OF_TYPE.values())


# Published configs, by the values that decide ---------------------------------------------------------------------------


def test_glm_4_5() -> None:
    found = models.facts(
        {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "num_hidden_layers": 92,
            "hidden_size": 5120,
            "head_dim": 128,
            "partial_rotary_factor": 0.5,
            "rope_theta": 1_000_000,
            "use_qk_norm": True,
            "rms_norm_eps": 1e-5,
        }
    )
    assert (found.q_heads, found.kv_heads, found.head_dim, found.model.qk_norm) == (96, 8, 128, "head")
    assert found.model.rope == Rope(style="neox", theta=1e6, dim=64)


def test_minimax_m2() -> None:
    found = models.facts(
        {
            "architectures": ["MiniMaxM2ForCausalLM"],
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "num_hidden_layers": 62,
            "head_dim": 128,
            "rotary_dim": 64,
            "rope_theta": 5_000_000,
            "rms_norm_eps": 1e-6,
        }
    )
    layer = found.layers()[0]
    assert layer.q_norm is not None and layer.k_norm is not None
    assert (layer.q_norm.over, layer.q_norm.dim, layer.k_norm.dim) == ("row", 48 * 128, 8 * 128)
    assert layer.rope == Rope(style="neox", theta=5e6, dim=64)


def test_kimi_linear() -> None:
    found = models.facts(
        {
            "architectures": ["KimiLinearForCausalLM"],
            "num_attention_heads": 32,
            "num_hidden_layers": 27,
            "hidden_size": 2304,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "kda_layers": []},
        }
    )
    full = [layer.index for layer in found.layers() if layer.cache]
    assert full == [3, 7, 11, 15, 19, 23, 26]
    layer = found.layers()[3]
    assert (layer.head_dim_k, layer.head_dim_v, layer.rope) == (576, 512, None)
    assert layer.scale == pytest.approx(192**-0.5)


def test_qwen3_next() -> None:
    text = models.spec_text(
        {
            "architectures": ["Qwen3NextForCausalLM"],
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "num_hidden_layers": 48,
            "hidden_size": 2048,
            "head_dim": 256,
            "partial_rotary_factor": 0.25,
            "rope_theta": 10_000_000,
            "full_attention_interval": 4,
            "rms_norm_eps": 1e-6,
        },
        source="x",
    )
    assert 'pattern=("linear", "linear", "linear", "full")' in text
    assert 'layers={"full": ("append", "extend", "decode")}' in text
    assert 'rope=Rope(style="neox", theta=10_000_000.0, dim=64)' in text


def test_kinds_share_no_more_than_they_have(tmp_path: Path) -> None:
    """A set for each shape of heads; each names the kinds that it serves, and one model is in all."""
    fields = {"model_type": "mimo_v2_flash", "num_attention_heads": 64, "num_hidden_layers": 6, "hidden_size": 4096}
    (tmp_path / "mimo.py").write_text(models.spec_text(fields, source="x", name="mimo"), encoding="utf-8")
    full, local = (loaded.kernels for loaded in load_file(tmp_path / "mimo.py", "mimo.py"))
    assert (full.name, dict(full.layers)) == ("mimo_full", {"full": ("append", "extend", "decode")})
    assert (local.name, local.cache.kv_heads, local.cache.v_dim) == ("mimo_local", 8, 128)
    assert full.model == local.model and full.model is not None
    assert [full.model.layer_name(i) for i in range(6)] == ["full", *["local"] * 4, "full"]


def test_a_shard_has_its_share_of_every_kind() -> None:
    fields = {"model_type": "mimo_v2_flash", "num_attention_heads": 64, "num_hidden_layers": 6, "hidden_size": 4096}
    four = models.spec_text(fields, source="x", name="mimo", serving=models.Serving(tp=4))
    assert 'name="mimo_full",\n        q_heads=16,' in four and 'name="mimo_local",\n        q_heads=16,' in four
    eight = models.spec_text(fields, source="x", name="mimo", serving=models.Serving(tp=8))
    assert "name=" not in eight.split("ops=")[0], "both kinds then have one KV head, and share a set"
    with pytest.raises(ConfigError, match=r"--tp: got 3 for 64 query heads and 4 KV heads; every GPU has"):
        models.spec_text(fields, source="x", serving=models.Serving(tp=3))


@pytest.mark.parametrize(("name", "tp"), [("minimax_m2_5", 4), ("minimax_m2_5", 16), ("olmo_3_7b", 8)])
def test_norms_over_the_heads_of_all_gpus(name: str, tp: int) -> None:
    """A GPU's set takes the mean square of the whole row; the spec's docstring says which number that is."""
    whole = models.facts(config(name))
    text = models.spec_text(config(name), source="x", serving=models.Serving(tp=tp))
    scope: dict[str, Any] = {}
    exec(compile(text, "spec", "exec"), scope)
    kernels = scope["kernels"]
    assert (kernels.q_heads, kernels.cache.kv_heads) == (whole.q_heads // tp, max(1, whole.kv_heads // tp))
    append = next(op for op in kernels.ops if op.kind == "append")
    for norm in (append.q_norm, append.k_norm):
        assert (norm.over, norm.mean_square, norm.eps) == ("row", "given", whole.kinds[0].q_norm.eps)  # type: ignore[union-attr]
    said = " ".join(text.split('"""')[1].split())
    assert (
        "The norms of q and k are over the heads of all GPUs: append takes q_mean_square and k_mean_square, each token's mean "
        "of squares over them. A GPU computes the mean over its own heads; the sum of these means over the GPUs, divided by "
        "their number, is what append takes. Written by"
    ) in said
    assert "mean_square" not in models.spec_text(config(name), source="x")
