"""The decoder text types of the installed transformers, each with configs as its classes make them by default."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from benchmarks.sweep.truth import NotBuildable, config_of, text_of

# Types with a causal head that are encoders, or decoders that read an encoder: no decoder-only text model is of such a type.
NO_DECODERS = frozenset(
    [
        "bart",
        "bert",
        "bert-generation",
        "big_bird",
        "bigbird_pegasus",
        "blenderbot",
        "blenderbot-small",
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "git",
        "marian",
        "mbart",
        "megatron-bert",
        "musicgen",
        "musicgen_melody",
        "mvp",
        "pegasus",
        "plbart",
        "prophetnet",
        "reformer",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "trocr",
        "whisper",
        "xlm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xlnet",
        "xmod",
    ]
)
# Multimodal types whose text part reads an encoder too, or is no decoder over tokens.
NO_TEXT_DECODERS = frozenset(
    [
        "blip",
        "florence2",
        "pix2struct",
        "pp_formulanet",
        "t5gemma2",
        "udop",
        "vision-encoder-decoder",
    ]
)

_COMPASS = {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}}
_HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}}
_HEADS_OF_128 = {"text_config": {"head_dim": 128}}  # the hidden size is no multiple of the heads
# Classes whose default config transformers itself cannot run, or has no cache, and the fields that were filled in to compare it.
FILLED: dict[str, dict[str, Any]] = {
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "dbrx": {"attn_config": {"clip_qkv": 8.0, "kv_n_heads": 8, "rope_theta": 1e4}},  # as rope_parameters
    "glm4_moe": {"head_dim": 128},
    "bamba": {"attn_layer_indices": [9, 18, 27]},  # without them no layer has attention
    "granitemoehybrid": {"layer_types": (["mamba"] * 7 + ["attention"]) * 4},  # nor of these
    "cohere_compass_text": _COMPASS,
    "cohere_compass": {"text_config": _COMPASS},
    "glm4v": {"text_config": _HALF},  # the default sections are of half a head's pairs
    "glm46v": {"text_config": _HALF},
    "glmga": {"text_config": _HALF},
    "glm4v_moe": _HEADS_OF_128,
    "qwen3_omni_moe_thinker": _HEADS_OF_128,
    "qwen3_omni_moe": {"thinker_config": _HEADS_OF_128},
    "chameleon": {"vocabulary_map": {"<image>": 1}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense"] * 32}},
    "step3p7": {"text_config": {"sliding_window": 512}},
}


@dataclass(frozen=True)
class Found:
    """One model type: `kind` "causal" or "multimodal", its text type, and its config.json as the class writes it."""

    model_type: str
    kind: str
    text_type: str
    class_name: str
    values: dict[str, Any]
    text_values: dict[str, Any]


def every_type() -> Iterator[Found | tuple[str, str]]:
    """Every decoder type, or its name and why transformers cannot build its config."""
    causal = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    multimodal = {**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    for name, made in {**causal, **{n: m for n, m in multimodal.items() if n not in causal}}.items():
        if name in NO_DECODERS or name in NO_TEXT_DECODERS:
            continue
        try:
            config = config_of({"model_type": name, **FILLED.get(name, {})})
        except NotBuildable as error:
            yield name, str(error)
            continue
        text = text_of(config)
        class_name = made if isinstance(made, str) else made[0]
        kind = "causal" if name in causal and text is config else "multimodal"
        yield Found(name, kind, text.model_type, class_name, plain(config), plain(text))


def plain(config: Any) -> dict[str, Any]:
    """A config's fields as config.json has them."""
    import json

    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    values.setdefault("model_type", config.model_type)
    return values


def default(model_type: str) -> Any:
    """The default config object of a type."""
    return AutoConfig.for_model(model_type)
