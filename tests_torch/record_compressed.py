"""Write tests/compressed/recorded: python -m tests_torch.record_compressed. transformers' DeepseekV4Attention, in float64.

The projections are stand-ins that give the rows of tests.compressed.drawn; everything between them and the output's projection
is transformers' code.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention, DeepseekV4RotaryEmbedding

from tests.compressed.drawn import EXACT, RECORDED, TOKENS, exact
from tests.compressed.statement import Floats, Form, Rows, Weights

KINDS = {
    "window": "sliding_attention",
    "sparse": "compressed_sparse_attention",
    "heavy": "heavily_compressed_attention",
}


class Given(nn.Module):
    """A projection that gives these rows whatever it gets, and keeps what it got."""

    def __init__(self, rows: Floats) -> None:
        super().__init__()
        self.rows, self.got = torch.from_numpy(rows), torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.got = x
        return self.rows[None]


def config(form: Form, kind: str, heads: int, index_heads: int) -> Any:
    yarn = (
        {}
        if form.yarn is None
        else {
            "rope_type": "yarn",
            "factor": form.yarn.factor,
            "original_max_position_embeddings": form.yarn.original,
            "beta_fast": form.yarn.fast,
            "beta_slow": form.yarn.slow,
        }
    )
    return DeepseekV4Config(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=heads,
        head_dim=form.dim,
        q_lora_rank=8,
        o_groups=1,
        o_lora_rank=8,
        sliding_window=form.window,
        layer_types=[kind],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": form.rate or 8},
        index_n_heads=index_heads or 1,
        index_head_dim=form.index_dim or 16,
        index_topk=form.topk or 1,
        partial_rotary_factor=form.turned / form.dim,
        rope_theta=10_000.0,
        compress_rope_theta=form.theta,
        rope_parameters=yarn or None,
        rms_norm_eps=form.eps,
        max_position_embeddings=1024,
        attn_implementation="eager",
    )


def output(name: str) -> Floats:
    """o `[T, heads, dim]` as transformers gives it to the output's projection."""
    form, rows, weights = exact(name)
    heads = rows.q.shape[1]
    made = config(form, KINDS[name], heads, 0 if rows.index_w is None else rows.index_w.shape[1])
    attention = DeepseekV4Attention(made, 0).double().eval()
    _give(attention, rows, weights, form)
    places = torch.arange(TOKENS)[None]
    hidden = torch.zeros(1, TOKENS, made.hidden_size, dtype=torch.float64)
    turning = DeepseekV4RotaryEmbedding(made)
    angles = {kind: turning(hidden, places, layer_type=kind) for kind in ("main", "compress")}
    ahead = torch.arange(TOKENS)[None, :] - torch.arange(TOKENS)[:, None]
    mask = torch.zeros(1, 1, TOKENS, TOKENS, dtype=torch.float64)
    mask.masked_fill_((ahead > 0) | (ahead <= -form.window), float("-inf"))
    with torch.no_grad():
        attention(hidden, angles, places, mask)
    found: Floats = attention.o_a_proj.got.reshape(TOKENS, heads, form.dim).numpy()
    return found


def _give(attention: nn.Module, rows: Rows, weights: Weights, form: Form) -> None:
    a: Any = attention
    a.q_a_proj, a.q_b_proj = Given(np.zeros((TOKENS, 8))), Given(rows.q.reshape(TOKENS, -1))
    a.kv_proj, a.o_a_proj, a.o_b_proj = Given(rows.kv), Given(np.zeros((TOKENS, 1, 8))), Given(np.zeros((TOKENS, 8)))
    a.kv_norm.weight.data, a.sinks.data = torch.from_numpy(weights.kv_norm), torch.from_numpy(weights.sinks)
    if form.rate:
        _pool(a.compressor, rows.pool_kv, rows.pool_gate, weights.ape, weights.pool_norm)
    if form.index:
        assert rows.index_q is not None and rows.index_w is not None
        indexer = a.compressor.indexer
        _pool(indexer, rows.index_kv, rows.index_gate, weights.index_ape, weights.index_norm)
        indexer.q_b_proj = Given(rows.index_q.reshape(TOKENS, -1))
        indexer.scorer.weights_proj = Given(rows.index_w)


def _pool(pool: Any, kv: Any, gate: Any, ape: Any, norm: Any) -> None:
    pool.kv_proj, pool.gate_proj = Given(kv), Given(gate)
    pool.position_bias.data, pool.kv_norm.weight.data = torch.from_numpy(ape), torch.from_numpy(norm)


if __name__ == "__main__":
    RECORDED.mkdir(exist_ok=True)
    for each in EXACT:
        np.savez_compressed(RECORDED / f"{each}.npz", o=output(each).astype(np.float32))
        print(each, flush=True)
