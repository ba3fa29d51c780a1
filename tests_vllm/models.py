"""Tiny models with random weights, saved as a checkpoint that vLLM loads; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

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


def save(config: PretrainedConfig, folder: Path) -> Path:
    """The checkpoint of a model of this config, whose two best logits are no ties: weights of 0.06, norms about 1."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.06)
    model.save_pretrained(folder)
    return folder
