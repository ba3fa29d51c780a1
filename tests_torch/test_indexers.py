"""Scores of transformers' indexers, and the same from what kvgen reads of their configs: RoPE, norm of keys, heads, factors."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from kvgen import models
from kvgen.reference.rope import rotate

TOKENS, HIDDEN, RANK = 11, 24, 16
# model_type -> the start of its classes' names.
TYPES = {"deepseek_v32": "DeepseekV32", "glm_moe_dsa": "GlmMoeDsa", "axk2": "AXK2", "hy_v4": "HYV4"}
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "kv_lora_rank": 32,
    "q_lora_rank": RANK,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "index_topk": 5,
    "rms_norm_eps": 1e-3,  # large enough to be seen in HY-V4's norm
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}


@contextmanager
def scores() -> Iterator[list[torch.Tensor]]:
    """What tensors are asked for their largest elements."""
    asked, topk = [], torch.Tensor.topk

    def seen(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        asked.append(self)
        return topk(self, *args, **kwargs)

    torch.Tensor.topk = seen  # type: ignore[method-assign,assignment]
    try:
        yield asked
    finally:
        torch.Tensor.topk = topk  # type: ignore[method-assign]


def of_transformers(model_type: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """An indexer's projected rows and the scores that it makes of them, `[tokens, tokens]`, -inf behind each token."""
    there = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    config = getattr(there, f"{TYPES[model_type]}Config")(**SIZES)
    torch.manual_seed(3)
    indexer = getattr(there, f"{TYPES[model_type]}Indexer")(config, 0).float()
    for weight in indexer.parameters():
        torch.nn.init.normal_(weight)
    hidden, rank = torch.randn(1, TOKENS, HIDDEN), torch.randn(1, TOKENS, RANK)
    positions = torch.arange(TOKENS)[None]
    angles = getattr(there, f"{TYPES[model_type]}RotaryEmbedding")(config)(hidden, positions)
    mask = torch.full((1, TOKENS, TOKENS), -torch.inf).triu(1)
    with torch.no_grad(), scores() as asked:
        indexer(hidden, rank, angles, mask, positions)
        rows = {
            "q": indexer.wq_b(rank).reshape(TOKENS, SIZES["index_n_heads"], -1),
            "k": indexer.wk(hidden)[0],
            "weights": indexer.weights_proj(hidden)[0],
            "norm": indexer.k_norm.weight.detach(),
            "bias": indexer.k_norm.bias.detach(),
        }
    return {name: row.numpy().astype(np.float64) for name, row in rows.items()}, asked[0][0].numpy()


def of_kvgen(model_type: str, rows: dict[str, np.ndarray], **fields: Any) -> np.ndarray:
    """The same in float64, by the facts of the config."""
    kind = models.facts({**SIZES, **fields, "model_type": model_type}).kinds[0]
    assert kind.indexer is not None and kind.index_rope is not None and kind.index_norm is not None
    k, at = rows["k"], np.arange(TOKENS)
    spread = ((k - k.mean(-1, keepdims=True)) ** 2).mean(-1, keepdims=True) + kind.index_norm.eps
    k = (k - k.mean(-1, keepdims=True)) / np.sqrt(spread) * rows["norm"] + rows["bias"]
    rope = kind.index_rope
    q, k = (rotate(x, at, rope, part=rope.part) for x in (rows["q"], k[:, None]))
    products = np.maximum(np.einsum("thd,sd->ths", q, k[:, 0]), 0)
    factor = float(kind.indexer.dim * kind.indexer.heads) ** -0.5
    made = np.einsum("ths,th->ts", products, rows["weights"]) * factor
    return np.where(at[None] <= at[:, None], made, -np.inf)


@pytest.mark.parametrize("model_type", TYPES)
def test_scores(model_type: str) -> None:
    rows, wanted = of_transformers(model_type)
    np.testing.assert_allclose(of_kvgen(model_type, rows), wanted, rtol=1e-4, atol=1e-4)


def test_a_wrong_fact_is_seen() -> None:
    rows, wanted = of_transformers("glm_moe_dsa")
    other = of_kvgen("glm_moe_dsa", rows, indexer_rope_interleave=False)
    assert not np.allclose(other, wanted, rtol=1e-2, atol=1e-2)
    rows, wanted = of_transformers("hy_v4")
    assert not np.allclose(of_kvgen("hy_v4", rows, rms_norm_eps=1e-6), wanted, rtol=1e-4, atol=1e-4)
    assert not np.allclose(
        of_kvgen("deepseek_v32", rows), wanted, rtol=1e-2, atol=1e-2
    )  # the first elements, not the last


@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "hy_v4"])
@pytest.mark.parametrize(
    "fields", [{}, {"index_topk_freq": 4, "index_skip_topk_offset": 3}, {"index_topk_pattern": "FFSFSSF"}]
)
def test_layers_with_an_indexer(model_type: str, fields: dict[str, Any]) -> None:
    """HY-V4's config has a rule of its own and knows none of the fields."""
    values = {**SIZES, **fields, "num_hidden_layers": 7}
    there = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    wanted = getattr(there, f"{TYPES[model_type]}Config")(**values).indexer_types
    layers = models.facts({**values, "model_type": model_type}).layers()
    assert ["full" if layer.index_rope is not None else "shared" for layer in layers] == wanted
