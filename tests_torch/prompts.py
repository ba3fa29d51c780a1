"""A prompt through the attention of a layer of each kind: transformers' eager code in f32, on drawn q, K and V.

Masks, scales, soft caps and sinks are the module's own; norms, RoPE and projections come before and are not run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.sweep import truth
from tests.models.prompts import KEPT, TOKENS, Prompt
from tests_torch import eager

assert TOKENS == eager.TOKENS


def prompts(name: str, values: dict[str, Any]) -> Iterator[Prompt]:
    """A prompt with its output for one layer of each kind of a config, kinds as their attention differs."""
    values = eager.with_short_windows(values)
    config = truth.text_of(truth.config_of(eager.with_few_layers(values)))
    model = truth.build(config)
    calls: dict[int, eager.Call] = {}
    with eager._noted(model, calls):
        found = truth.layers(config, model, TOKENS)
    kinds: dict[Any, int] = {}
    for layer in found:
        if layer.attends:
            shape = (layer.q_heads, layer.kv_heads, layer.k_dim, layer.v_dim, layer.scale)
            kinds.setdefault((shape, layer.window, layer.chunk, layer.sinks), layer.index)
    for index in sorted(kinds.values()):
        yield prompt(name, values, index, calls[index])


def prompt(name: str, values: dict[str, Any], index: int, call: eager.Call) -> Prompt:
    """The layer's prompt: the module runs on zeros, its attention on drawn rows."""
    module, args = call[0], eager._real(call[1])
    kwargs = {k: None if k in ("past_key_values", "layer_past") else eager._real(v) for k, v in call[2].items()}
    eager._give(module)
    place = sys.modules[type(module).__module__]
    attend, made = place.eager_attention_forward, list[Prompt]()
    sinks = next((n for n, p in module.named_parameters(recurse=False) if "sink" in n), None)

    def drawn(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *rest: Any, **more: Any) -> Any:
        heads = (query.shape[1], key.shape[1])
        one = Prompt(name, values, index, *heads, key.shape[-1], value.shape[-1], sinks=sinks is not None)
        rows = {n: torch.from_numpy(a) for n, a in one.draw().items()}
        if sinks is not None:
            setattr(module, sinks, torch.nn.Parameter(rows["sinks"], requires_grad=False))
        query, key, value = (rows[n].transpose(0, 1)[None] for n in "qkv")
        out, weights = attend(module, query, key, value, attention_mask, *rest, **more)
        kept = out[0, list(KEPT)][:, one.heads].numpy().astype(np.float32)
        made.append(replace(one, output=np.ascontiguousarray(kept)))
        return out, weights

    kept = module.config._attn_implementation
    place.eager_attention_forward = drawn
    module.config._attn_implementation = "eager"
    try:
        with torch.no_grad():
            module(*args, **kwargs)
    except Exception:
        if not made:  # what follows attention is not compared
            raise
    finally:
        place.eager_attention_forward = attend
        module.config._attn_implementation = kept
    return made[0]
