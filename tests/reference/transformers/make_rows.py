"""Records what transformers' attention layers make of q, k and v before they attend, in float32: rows.npz beside this file.

Written with transformers 5.23.0 and PyTorch 2.13.0+cpu, as make.py says. Each layer is the model's own module, whose projections
are replaced by the drawn q, k and v; what reaches its attention function is recorded. So the order of norm, RoPE and factor is
the module's. NAME/ARRAY:

- `q`, `k`, `v` f32 [T, heads, dim], numbers of bf16; `q_out`, `k_out`, `v_out`: what the layer attends with
- `positions` i64 [T] or [3, T]; `inv_freq` f32 [d / 2]: the rotary embedding's buffer, where the layer has one
- `q_weight`, `k_weight`, `q_norm_bias`, `k_norm_bias` f32: of its norms, where they have them
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["ATEN_CPU_CAPABILITY"] = "default"

import ml_dtypes
import numpy as np
import torch
from transformers import AutoConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.gemma4 import modeling_gemma4 as gemma4
from transformers.models.hunyuan_v1_dense import modeling_hunyuan_v1_dense as hunyuan
from transformers.models.llama4 import modeling_llama4 as llama4
from transformers.models.ministral3 import modeling_ministral3 as ministral3
from transformers.models.phi import modeling_phi as phi
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl
from transformers.models.stablelm import modeling_stablelm as stablelm

HERE = Path(__file__).parent
ROWS = 12
SIZES: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 32}
seen: dict[str, torch.Tensor] = {}


def record(module: Any, query: Any, key: Any, value: Any, *args: Any, **more: Any) -> Any:
    """An attention function that keeps what it is given, [1, heads, T, dim]."""
    seen.update(q_out=query, k_out=key, v_out=value)
    return torch.zeros_like(query).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register("record", record)


class Given(torch.nn.Module):
    """A projection whose answer is known."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.rows = rows.reshape(1, ROWS, -1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.rows


def drawn(*shape: int, seed: int, around: float = 0.0) -> torch.Tensor:
    """Normally distributed f32 numbers that bf16 has."""
    numbers = np.random.default_rng(seed).standard_normal(shape) * (0.25 if around else 1.0) + around
    return torch.from_numpy(numbers.astype(ml_dtypes.bfloat16).astype(np.float32))


def config(kind: str, **fields: Any) -> Any:
    """transformers' configuration of a small model."""
    made = AutoConfig.for_model(kind, **{**SIZES, **fields})
    made._attn_implementation = "record"
    return made


def case(
    found: dict[str, Any],
    name: str,
    layer: Any,
    dim: int,
    rotary: Any,
    positions: Any,
    *,
    seed: int,
    heads: int = 2,
    **more: Any,
) -> None:
    """Run a layer whose heads have `dim` elements; `rotary` returns its position_embeddings of positions [1, T] or [3, 1, T]."""
    q, k, v = (drawn(ROWS, n, dim, seed=seed + i) for i, n in enumerate((2 * heads, heads, heads)))
    for role, rows in (("q", q), ("k", k), ("v", v)):
        if getattr(layer, f"{role}_proj", None) is not None:
            setattr(layer, f"{role}_proj", Given(rows))
    for i, (parameter, values) in enumerate(sorted(layer.named_parameters())):
        if "norm" in parameter:
            around = 1.0 if parameter.endswith("weight") else 0.0
            values.data = drawn(*values.shape, seed=seed + 10 + i, around=around)
    layer.dense = layer.o_proj = torch.nn.Identity()
    at = positions[None] if positions.ndim == 1 else positions[:, None]
    hidden = torch.zeros(1, ROWS, 8)
    layer.layer_type = getattr(layer, "layer_type", None)
    layer(hidden_states=hidden, position_embeddings=rotary(hidden, at), attention_mask=None, **more)
    arrays = {"q": q, "k": k, "v": v, "positions": positions}
    arrays |= {key: out[0].transpose(0, 1) for key, out in seen.items()}
    for role, word in (("q", "query"), ("k", "key")):
        norms = [getattr(layer, n, None) for n in (f"{role}_norm", f"{role}_layernorm", f"{word}_layernorm", "qk_norm")]
        for norm in (n for n in norms if n is not None):
            each = getattr(norm, "norms", [norm])
            for attribute, key in (("weight", f"{role}_weight"), ("bias", f"{role}_norm_bias")):
                values = [getattr(n, attribute, None) for n in each]
                if values[0] is not None:
                    arrays[key] = torch.stack(values) if len(values) > 1 else values[0]
    if rotary is not none:
        module = getattr(rotary, "module", rotary)
        arrays["inv_freq"] = getattr(module, "inv_freq", None)
        if arrays["inv_freq"] is None:
            arrays["inv_freq"] = module.full_attention_inv_freq
    found |= {f"{name}/{key}": np.asarray(a.detach()) for key, a in arrays.items()}
    print(name, {key: tuple(a.shape) for key, a in arrays.items()})
    seen.clear()


def none(hidden: Any, positions: Any) -> Any:
    """No position embeddings."""
    return None


def main() -> None:
    """Every layer."""
    found: dict[str, Any] = {}
    ordinary = torch.tensor([0, 1, 2, 3, 63, 100, 1000, 4095, 8191, 16384, 100_000, 131_071])
    first = torch.arange(ROWS)

    facts = config("llama4_text", head_dim=32, rope_parameters={"rope_type": "default", "rope_theta": 500_000.0}, floor_scale=3,
                   no_rope_layers=[1, 0], attention_chunk_size=64)  # fmt: skip
    rotary = llama4.Llama4TextRotaryEmbedding(facts)
    case(found, "llama4", llama4.Llama4TextAttention(facts, 0), 32, rotary, ordinary, seed=100)
    case(found, "llama4_nope", llama4.Llama4TextAttention(facts, 1), 32, none, first, seed=200)

    text = {"rope_type": "default", "rope_theta": 5_000_000.0, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    facts = config("qwen3_vl_text", head_dim=128, hidden_size=512, rope_parameters=text)
    height, width = np.divmod(np.arange(ROWS), 4)
    three = torch.tensor(np.stack([0 * height + 5, 5 + height, 5 + width]))
    rotary = qwen3_vl.Qwen3VLTextRotaryEmbedding(facts)
    case(found, "qwen3_vl", qwen3_vl.Qwen3VLTextAttention(facts, 0), 128, rotary, three, seed=300)

    facts = config("gemma4_text", layer_types=["sliding_attention", "full_attention"], head_dim=256, global_head_dim=512,
                   num_kv_shared_layers=0, num_attention_heads=2, num_key_value_heads=1)  # fmt: skip
    module = gemma4.Gemma4TextRotaryEmbedding(facts)

    def full(hidden: Any, positions: Any) -> Any:
        return module(hidden, positions, "full_attention")

    full.module = module  # type: ignore[attr-defined]
    layer = gemma4.Gemma4TextAttention(facts, 1)
    case(found, "gemma4", layer, 512, full, ordinary, seed=400, heads=1, shared_kv_states={})

    facts = config("cohere", hidden_size=128, use_qk_norm=True)
    layer, rotary = cohere.CohereAttention(facts, 0), cohere.CohereRotaryEmbedding(facts)
    case(found, "cohere", layer, 32, rotary, ordinary, seed=500)

    facts = config("phi", hidden_size=160, qk_layernorm=True, partial_rotary_factor=0.4)
    case(found, "phi", phi.PhiAttention(facts, 0), 40, phi.PhiRotaryEmbedding(facts), ordinary, seed=600)

    facts = config("stablelm", hidden_size=128, qk_layernorm=True, partial_rotary_factor=0.25)
    layer, rotary = stablelm.StableLmAttention(facts, 0), stablelm.StableLmRotaryEmbedding(facts)
    case(found, "stablelm", layer, 32, rotary, ordinary, seed=700)

    facts = config("hunyuan_v1_dense", hidden_size=128, head_dim=32)
    layer, rotary = hunyuan.HunYuanDenseV1Attention(facts, 0), hunyuan.HunYuanDenseV1RotaryEmbedding(facts)
    case(found, "hunyuan", layer, 32, rotary, ordinary, seed=800)

    scaling = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
               "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
               "llama_4_scaling_beta": 0.1}  # fmt: skip
    facts = config("ministral3", hidden_size=128, head_dim=32, rope_parameters=scaling)
    layer, rotary = ministral3.Ministral3Attention(facts, 0), ministral3.Ministral3RotaryEmbedding(facts)
    case(found, "ministral3", layer, 32, rotary, ordinary, seed=900, position_ids=ordinary[None])

    np.savez_compressed(HERE / "rows.npz", **found)
    print((HERE / "rows.npz").stat().st_size, "bytes")


if __name__ == "__main__":
    torch.manual_seed(0)
    with torch.no_grad():
        main()
