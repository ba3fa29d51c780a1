"""Files as their makers publish them: their constants, sizes and class names, what lies beside them, fields that nobody reads."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvgen import models
from kvgen.errors import ConfigError
from kvgen.models.layers import Checkpoint
from kvgen.models.outside import RopeJson
from kvgen.schema.kernel_set import NAME
from kvgen.schema.loader import load_file
from kvgen.schema.model import YarnScaling
from kvgen.schema.quant import Block, Quant
from tests.cli.conftest import invoke

from .checkpoints import changed, config, without

# Files ---------------------------------------------------------------------------------------------------------------


def test_constants_of_pythons_json(tmp_path: Path) -> None:
    """Nemotron 3 Super has an Infinity in a field that nobody reads; a field that is read takes none."""
    nemotron = {**config("nemotron_h_56b"), "time_step_limit": [0.0, math.inf], "seen": math.nan}
    (tmp_path / "config.json").write_text(json.dumps(nemotron))
    assert "Infinity" in (tmp_path / "config.json").read_text()
    assert models.facts(models.read(tmp_path)) == models.facts(config("nemotron_h_56b"))
    for value in (math.inf, -math.inf, math.nan):
        with pytest.raises(ConfigError, match=r"rope_theta: got -?(inf|nan); it must be a number; valid: "):
            models.facts(changed("llama_3_1_8b", rope_theta=value))
        with pytest.raises(ConfigError, match=r"num_attention_heads: got -?(inf|nan); it must be an integer; valid: "):
            models.facts(changed("llama_3_1_8b", num_attention_heads=value))


def test_a_file_of_three_megabytes(tmp_path: Path) -> None:
    name = "language_model.model.layers.{}.block_sparse_moe.experts.{}.w{}"
    layers = {name.format(i, e, w): {"quant_algo": "NVFP4"} for i in range(60) for e in range(200) for w in (1, 2, 3)}
    quantized = changed("llama_3_1_8b", quantization_config={"quant_algo": "NVFP4", "quantized_layers": layers})
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    assert (tmp_path / "config.json").stat().st_size > 3_000_000
    assert models.facts(models.read(tmp_path / "config.json")) == models.facts(config("llama_3_1_8b"))


def test_what_lies_beside_a_config(tmp_path: Path) -> None:
    """Given the file or its folder; a file is looked for beside a link, not beside what the link leads to."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "blobs" / "1a2b").write_text(json.dumps(config("llama_3_1_8b")))
    (tmp_path / "snapshot" / "config.json").symlink_to("../blobs/1a2b")
    for path in (tmp_path / "snapshot", tmp_path / "snapshot" / "config.json"):
        assert models.read(path) == config("llama_3_1_8b") and models.read_quantization(path) is None
    (tmp_path / "snapshot" / "hf_quant_config.json").write_bytes(b'\xef\xbb\xbf{"quantization": {}}')
    for path in (tmp_path / "snapshot", tmp_path / "snapshot" / "config.json"):
        assert models.read_quantization(path) == {"quantization": {}}


FOLDERS = Path(__file__).parent / "published"
TENSOR = Block(token=None, head=None)
FP8 = Quant(dtype="e4m3", scale_dtype="f32", block=TENSOR, scale="given")
BESIDE = "quantization.kv_cache_quant_algo of hf_quant_config.json"
# Whole files of quantized checkpoints: how KV is stored, and which field says so.
STORED: dict[str, tuple[Quant | None, str]] = {
    "deepseek_v3_1_nvfp4": (FP8, BESIDE),  # config.json has no quantization
    "gemma_4_31b_nvfp4": (FP8, "quantization_config.kv_cache_scheme"),  # both files say it
    "kimi_k2_5": (None, ""),  # text_config has the quantization: a kv_cache_scheme of null
    "llama_3_1_70b_fp8": (FP8, BESIDE),
    "nemotron_3_super_nvfp4": (FP8, BESIDE),  # has a bare Infinity
    "qwen3_32b_fp8_static": (FP8, "quantization_config.kv_cache_scheme"),  # a word
    "qwen3_6_35b_a3b_nvfp4": (FP8, BESIDE),  # config.json has a quantization that says nothing of KV
}


def test_folders_are_those_that_are_tested() -> None:
    assert sorted(path.name for path in FOLDERS.iterdir()) == sorted([*STORED, "mimo_7b"])
    for name, (_, source) in STORED.items():
        assert (FOLDERS / name / "hf_quant_config.json").exists() or source == "", name


@pytest.mark.parametrize("name", STORED)
def test_a_quantized_checkpoints_folder(name: str, tmp_path: Path) -> None:
    quant, source = STORED[name]
    ran = invoke("init", "--from", str(FOLDERS / name), "-o", str(tmp_path / "made.py"))
    assert ran.exit_code == 0, ran.output
    loaded = load_file(tmp_path / "made.py", "made.py")
    stored = [one.kernels.cache for one in loaded if not one.kernels.cache.ragged]
    assert stored and all(cache.quants.get("k") == quant for cache in stored)
    said = " ".join(loaded[0].doc.split())
    assert (f"as the checkpoint's {source} says." in said) == bool(source) and "Not read" not in said


def test_a_published_file_of_a_class_without_a_reader(tmp_path: Path) -> None:
    """MiMo-7B is Qwen 2 with layers that predict more tokens: so its makers' code says, and a user may."""
    ran = invoke("init", "--from", str(FOLDERS / "mimo_7b"))
    assert ran.exit_code == 2 and "`--as CLASS` reads it as another class's" in ran.output
    ran = invoke("init", "--from", str(FOLDERS / "mimo_7b"), "--as", "Qwen2ForCausalLM")
    assert ran.exit_code == 0 and 'architecture="Qwen2ForCausalLM"' in ran.output


# Class names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("llama_3_1_8b", "LlamaForCausalLMEagle3"),
        ("llama_3_1_8b", "Eagle3LlamaForCausalLM"),
        ("llama_3_1_8b", "LlamaForSequenceClassification"),
        ("mistral_7b_v03", "MistralModel"),
        ("qwen2_5_7b", "Qwen2ForRewardModel"),
        ("qwen3_0_6b", "Qwen3ForEmbedding"),
        ("mixtral_8x7b", "MIXTRALForCausalLM"),
    ],
)
def test_a_known_type_under_its_makers_class_name(model: str, named: str) -> None:
    given, found = models.facts(config(model)), models.facts(changed(model, architectures=[named]))
    assert found.model.architecture == named
    assert replace(found, model=given.model, notes=()) == given
    text = models.spec_text(changed(model, architectures=[named]), source="x")
    assert f"{named} is a name of its makers': its attention is read as that of model_type " in text


@pytest.mark.parametrize("model_type", ["llama", "qwen2_vl_text", "glm4v_text"])
def test_a_type_alone_has_no_note(model_type: str) -> None:
    fields = {key: value for key, value in config("qwen2_5_7b").items() if key != "architectures"}
    assert models.facts({**fields, "model_type": model_type}).notes == ()


@pytest.mark.parametrize(
    ("model_type", "named"),
    [
        ("mimo", "MiMoForCausalLM"),  # a type that transformers does not know
        ("llama", "LlamaBidirectionalModel"),  # what sees both ways
        ("llama", "MysteryForCausalLM"),
        ("qwen2", "LlamaForCausalLMEagle3"),
        ("llama", "Llama ForCausalLM"),
    ],
)
def test_another_name_is_refused_with_a_way_out(model_type: str, named: str) -> None:
    odd = {**config("llama_3_1_8b"), "model_type": model_type, "architectures": [named]}
    own = {"llama": "LlamaForCausalLM`, of its model_type,", "qwen2": "Qwen2ForCausalLM`, of its model_type,"}
    with pytest.raises(ConfigError) as caught:
        models.spec_text(odd, source="x")
    assert f"`--as {own.get(model_type, 'CLASS`')} reads it as another class's" in str(caught.value)
    assert "Model(" in models.spec_text(odd, source="x", architecture="LlamaForCausalLM")


def test_a_draft_inside_a_speculators_config() -> None:
    draft = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": without("llama_3_1_8b", "architectures"),
    }
    assert models.facts(draft).kinds == models.facts(config("llama_3_1_8b")).kinds


@pytest.mark.parametrize("named", ["_9" + "A" * 62, "9Model", "KimiK25ForConditionalGeneration", "X" * 64])
def test_a_class_name_makes_a_set_name(named: str) -> None:
    """The class that holds a text model may have any name: the name of its set is one that operations and files can have."""
    held = {"architectures": [named], "text_config": without("deepseek_v3", "architectures")}
    name = models.default_name(held)
    assert NAME.fullmatch(name) and name.endswith("_128x1x576")
    assert f'name="{name}"' in models.spec_text(held, source="x")


def test_attention_that_sees_both_ways() -> None:
    """gte-Qwen2 says it beside the class of a causal model."""
    assert models.facts(changed("qwen2_5_7b", is_causal=True)) == models.facts(config("qwen2_5_7b"))
    with pytest.raises(ConfigError, match=r"\Ais_causal: got false; tokens see later ones"):
        models.facts(changed("qwen2_5_7b", is_causal=False))
    gemma = config("gemma_3_4b_it")
    with pytest.raises(ConfigError, match=r"\Atext_config\.is_causal: got false"):
        models.facts({**gemma, "text_config": {**gemma["text_config"], "is_causal": False}})


# RoPE ----------------------------------------------------------------------------------------------------------------

PAIRS = 64
LONG = {"short_factor": [1.0] * PAIRS, "long_factor": [2.0] * PAIRS, "original_max_position_embeddings": 4096}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {"factor": 8.0, **LLAMA3},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 4096},
    "longrope": {"factor": 4.0, **LONG},
}
# A value of each field that is none of its defaults.
VALUES: dict[str, Any] = {
    "rope_theta": 123.0,
    "partial_rotary_factor": 0.5,
    "factor": 3.0,
    "original_max_position_embeddings": 2048,
    "low_freq_factor": 0.5,
    "high_freq_factor": 5.0,
    "beta_fast": 30.0,
    "beta_slow": 2.0,
    "mscale": 0.5,
    "mscale_all_dim": 0.25,
    "attention_factor": 1.5,
    "attn_factor": 0.75,
    "truncate": False,
    "short_factor": [1.5] * PAIRS,
    "long_factor": [2.5] * PAIRS,
    "short_mscale": 1.25,
    "long_mscale": 1.25,
    "alpha": 2.0,
    "mrope_interleaved": True,
    "mrope_section": [16, 24, 24],
    "llama_4_scaling_beta": 0.5,
    "extrapolation_factor": 2.0,
    "finetuned": True,
}


def with_rope(**rope: Any) -> Checkpoint:
    return models.facts(changed("llama_3_1_8b", rope_scaling=rope))


def test_every_field_of_a_rope_has_a_value_here() -> None:
    assert set(RopeJson.model_fields) - {"rope_type", "type"} <= set(VALUES)


@pytest.mark.parametrize("kind", TYPES)
def test_a_field_of_a_rope_is_read_or_named(kind: str) -> None:
    """Facts change with a field that is read; one that is not is in the spec's docstring."""
    plain = with_rope(rope_type=kind, **TYPES[kind])
    assert plain.notes == ()
    for name, value in VALUES.items():
        given = {**TYPES[kind], name: value}
        if name == "partial_rotary_factor" and kind == "longrope":
            given |= {"short_factor": [1.0] * (PAIRS // 2), "long_factor": [2.0] * (PAIRS // 2)}
        found = with_rope(rope_type=kind, **given)
        unread = any(name in note and re.match(r"Not read|.* is not used", note) for note in found.notes)
        assert unread == (numbers(found) == numbers(plain)), (name, found.notes)
        assert unread or found.notes == () or name in found.notes[0], name


def numbers(found: Checkpoint) -> object:
    """Parameters of a RoPE that kernels get: a scaling may keep fields that its numbers do not have."""
    rope = found.model.rope
    assert rope is not None
    if not isinstance(rope.scaling, YarnScaling):
        return rope
    plain = rope.scaling.model_copy(update={"mscale": None, "mscale_all_dim": None, "attention_factor": None})
    return rope.model_copy(update={"scaling": plain}), rope.scaling.cos_sin_factor


def test_a_rope_object_beside_the_one_that_holds() -> None:
    llama = config("llama_3_1_8b")
    both = {**llama, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}}
    assert models.facts(both).notes == ("Not read: rope_parameters.",)
    same = {**llama, "rope_parameters": {**llama["rope_scaling"]}}
    assert models.facts(same).notes == ()
    typed = with_rope(rope_type="linear", type="yarn", factor=2.0)
    assert typed.notes == ("Not read: rope_scaling.type.",)
    assert with_rope(rope_type="linear", type="linear", factor=2.0).notes == ()
    trained = {**llama, "original_max_position_embeddings": 4096}
    assert models.facts(trained).notes == ("Not read: rope_scaling.original_max_position_embeddings.",)


@pytest.mark.parametrize("value", ["abc", -3, math.nan, 7, [1]])
@pytest.mark.parametrize("model_type", ["minimax_m2", "gptj", "codegen"])
def test_a_field_that_belongs_beside_the_object(model_type: str, value: object) -> None:
    """rotary_dim says how many elements rotate beside the parameters; inside them nobody reads it."""
    base = {
        "model_type": model_type,
        "num_attention_heads": 8,
        "num_hidden_layers": 2,
        "hidden_size": 512,
        "head_dim": 64,
    }
    base |= {"n_head": 8, "n_layer": 2, "n_embd": 512}
    plain = models.facts({**base, "rope_parameters": {"rope_type": "default"}})
    found = models.facts({**base, "rope_parameters": {"rope_type": "default", "rotary_dim": value}})
    assert found == replace(plain, notes=("Not read: rope_parameters.rotary_dim.",))
    assert models.facts(base).notes == ()


def test_a_hostile_name_is_harmless_and_many_are_counted() -> None:
    names = {f'"""{i}\n': 1 for i in range(12)}
    (note,) = with_rope(rope_type="linear", factor=2.0, **names).notes
    assert note.endswith("rope_scaling.___7_ and 4 more.") and '"""' not in note
    text = models.spec_text(
        changed("llama_3_1_8b", rope_scaling={"rope_type": "linear", "factor": 2.0, **names}), source="x"
    )
    assert all(len(line) <= 120 for line in text.splitlines())


def test_attn_factor() -> None:
    """DeepSeek-R1-0528-Qwen3-8B gives 1 / (0.1 ln 4 + 1), so that cos and sin keep their magnitude; vLLM multiplies by it."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    found = models.facts(changed("qwen3_8b", rope_scaling={**yarn, "attn_factor": 0.8782488562869419}))
    assert found.model.rope is not None and isinstance(found.model.rope.scaling, YarnScaling)
    assert found.model.rope.scaling.cos_sin_factor == pytest.approx(1.0, abs=1e-12)
    assert found.notes == (
        "rope_scaling.attn_factor multiplies cos and sin, as in vLLM; transformers does not read it.",
    )
    both = {**yarn, "attn_factor": 0.5, "attention_factor": 1.0}
    with pytest.raises(ConfigError, match=r"rope_scaling\.attn_factor: got 0\.5; attention_factor beside it says"):
        models.facts(changed("qwen3_8b", rope_scaling=both))
    with pytest.raises(ConfigError, match=r"rope_scaling\.attn_factor: got 0\.5; DeepSeek's code multiplies"):
        models.facts(
            changed(
                "deepseek_v4_flash",
                rope_scaling={**config("deepseek_v4_flash")["rope_scaling"], **{"attn_factor": 0.5}},
            )
        )
