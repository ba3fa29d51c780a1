"""Records what transformers' own modules do to Q and K, in float32: the .npz beside this file.

Written with transformers 5.23.0 and PyTorch 2.13.0+cpu (Python 3.11, NumPy 2.4.6, ml_dtypes 0.5). To write them again, in
an environment of its own, since neither kvgen nor its tests need these packages:

    python3 -m venv /tmp/golden
    /tmp/golden/bin/pip install transformers==5.23.0 torch==2.13.0 numpy ml_dtypes
    /tmp/golden/bin/python tests/reference/transformers/make.py

PyTorch runs without its vector instructions (ATEN_CPU_CAPABILITY=default): with them its power is off by an ulp in 1 of 100
frequencies, another one on each kind of CPU, and a position of 100 000 makes much of that.

A file is one layer's Q or K: `x` f32 [T, heads, dim], numbers of bf16, so that kernels of any dtype can read them exactly.

- `positions` i64 [T], or [3, T] where a model has sections (`sections` i64 [3], Qwen2-VL's M-RoPE)
- `inv_freq` f32 [d / 2], `factor` f64 []: the rotary embedding's buffer and its attention_scaling
- `cos`, `sin` f32 [T, d / 2]: what it returned, the factor included; the second half of each row, the same again, left out
- `rope` f32 [T, heads, dim]: x through apply_rotary_pos_emb, elements that pass included
- `weight` f32 [n] (of bf16), `eps` f64 []: the RMS norm's; `norm`: x through it; `both`: x through it and then RoPE. Only
  where a model normalises Q and K (Qwen 3, Gemma 3) or the latent part (DeepSeek: elements 0 to 511)
- `order` i64 [dim]: element j of kvgen's row is element order[j] of `rope` and `both`. Not the identity for DeepSeek alone,
  whose transformers code takes interleaved pairs and returns halves; kvgen, like DeepSeek's own code and vLLM, leaves
  an element in its place

`input_norm.npz` has LlamaRMSNorm over whole rows, [2, 4096] (`x`, `weight`, `eps`, `norm`), `frequencies.npz` the `inv_freq`
and `factor` of every config in tests/models/configs that has a RoPE: NAME/KIND/inv_freq, NAME/KIND/factor with KIND
"full", "local", "short" or "long".
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

os.environ["ATEN_CPU_CAPABILITY"] = "default"

import ml_dtypes
import numpy as np
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.gemma3 import modeling_gemma3 as gemma
from transformers.models.llama import modeling_llama as llama
from transformers.models.phi3 import modeling_phi3 as phi
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
from transformers.models.qwen3 import modeling_qwen3 as qwen3

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "models" / "configs"
POSITIONS = [0, 1, 2, 3, 63, 100, 127, 1000, 4095, 4096, 8191, 8192, 32767, 65535, 100_000, 131_071]


def config(name: str, **changes: Any) -> Any:
    """transformers' configuration of tests/models/configs/NAME.json, of the text model where there are several."""
    stated = json.loads((CONFIGS / f"{name}.json").read_text())
    stated.update(changes)
    stated.pop("quantization_config", None)
    # Kimi K2's architecture is DeepSeek's; its own name is known to its own code alone.
    kind = {"kimi_k2": "deepseek_v3"}.get(stated["model_type"], stated["model_type"])
    found = AutoConfig.for_model(kind).from_dict({**stated, "model_type": kind})
    return getattr(found, "text_config", found)


def drawn(*shape: int, seed: int, around: float = 0.0) -> torch.Tensor:
    """Normally distributed f32 numbers that bf16 has."""
    numbers = np.random.default_rng(seed).standard_normal(shape) * (0.25 if around else 1.0) + around
    return torch.from_numpy(numbers.astype(ml_dtypes.bfloat16).astype(np.float32))


def up_to(most: int) -> torch.Tensor:
    """16 positions below `most`."""
    kept = [p for p in POSITIONS if p < most]
    return torch.tensor([*kept, *(most - 1 - 7 * i for i in range(16 - len(kept)))])


def save(name: str, **arrays: Any) -> None:
    """One .npz of f32, f64 and i64."""
    found = {key: np.asarray(a.detach() if isinstance(a, torch.Tensor) else a) for key, a in arrays.items()}
    np.savez_compressed(HERE / f"{name}.npz", **found)
    print(f"{name}: {(HERE / f'{name}.npz').stat().st_size} bytes")


def by_token(x: torch.Tensor) -> torch.Tensor:
    """[1, heads, T, dim] -> [T, heads, dim]."""
    return x[0].transpose(0, 1).contiguous()


def case(
    name: str,
    x: torch.Tensor,
    positions: torch.Tensor,
    rotary: Any,
    apply: Any,
    norm: Any = None,
    kind: str = "",
    **more: Any,
) -> None:
    """Save one file: `rotary` and `norm` are modules, `apply` the model's function on q and k [1, heads, T, dim]."""
    # LongRoPE's buffer changes as the module is called: called first.
    cos, sin = rotary(x, positions[None] if positions.ndim == 1 else positions[:, None], *([kind] if kind else []))
    prefix = f"{kind}_" if kind else ""
    half = cos.shape[-1] // 2

    def turned(y: torch.Tensor) -> torch.Tensor:
        one = y.transpose(0, 1)[None]
        return by_token(apply(one, one, cos, sin)[1])

    arrays: dict[str, Any] = {
        "x": x,
        "positions": positions,
        "inv_freq": getattr(rotary, f"{prefix}inv_freq"),
        "factor": np.float64(getattr(rotary, f"{prefix}attention_scaling")),
        "cos": cos[0, :, :half],
        "sin": sin[0, :, :half],
        "rope": turned(x),
        "order": np.arange(x.shape[2]),
    }
    if norm is not None:
        normed = norm(x)
        arrays.update(weight=norm.weight, eps=np.float64(getattr(norm, "eps", None) or norm.variance_epsilon))
        arrays.update(norm=normed, both=turned(normed))
    save(name, **{**arrays, **more})


def with_weight(norm: Any, seed: int, around: float) -> Any:
    """The norm with drawn weights in place of ones or zeros."""
    norm.weight.data = drawn(norm.weight.numel(), seed=seed, around=around)
    return norm


def deepseek_case() -> None:
    """A latent row: 512 normalised elements, then 64 that turn."""
    facts = config("deepseek_v3")
    latent, turning = facts.kv_lora_rank, facts.qk_rope_head_dim
    norm = with_weight(deepseek.DeepseekV3RMSNorm(latent), 31, 1.0)
    rotary, positions = deepseek.DeepseekV3RotaryEmbedding(facts), up_to(facts.max_position_embeddings)
    x = drawn(16, 1, latent + turning, seed=30)

    def on_part(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _, turned = deepseek.apply_rotary_pos_emb_interleave(q[..., latent:], k[..., latent:], cos, sin)
        return q, torch.cat([k[..., :latent], turned], dim=-1)

    class OfLatent(torch.nn.Module):
        weight, variance_epsilon = norm.weight, norm.variance_epsilon

        def forward(self, row: torch.Tensor) -> torch.Tensor:
            return torch.cat([norm(row[..., :latent]), row[..., latent:]], dim=-1)

    order = np.arange(latent + turning)
    order[latent:] = latent + np.arange(turning).reshape(2, -1).T.reshape(-1)
    case("deepseek_v3", x, positions, rotary, on_part, OfLatent(), order=order)


def attention_cases() -> None:
    """One file for each way of turning and normalising."""
    facts = config("llama_3_1_8b")
    x, positions = drawn(16, 2, 128, seed=1), up_to(facts.max_position_embeddings)
    case("llama_3_1_8b", x, positions, llama.LlamaRotaryEmbedding(facts), llama.apply_rotary_pos_emb)

    rows = with_weight(llama.LlamaRMSNorm(facts.hidden_size, eps=facts.rms_norm_eps), 3, 1.0)
    x = drawn(2, facts.hidden_size, seed=2)
    save("input_norm", x=x, weight=rows.weight, eps=np.float64(rows.variance_epsilon), norm=rows(x))

    facts = config("qwen3_8b")
    norm = with_weight(qwen3.Qwen3RMSNorm(facts.head_dim, eps=facts.rms_norm_eps), 11, 1.0)
    x, positions = drawn(16, 2, facts.head_dim, seed=10), up_to(facts.max_position_embeddings)
    case("qwen3_8b", x, positions, qwen3.Qwen3RotaryEmbedding(facts), qwen3.apply_rotary_pos_emb, norm)

    facts = config("gemma_3_4b_it")
    norm = with_weight(gemma.Gemma3RMSNorm(facts.head_dim, eps=facts.rms_norm_eps), 21, 0.0)
    rotary, positions = gemma.Gemma3RotaryEmbedding(facts), up_to(facts.max_position_embeddings)
    for name, kind, seed in (("local", "sliding_attention", 20), ("full", "full_attention", 22)):
        x = drawn(16, 2, facts.head_dim, seed=seed)
        case(f"gemma_3_4b_it_{name}", x, positions, rotary, gemma.apply_rotary_pos_emb, norm, kind)

    facts = config("phi_3_mini_4k")
    x, positions = drawn(16, 2, 96, seed=40), up_to(facts.max_position_embeddings)
    case("phi_3_mini_4k", x, positions, phi.Phi3RotaryEmbedding(facts), phi.apply_rotary_pos_emb)

    # Phi-4-mini's shape, 96 of 128 elements, with Phi-3.5's factors.
    for shape, changes, dim in (
        ("phi_3_5_mini", {}, 96),
        ("phi_3_5_partial", {"hidden_size": 4096, "partial_rotary_factor": 0.75}, 128),
    ):
        facts = config("phi_3_5_mini", **changes)
        for name, most, seed in (("short", facts.original_max_position_embeddings, 41), ("long", 131_072, 42)):
            x, positions = drawn(16, 2, dim, seed=seed), up_to(most)
            case(f"{shape}_{name}", x, positions, phi.Phi3RotaryEmbedding(facts), phi.apply_rotary_pos_emb)

    # An image of 3 x 4 patches behind 4 words: time stands still, height and width count.
    sections = [16, 24, 24]
    text = {"type": "mrope", "mrope_section": sections}
    facts = AutoConfig.for_model("qwen2_vl", rope_theta=1_000_000.0, rope_scaling=text).text_config
    words, (height, width) = np.arange(4), np.divmod(np.arange(12), 4)
    positions = torch.tensor(np.stack([np.concatenate([words, 4 + a]) for a in (0 * height, height, width)]))
    x, rotary = drawn(16, 2, 128, seed=50), qwen2_vl.Qwen2VLRotaryEmbedding(facts)
    case("qwen2_vl", x, positions, rotary, qwen2_vl.apply_rotary_pos_emb, sections=np.array(sections))


def frequencies() -> None:
    """Every config's, as its rotary embedding computes them."""
    found: dict[str, Any] = {}
    for path in sorted(CONFIGS.glob("*.json")):
        facts = config(path.stem)
        module = importlib.import_module(f"transformers.models.{facts.model_type.removesuffix('_text')}.modeling_"
                                         f"{facts.model_type.removesuffix('_text')}")  # fmt: skip
        (rotary,) = (getattr(module, n) for n in dir(module) if n.endswith("RotaryEmbedding") and "Vision" not in n)
        built = rotary(facts)
        if "gemma" in path.stem:
            for kind, of in (("full", "full_attention"), ("local", "sliding_attention")):
                found[f"{path.stem}/{kind}/inv_freq"] = getattr(built, f"{of}_inv_freq")
                found[f"{path.stem}/{kind}/factor"] = np.float64(getattr(built, f"{of}_attention_scaling"))
            continue
        longer = built.rope_type == "longrope"
        found[f"{path.stem}/{'short' if longer else 'full'}/inv_freq"] = built.inv_freq
        found[f"{path.stem}/{'short' if longer else 'full'}/factor"] = np.float64(built.attention_scaling)
        if longer:
            values, factor = ROPE_INIT_FUNCTIONS["longrope"](facts, seq_len=facts.max_position_embeddings)
            found[f"{path.stem}/long/inv_freq"], found[f"{path.stem}/long/factor"] = values, np.float64(factor)
    save("frequencies", **found)


if __name__ == "__main__":
    torch.manual_seed(0)
    with torch.no_grad():
        attention_cases()
        deepseek_case()
        frequencies()
