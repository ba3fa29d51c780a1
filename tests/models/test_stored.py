"""How KV is stored: --kv-dtype, and what quantized checkpoints say of it in config.json."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from kvgen import models
from kvgen.cli.console import complete_kv_dtype
from kvgen.errors import ConfigError
from kvgen.schema.cache import Cache, Latent
from kvgen.schema.loader import load_file
from kvgen.schema.quant import Block, Quant, Recipe

from .checkpoints import changed, config, without

GIVEN = {"scale_dtype": "f32", "scale": "given"}
FP8 = Quant(dtype="e4m3", block=Block(token=None, head=None), **GIVEN)  # type: ignore[arg-type]
INT8 = Quant(dtype="i8", block=Block(token=None, head=None), **GIVEN)  # type: ignore[arg-type]
COMPRESSED = config("llama_3_1_8b_fp8")["quantization_config"]  # as llm-compressor writes it
SCHEME = COMPRESSED["kv_cache_scheme"]
# As nvidia's checkpoints have it (ModelOpt's unified export).
MODELOPT = {
    "ignore": ["lm_head"],
    "kv_cache_quant_algo": "FP8",
    "producer": {"name": "modelopt", "version": "0.33.0"},
    "quant_algo": "NVFP4",
    "quant_method": "modelopt",
}


LISTED = "kv_cache_quantized_layers"
ALL_OF_32 = {f"model.layers.{layer}.self_attn": {"quant_algo": "FP8"} for layer in range(32)}


def cache_of(text: str, tmp_path: Path) -> Cache:
    """The cache that a spec's text builds."""
    (tmp_path / "made.py").write_text(text, encoding="utf-8")
    return load_file(tmp_path / "made.py", "made.py")[0].kernels.cache


def scheme(**fields: Any) -> dict[str, Any]:
    return {**COMPRESSED, "kv_cache_scheme": {**SCHEME, **fields}}


def said(text: str) -> str:
    return " ".join(text.split('"""')[1].split())


# --kv-dtype -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "quant", "words"),
    [
        ("fp8", Quant(dtype="e4m3"), "Stored are e4m3 codes without scales."),
        ("fp8-static", FP8, "Stored are e4m3 codes with a given f32 scale per layer, K's and V's."),
        ("fp8-scaled", Quant(dtype="e4m3", scale_dtype="f32"), "e4m3 codes with an f32 scale per token and head."),
        ("int8", Quant(dtype="i8", scale_dtype="f32"), "i8 codes with an f32 scale per token and head."),
        ("int8-static", INT8, "i8 codes with a given f32 scale per layer, K's and V's."),
        (
            "int4",
            Quant(dtype="i4", scale_dtype="f16", block=Block(dim=32), zero=True),
            "i4 codes with an f16 scale and zero point per token, head and 32 dims.",
        ),
        (
            "nvfp4",
            Quant(dtype="e2m1", scale_dtype="e4m3", recipe="global"),
            "e2m1 codes with an e4m3 scale per token, head and 16 dims, times a given f32 scale.",
        ),
    ],
)
def test_options(name: str, quant: Quant, words: str, tmp_path: Path) -> None:
    text = models.spec_text(config("llama_3_1_8b"), source="config.json", kv_dtype=name)
    cache = cache_of(text, tmp_path)
    assert cache.quants == {"k": quant, "v": quant} and cache.dtype == "bf16"
    assert words in said(text)
    assert f"Written by `kvgen init --from config.json --kv-dtype {name}`." in said(text)


def test_plain_types(tmp_path: Path) -> None:
    for name in ("bf16", "f16", "f32"):
        text = models.spec_text(changed("llama_2_7b", quantization_config=COMPRESSED), source="x", kv_dtype=name)
        cache = cache_of(text, tmp_path)
        assert cache.dtype == name and cache.quant is None and "Stored" not in text
    assert cache_of(models.spec_text(config("llama_2_7b"), source="x"), tmp_path).dtype == "f16", "the checkpoint's own"


@pytest.mark.parametrize("name", models.KV_DTYPES)
@pytest.mark.parametrize("model", ["deepseek_v3", "deepseek_v2_lite", "kimi_k2"])
def test_latent_rows(name: str, model: str, tmp_path: Path) -> None:
    text = models.spec_text(config(model), source="x", kv_dtype=name)
    cache = cache_of(text, tmp_path)
    assert isinstance(cache, Latent)
    assert (cache.latent_dim, cache.rope_dim, cache.page_size) == (512, 64, 64)
    quant, whole = cache.quants["k"], name in ("fp8", "fp8-static", "int8-static")
    assert cache.quant_rope == whole
    stays = "; the RoPE part stays bf16." in said(text)
    assert stays == (quant is not None and not whole)
    if name == "fp8_ds_mla":
        assert cache.storage.tensors[0].shape[-1] == 656
    if whole:
        assert cache.storage.tensors[0].shape[-1] == 576


def test_every_option_is_formatted_as_ruff_would(tmp_path: Path) -> None:
    for model in ("llama_3_1_8b", "deepseek_v3", "gemma_3_4b_it"):
        for name in models.KV_DTYPES:
            if model == "deepseek_v3" or name != "fp8_ds_mla":
                text = models.spec_text(config(model), source="tests/config.json", kv_dtype=name)
                (tmp_path / f"{model}_{name}.py".replace("-", "_")).write_text(text)
    for command in (["format", "--check"], ["check", "--select", "E,F,I,UP,B,SIM,RUF"]):
        ran = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--isolated", "--line-length", "120", str(tmp_path)],
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_command_has_the_same_names() -> None:
    assert tuple(complete_kv_dtype("")) == models.KV_DTYPES
    assert "global" in get_args(Recipe)


@pytest.mark.parametrize(
    ("model", "name", "message"),
    [
        (
            config("llama_3_1_8b"),
            "fp8_ds_mla",
            "--kv-dtype: got 'fp8_ds_mla', which is for latent rows; LlamaForCausalLM caches K and V; valid: auto, bf16, f16, "
            "f32, fp8, fp8-static, fp8-scaled, int8, int8-static, int4, nvfp4",
        ),
        (
            config("llama_3_1_8b"),
            "fp9",
            "--kv-dtype: got 'fp9'; it must be one of auto, bf16, f16, f32, fp8, fp8-static, fp8-scaled, int8, int8-static, "
            "int4, nvfp4, fp8_ds_mla",
        ),
        (
            changed("llama_3_1_8b", head_dim=24),
            "int4",
            "--kv-dtype: got 'int4'; quant: got block.dim=32 for rows of 24; a block lies within a row's quantized dims; "
            "--kv-dtype bf16 stores it as it is",
        ),
        (
            changed("llama_3_1_8b", head_dim=8),
            "nvfp4",
            "--kv-dtype: got 'nvfp4'; quant: got block.dim=16 for rows of 8; a block lies within a row's quantized dims; "
            "--kv-dtype bf16 stores it as it is",
        ),
        (
            changed("deepseek_v3", kv_lora_rank=96),
            "fp8_ds_mla",
            "--kv-dtype: got 'fp8_ds_mla'; quant: got block.dim=128 for rows of 96; a block lies within a row's quantized "
            "dims; --kv-dtype bf16 stores it as it is",
        ),
    ],
)
def test_impossible_ones(model: dict[str, Any], name: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        models.spec_text(model, source="x", kv_dtype=name)
    assert str(error.value) == message


# Quantized checkpoints ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantization", "quant", "field"),
    [
        (COMPRESSED, FP8, "kv_cache_scheme"),
        (scheme(type="int"), INT8, "kv_cache_scheme"),
        (scheme(strategy="attn_head"), Quant(dtype="e4m3", block=Block(token=None), **GIVEN), "kv_cache_scheme"),  # type: ignore[arg-type]
        (scheme(dynamic=True), Quant(dtype="e4m3", scale_dtype="f32"), "kv_cache_scheme"),
        (scheme(dynamic=True, type="int"), Quant(dtype="i8", scale_dtype="f32"), "kv_cache_scheme"),
        (MODELOPT, FP8, "kv_cache_quant_algo"),
        ({**MODELOPT, "kv_cache_quant_algo": "INT8"}, INT8, "kv_cache_quant_algo"),
        (
            {**MODELOPT, "kv_cache_quant_algo": "NVFP4"},
            Quant(dtype="e2m1", scale_dtype="e4m3", recipe="global"),
            "kv_cache_quant_algo",
        ),
        (
            {"quant_algo": "FP8", "kv_cache_scheme": "FP8", "producer": {"name": "modelopt", "version": "0.31.0"}},
            FP8,
            "kv_cache_scheme",
        ),
        ({**MODELOPT, "kv_cache_quant_algo": "MIXED_PRECISION", "kv_cache_quantized_layers": ALL_OF_32}, FP8, LISTED),
        # ModelOpt's exports since 0.35 say it as compressed-tensors does, in three fields.
        (
            {"quant_method": "modelopt", "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
            FP8,
            "kv_cache_scheme",
        ),
    ],
)
def test_quantized_checkpoints(quantization: dict[str, Any], quant: Quant, field: str, tmp_path: Path) -> None:
    text = models.spec_text(changed("llama_3_1_8b", quantization_config=quantization), source="config.json")
    cache = cache_of(text, tmp_path)
    assert cache.quants == {"k": quant, "v": quant}
    assert (
        f", as the checkpoint's quantization_config.{field} says. Written by `kvgen init --from config.json`."
        in said(text)
    )
    chosen = models.spec_text(changed("llama_3_1_8b", quantization_config=quantization), source="x", kv_dtype="int4")
    assert cache_of(chosen, tmp_path).quants["k"] != quant and "as the checkpoint" not in chosen


QUARK = {"dtype": "fp8_e4m3", "is_dynamic": False, "qscheme": "per_tensor"}


@pytest.mark.parametrize(
    ("quantization", "quant", "field"),
    [
        (
            {"quant_method": "quark", "kv_cache_quant_config": {"*k_proj": {"output_tensors": QUARK}}},
            FP8,
            "kv_cache_quant_config.*k_proj.output_tensors",
        ),
        (
            {
                "quant_method": "quark",
                "layer_quant_config": {"*v_proj": {"output_tensors": {**QUARK, "dtype": "int8"}}},
            },
            INT8,
            "layer_quant_config.*v_proj.output_tensors",
        ),
        (
            {"export": {"kv_cache_group": ["*k_proj", "*v_proj"]}, "global_quant_config": {"output_tensors": QUARK}},
            FP8,
            "global_quant_config.output_tensors",
        ),
        (
            {"quantization": {"kv_cache_quant_algo": "FP8", "quant_algo": "FP8"}},
            FP8,
            "quantization.kv_cache_quant_algo",
        ),
    ],
)
def test_quark_and_nested_modelopt(quantization: dict[str, Any], quant: Quant, field: str, tmp_path: Path) -> None:
    text = models.spec_text(changed("llama_3_1_8b", quantization_config=quantization), source="x")
    assert cache_of(text, tmp_path).quants == {"k": quant, "v": quant}
    assert f"quantization_config.{field} says" in text


def test_the_text_models_own_quantization(tmp_path: Path) -> None:
    """Kimi K2.5's lies inside text_config; compressed-tensors called the field compression_config once."""
    gemma = config("gemma_3_4b_it")
    for key in ("quantization_config", "compression_config"):
        held = {**gemma, "text_config": {**gemma["text_config"], key: COMPRESSED}}
        assert cache_of(models.spec_text(held, source="x"), tmp_path).quants == {"k": FP8, "v": FP8}


def layers_of_kinds(**algorithms: str) -> dict[str, Any]:
    """kv_cache_quantized_layers of Gemma 3 4B, whose every sixth layer is full."""
    kinds = ["full" if i % 6 == 5 else "local" for i in range(34)]
    listed = {
        f"language_model.model.layers.{i}.self_attn": {"quant_algo": algorithms[kind]}
        for i, kind in enumerate(kinds)
        if kind in algorithms
    }
    return {**MODELOPT, "kv_cache_quant_algo": "MIXED_PRECISION", LISTED: listed, "kv_cache_schema_version": 1}


def test_layers_that_are_stored_in_several_ways(tmp_path: Path) -> None:
    """Kinds of layers have caches of their own; layers of one kind that differ are refused, and so are some of a kind."""

    def text(quantization: dict[str, Any]) -> str:
        return models.spec_text(
            {**config("gemma_3_4b_it"), "quantization_config": quantization}, source="x", name="gemma"
        )

    def quants(made: str) -> dict[str, Quant | None]:
        (tmp_path / "made.py").write_text(made, encoding="utf-8")
        return {one.kernels.name: one.kernels.cache.quant for one in load_file(tmp_path / "made.py", "made.py")}

    nvfp4 = Quant(dtype="e2m1", scale_dtype="e4m3", recipe="global")
    assert quants(text(layers_of_kinds(full="FP8", local="NVFP4"))) == {"gemma_full": FP8, "gemma_local": nvfp4}
    assert quants(text(layers_of_kinds(full="FP8"))) == {"gemma_full": FP8, "gemma_local": None}
    vision = {"vision_model.encoder.layers.0.self_attn": {"quant_algo": "FP8"}}
    assert "quant=" not in text({**MODELOPT, LISTED: vision, "kv_cache_quant_algo": None})
    for none_of_this_model in (vision, {}, None):  # what holds is what is said of all
        assert set(quants(text({**MODELOPT, LISTED: none_of_this_model})).values()) == {FP8}
    some = layers_of_kinds(full="FP8")
    some[LISTED]["language_model.model.layers.0.self_attn"] = {"quant_algo": "FP8"}
    with pytest.raises(
        ConfigError, match=r"kv_cache_quant_algo is FP8 in layer 0 and none in layer 1; layers of one kind"
    ):
        text(some)


BESIDE = {"producer": {"name": "modelopt", "version": "0.33"}, "quantization": {"kv_cache_quant_algo": "FP8"}}


@pytest.mark.parametrize(
    ("quantization", "beside", "source"),
    [
        (None, BESIDE, "quantization.kv_cache_quant_algo of hf_quant_config.json"),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            BESIDE,
            "quantization.kv_cache_quant_algo of hf_quant_config.json",
        ),
        (MODELOPT, BESIDE, "quantization_config.kv_cache_quant_algo"),
        (MODELOPT, {"quantization": {"kv_cache_quant_algo": None}}, "quantization_config.kv_cache_quant_algo"),
        (None, {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}, ""),
        (None, {}, ""),
    ],
)
def test_a_quantization_beside_the_config(
    quantization: object, beside: dict[str, Any], source: str, tmp_path: Path
) -> None:
    text = models.spec_text(changed("llama_3_1_8b", quantization_config=quantization), source="x", quantization=beside)
    assert cache_of(text, tmp_path).quant == (FP8 if source else None)
    assert not source or f"as the checkpoint's {source} says." in said(text)
    chosen = models.spec_text(config("llama_3_1_8b"), source="x", quantization=beside, kv_dtype="int8")
    assert cache_of(chosen, tmp_path).quant == Quant(dtype="i8", scale_dtype="f32"), "the option is heard first"


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        (
            {"quantization": {"kv_cache_quant_algo": "NVFP4"}},
            "hf_quant_config.json: quantization.kv_cache_quant_algo says nvfp4 of KV, and "
            "quantization_config.kv_cache_quant_algo of config.json says fp8-static; say with --kv-dtype how kvgen shall store "
            "KV",
        ),
        (
            {"quantization": {"kv_cache_quant_algo": "FP6"}},
            "hf_quant_config.json: quantization.kv_cache_quant_algo: got 'FP6'; kvgen knows FP8, INT8, NVFP4; say with "
            "--kv-dtype how kvgen shall store KV",
        ),
        (
            {"quantization": {"kv_cache_bits": 6}},
            "hf_quant_config.json: quantization.kv_cache_bits: got 6; kvgen does not know this field of a quantized KV cache; "
            "say with --kv-dtype how kvgen shall store KV",
        ),
        (
            {"quantization": "FP8"},
            "hf_quant_config.json: quantization: got 'FP8'; it must be a JSON object, such as {...}",
        ),
    ],
)
def test_files_that_contradict_each_other(beside: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        models.spec_text(changed("llama_3_1_8b", quantization_config=MODELOPT), source="x", quantization=beside)
    assert str(error.value) == message


def test_quark_groups_that_nothing_describes() -> None:
    broken = changed(
        "llama_3_1_8b", quantization_config={"quant_method": "quark", "export": {"kv_cache_group": ["*k_proj"]}}
    )
    with pytest.raises(
        ConfigError, match=r"quantization_config\.export\.kv_cache_group: got a list of 1; nothing says how"
    ):
        models.spec_text(broken, source="x")


def test_one_word_a_kind_of_layers(tmp_path: Path) -> None:
    text = models.spec_text(config("gemma_3_4b_it"), source="x", kv_dtype="full=fp8,local=bf16", name="gemma")
    (tmp_path / "made.py").write_text(text, encoding="utf-8")
    sets = {loaded.kernels.name: loaded.kernels for loaded in load_file(tmp_path / "made.py", "made.py")}
    assert sets["gemma_full"].cache.quants["k"] == Quant(dtype="e4m3") and sets["gemma_local"].cache.quant is None
    assert sets["gemma_full"].layers == {"full": ("append", "extend", "decode")}
    with pytest.raises(
        ConfigError, match=r"--kv-dtype: got 'half' in 'half=fp8'; .* local, full; name each once, as in"
    ):
        models.spec_text(config("gemma_3_4b_it"), source="x", kv_dtype="half=fp8")


def test_latent_checkpoints(tmp_path: Path) -> None:
    text = models.spec_text(changed("deepseek_v3", quantization_config=MODELOPT), source="x")
    cache = cache_of(text, tmp_path)
    assert isinstance(cache, Latent) and cache.quant_rope and cache.quant == FP8


@pytest.mark.parametrize(
    "quantization",
    [
        None,
        {},
        config("deepseek_v3")["quantization_config"],
        {**COMPRESSED, "kv_cache_scheme": None},
        {**MODELOPT, "kv_cache_quant_algo": None},
        {"bits": 4, "group_size": 128, "quant_method": "gptq"},
    ],
)
def test_quantized_weights_say_nothing_of_kv(quantization: object) -> None:
    plain = models.spec_text(without("llama_3_1_8b", "quantization_config"), source="x")
    assert models.spec_text(changed("llama_3_1_8b", quantization_config=quantization), source="x") == plain


CHOOSE = "say with --kv-dtype how kvgen shall store KV"


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ("fp8", "quantization_config: got 'fp8'; it must be a JSON object, such as {...}"),
        (
            {**COMPRESSED, "kv_cache_scheme": "fp8"},
            f"quantization_config.kv_cache_scheme: got 'fp8'; kvgen knows FP8, INT8, NVFP4; {CHOOSE}",
        ),
        (
            {**COMPRESSED, "kv_cache_scheme": ["FP8"]},
            "quantization_config.kv_cache_scheme: got a list of 1; it must be a JSON object, such as {...}",
        ),
        (
            {**MODELOPT, "kv_cache_scheme": "NVFP4"},
            "quantization_config.kv_cache_quant_algo: it says fp8-static of KV, and quantization_config.kv_cache_scheme says "
            f"nvfp4; {CHOOSE}",
        ),
        (
            {"quant_method": "fp8", "kv_cache_dtype": "fp8_e5m2"},
            "quantization_config.kv_cache_dtype: got 'fp8_e5m2'; kvgen does not know this field of a quantized KV cache; "
            f"{CHOOSE}",
        ),
        (
            {**MODELOPT, "kv_cache_quantized_layers": {"lm_head": {"quant_algo": "FP8"}}},
            "quantization_config.kv_cache_quantized_layers: got an object of 1 fields; 'lm_head' names no layer, as in "
            f"'model.layers.0.self_attn'; {CHOOSE}",
        ),
        (
            {**MODELOPT, "kv_cache_quantized_layers": {"model.layers.1.self_attn": {"quant_algo": "FP8_K_NVFP4_V"}}},
            "quantization_config.kv_cache_quantized_layers.model.layers.1.self_attn.quant_algo: got 'FP8_K_NVFP4_V'; kvgen knows "
            f"FP8, INT8, NVFP4; {CHOOSE}",
        ),
        (
            scheme(num_bits=4, type="int"),
            f"quantization_config.kv_cache_scheme.num_bits: got 4; KV of 8 bits is what kvgen reads from a config; {CHOOSE}",
        ),
        (
            scheme(num_bits="8"),
            "quantization_config.kv_cache_scheme.num_bits: got '8'; it must be an integer; valid: 1 to 64",
        ),
        (
            scheme(symmetric=False),
            f"quantization_config.kv_cache_scheme.symmetric: got false; given scales have no zero points; {CHOOSE}",
        ),
        (
            scheme(type="nf"),
            "quantization_config.kv_cache_scheme.type: got 'nf'; it is none that kvgen knows; valid: float, int",
        ),
        (
            scheme(strategy="channel"),
            "quantization_config.kv_cache_scheme.strategy: got 'channel'; it is none that kvgen knows; valid: tensor, "
            "attn_head",
        ),
        (
            {**MODELOPT, "kv_cache_quant_algo": "NF4_KV_CACHE"},
            f"quantization_config.kv_cache_quant_algo: got 'NF4_KV_CACHE'; kvgen knows FP8, INT8, NVFP4; {CHOOSE}",
        ),
        (
            {**MODELOPT, "kv_cache_quant_algo": ["FP8"]},
            f"quantization_config.kv_cache_quant_algo: got a list of 1; kvgen knows FP8, INT8, NVFP4; {CHOOSE}",
        ),
    ],
)
def test_words_that_kvgen_does_not_know(quantization: object, message: str) -> None:
    broken = changed("llama_3_1_8b", quantization_config=quantization)
    with pytest.raises(ConfigError) as error:
        models.spec_text(broken, source="x")
    assert str(error.value) == message
    if "quantization_config:" not in message:
        assert re.search(r"\bquant=", models.spec_text(broken, source="x", kv_dtype="int8")), (
            "the option is heard first"
        )
