"""Kinds of layers -> `kvgen.Model`: in few words where layers are alike but for a window, else kind by kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvgen.models.layers import LayerFacts
from kvgen.schema.model import Kind, Model


def model_of(architecture: str, kinds: Sequence[LayerFacts], pattern: Sequence[int], *, rsqrt: float | None) -> Model:
    """The model as a spec states it; `rsqrt` is query_pre_attn_scalar where scores are scaled by its -1/2 power."""
    short = _short(architecture, kinds, pattern, rsqrt)
    if short is not None:
        return short
    unit = repeating([kinds[kind].kind for kind in pattern])
    return Model(
        architecture=architecture,
        layers=len(pattern),
        alibi=any(kind.alibi for kind in kinds),
        mla=next((kind.mla for kind in kinds if kind.mla is not None), None),
        kinds=tuple(_kind(kind) for kind in kinds),
        pattern=() if len(kinds) == 1 else unit,
    )


def repeating(names: Sequence[str]) -> tuple[str, ...]:
    """The shortest unit whose repetition, cut off at the end, these names are."""
    count = len(names)
    return tuple(
        names[: next(n for n in range(1, count + 1) if all(names[i] == names[i % n] for i in range(n, count)))]
    )


def _short(architecture: str, kinds: Sequence[LayerFacts], pattern: Sequence[int], rsqrt: float | None) -> Model | None:
    """The model of one kind of layers, or of windowed and full ones that differ in nothing else but an unscaled base."""
    first = kinds[0]
    if len(kinds) > 2 or not all(kind.cache for kind in kinds) or first.proportional or first.chunk is not None:
        return None
    if any(kind.kv_source is not None or kind.compressed is not None for kind in kinds):
        return None
    if any(kind.v_norm or kind.q_scale or kind.q_factor != 1.0 for kind in kinds) or first.head_dim_v != _usual_v(
        first
    ):
        return None
    if first.q_norm is not None and (
        first.q_norm.order == "after" or first.q_norm.kind != "rms" or not first.q_norm.weight
    ):
        return None
    local = next((kind for kind in kinds if kind.window is not None), None)
    full = next((kind for kind in kinds if kind.window is None), None)
    rope = (full or first).rope
    if len(kinds) == 2:
        if local is None or full is None:
            return None
        alike = replace(local, index=full.index, kind=full.kind, window=None, rope=full.rope)
        if alike != full or (local.rope is None) != (full.rope is None):
            return None
        if local.rope != full.rope:
            assert local.rope is not None and rope is not None
            plain = local.rope.model_copy(update={"theta": rope.theta, "scaling": None})
            if local.rope.scaling is not None or plain != rope.model_copy(update={"scaling": None}):
                return None
            rope = rope.model_copy(update={"local_theta": local.rope.theta})
    names = repeating(["full" if kinds[kind].window is None else "local" for kind in pattern])
    norm = first.q_norm
    fields: dict[str, Any] = {
        "architecture": architecture,
        "layers": len(pattern),
        "rope": rope,
        "alibi": first.alibi,
        "window": local.window if local is not None else None,
        "window_pattern": names if len(names) > 1 else None,
        "sinks": first.sinks,
        "qk_norm": norm.over if norm is not None else None,
        "logit_softcap": first.softcap,
        "query_pre_attn_scalar": rsqrt,
        "mla": first.mla,
        "indexer": first.indexer,
    }
    model = Model(**fields)
    if abs(model.softmax_scale(first.head_dim_k) - first.scale) > 1e-9 * first.scale:
        model = Model(**fields, scale=first.scale)
    return model


def _usual_v(kind: LayerFacts) -> int:
    return kind.head_dim_k if kind.mla is None else kind.mla.kv_lora_rank


def _kind(kind: LayerFacts) -> Kind:
    if not kind.cache:
        return Kind(name=kind.kind, cache=False)
    usual, scale = kind.head_dim_k**-0.5, kind.scale * kind.q_factor
    fields: dict[str, Any] = {
        "name": kind.kind,
        "q_heads": kind.q_heads,
        "kv_heads": kind.kv_heads,
        "head_dim": kind.head_dim_k,
        "v_head_dim": kind.head_dim_v if kind.head_dim_v != _usual_v(kind) else None,
        "window": kind.window,
        "chunk": kind.chunk,
        "rope": kind.rope,
        "qk_norm": kind.q_norm.over if kind.q_norm is not None else None,
        "scale": scale if kind.mla is not None or abs(scale - usual) > 1e-9 * usual else None,
        "logit_softcap": kind.softcap,
        "sinks": kind.sinks,
        "kv_source": kind.kv_source,
        "compressed": kind.compressed,
        "indexer": kind.indexer,
    }
    return Kind(**{name: value for name, value in fields.items() if value is not None and value is not False})
