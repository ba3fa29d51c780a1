"""Tiny models with random weights, saved as a checkpoint that vLLM loads; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, PretrainedConfig

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def llama(**fields: Any) -> LlamaConfig:
    return LlamaConfig(**{**COMMON, **fields})


def deepseek(**fields: Any) -> DeepseekV3Config:
    """DeepSeek V3's attention at its own row size, 4 heads, behind dense layers: experts chosen by a tie would hide what it errs.

    RoPE is YaRN's, as in the published model: vLLM 0.32's CPU kernel of the plain kind turns interleaved pairs of 3-D q wrongly.
    """
    common = {name: value for name, value in COMMON.items() if name not in ("num_key_value_heads", "head_dim")}
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
    own: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "kv_lora_rank": 512,
        "q_lora_rank": 64,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 48,
        "rope_parameters": yarn | {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    }
    return DeepseekV3Config(**{**common, **own, **fields})


def save(config: PretrainedConfig, folder: Path, gain: float | None = None) -> Path:
    """The checkpoint of a model of this config, whose two best logits are no ties: weights of 0.06, norms about 1.

    `gain`: weights of gain / sqrt(inputs) instead, with which attention is far from uniform above 1.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.06 if gain is None else gain * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder


def save_config(config: PretrainedConfig, architecture: str, folder: Path) -> Path:
    """A checkpoint without weights: an engine that gets as far as loading them fails there."""
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return folder
