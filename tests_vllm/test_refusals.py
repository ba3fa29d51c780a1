"""What kvgen's backends do not serve is refused by name, before weights are loaded: these checkpoints have none."""

from __future__ import annotations

from typing import Any, Final

import pytest
from transformers import BertConfig, BloomConfig, DeepseekV3Config

from tests_vllm import models
from tests_vllm.engine import refused

INVALID: Final = (
    "ValueError: Selected backend AttentionBackendEnum.{name} is not valid for this configuration. Reason: {reasons}"
)


def invalid(*reasons: str, name: str = "KVGEN") -> str:
    return INVALID.format(name=name, reasons=list(reasons))


OTHER: Final = "choose another --attention-backend"
# Model, what the engine is started with beside attention_backend="KVGEN", what it says.
CASES: Final[dict[str, tuple[str, dict[str, Any], str]]] = {
    "version": (
        "llama",
        {"version": "0.40.2"},
        INVALID.format(
            name="KVGEN",
            reasons="[VersionError: vllm: got version 0.40.2; kvgen's backend serves 0.32.0 (its engine ran with it), 0.33.0 (its"
            f" signatures were compared); install one of these, {OTHER}, or set KVGEN_VLLM_UNTESTED=1 to try 0.40.2 with the "
            "adapter of 0.33.0]",
        ),
    ),
    "head size": ("wide", {}, invalid(f"head_size: got 1152; a head has 1 to 1024 dims here; {OTHER}")),
    "ALiBi": ("bloom", {}, f"ConfigError: alibi_slopes: KVGEN has no ALiBi for vLLM's layers; {OTHER}"),
    "encoder": (
        "bert",
        {},
        invalid(f"attn_type: got 'encoder_only'; KVGEN attends over a decoder's own tokens; {OTHER}"),
    ),
    "mask": (
        "llama",
        {"attention_backend": None, "attention_config": {"backend": "KVGEN", "use_non_causal": True}},
        invalid(f"use_non_causal: got True; KVGEN attends to earlier tokens only; {OTHER}"),
    ),
    "kv_cache_dtype": (
        "llama",
        {"kv_cache_dtype": "nvfp4"},
        invalid(
            "kv_cache_dtype: got 'nvfp4'; KVGEN stores auto, float16, bfloat16, fp8, fp8_e4m3, fp8_e5m2; pass one of these"
        ),
    ),
    "kv_cache_dtype beside the model's": (
        "llama",
        {"kv_cache_dtype": "float16"},
        invalid(
            "kv_cache_dtype: got 'float16' beside a model of f32; kvgen stores K and V in the model's dtype or in fp8; "
            "pass 'auto'"
        ),
    ),
    "page size": (
        "llama",
        {"block_size": 40},
        invalid("block_size: got 40; KVGEN's pages hold a multiple of 16 tokens; pass such a number"),
    ),
    "latent rows": (
        "deepseek",
        {},
        invalid("use_mla: got True; KVGEN attends over K and V of heads; pass --attention-backend KVGEN_MLA"),
    ),
    "no latent rows": (
        "llama",
        {"attention_backend": "KVGEN_MLA", "dtype": "float16"},
        invalid(
            "use_mla: got False; KVGEN_MLA attends over latent rows; pass --attention-backend KVGEN", name="KVGEN_MLA"
        ),
    ),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What vLLM says to every case, in one process."""
    folder = tmp_path_factory.mktemp("configs")
    bloom = BloomConfig(vocab_size=512, hidden_size=256, n_layer=2, n_head=4)
    bert = BertConfig(hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256)
    wide = models.llama(head_dim=1152, num_attention_heads=2, num_key_value_heads=2)
    deepseek = DeepseekV3Config(
        vocab_size=512, hidden_size=256, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=2
    )
    configs = {
        "llama": models.save_config(models.llama(), "LlamaForCausalLM", folder / "llama"),
        "wide": models.save_config(wide, "LlamaForCausalLM", folder / "wide"),
        "bloom": models.save_config(bloom, "BloomForCausalLM", folder / "bloom"),
        "bert": models.save_config(bert, "BertModel", folder / "bert"),
        "deepseek": models.save_config(deepseek, "DeepseekV3ForCausalLM", folder / "deepseek"),
    }
    attempts = [
        {"attention_backend": "KVGEN", **options, "model": str(configs[model])} for model, options, _ in CASES.values()
    ]
    attempts.append({"model": str(configs["llama"]), "attention_backend": "KVGEN"})
    return dict(zip([*CASES, "nothing wrong"], refused(attempts), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_by_name(case: str, said: dict[str, str]) -> None:
    assert said[case] == CASES[case][2]


def test_what_is_served_gets_as_far_as_the_weights(said: dict[str, str]) -> None:
    assert said["nothing wrong"].startswith("RuntimeError: Cannot find any model weights with ")
