"""RoPE as a config.json states it, in the spellings of transformers 4 and 5."""

from __future__ import annotations

from typing import Literal

from kvgen.errors import ConfigError
from kvgen.models.fields import POSITIONS, Fields
from kvgen.spec.model import LinearScaling, Llama3Scaling, LongRopeScaling, Rope, Scaling, YarnScaling

_ROPE_KINDS = {
    "default": "default",
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
}


def rope_facts(
    fields: Fields,
    head_dim: int,
    *,
    theta: float,
    style: Literal["neox", "interleaved"] = "neox",
    key: str = "head_dim",
) -> Rope:
    """RoPE from `rope_theta`, `rope_scaling` and `partial_rotary_factor`, or transformers 5's `rope_parameters`.

    `theta` is the family's base where the config has none; `key` names the field `head_dim` came from, for messages.
    """
    parameters = fields.object("rope_parameters") or fields.object("rope_scaling") or Fields({}, "rope_scaling")
    base = parameters if parameters.has("rope_theta") else fields
    part = parameters if parameters.has("partial_rotary_factor") else fields
    fraction = part.number("partial_rotary_factor", default=1.0, low=0.0, high=1.0)
    rotated = int(head_dim * fraction)
    if rotated < 2 or rotated % 2:
        if part.has("partial_rotary_factor"):
            part.fail(
                "partial_rotary_factor",
                f"it rotates {rotated} of {head_dim} elements, not whole pairs; valid: such as 1.0, all of them",
            )
        raise ConfigError(f"{fields.name(key)}: got {head_dim}; RoPE turns pairs of elements; valid: an even number")
    return Rope(
        style=style,
        theta=base.number("rope_theta", default=theta, low=1.0 + 1e-6, high=1e12),
        dim=None if rotated == head_dim else rotated,
        scaling=_scaling(fields, parameters, rotated),
    )


def _scaling(fields: Fields, parameters: Fields, rotated: int) -> Scaling | None:
    kind_key = "rope_type" if parameters.has("rope_type") else "type"
    kind = parameters.choice(kind_key, _ROPE_KINDS, default="default")
    if kind == "default":
        return None
    if kind == "longrope":
        return _long_rope(fields, parameters, rotated)
    factor = parameters.number("factor", low=1.0, high=1e6)
    if kind == "linear":
        return LinearScaling(factor=factor)
    if kind == "llama3":
        low = parameters.number("low_freq_factor", low=1e-6, high=1e6)
        high = parameters.number("high_freq_factor", low=1e-6, high=1e6)
        if high <= low:
            parameters.fail("high_freq_factor", f"it must exceed low_freq_factor; valid: above {low:g}")
        return Llama3Scaling(
            factor=factor,
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_positions=parameters.integer("original_max_position_embeddings", high=POSITIONS),
        )
    return _yarn(fields, parameters, factor)


def _yarn(fields: Fields, parameters: Fields, factor: float) -> YarnScaling:
    fast = parameters.number("beta_fast", default=32.0, low=1e-6, high=1e6)
    slow = parameters.number("beta_slow", default=1.0, low=1e-6, high=1e6)
    if fast < slow:
        parameters.fail("beta_fast", f"it must not be below beta_slow; valid: from {slow:g}")
    return YarnScaling(
        factor=factor,
        original_max_positions=_original_positions(fields, parameters),
        beta_fast=fast,
        beta_slow=slow,
        # 0 is how DeepSeek's code spells "none".
        mscale=parameters.number("mscale", default=0.0, low=0.0, high=1e6) or None,
        mscale_all_dim=parameters.number("mscale_all_dim", default=0.0, low=0.0, high=1e6) or None,
        attention_factor=parameters.optional_number("attention_factor", low=1e-6, high=1e6),
        truncate=parameters.flag("truncate", default=True),
    )


def _long_rope(fields: Fields, parameters: Fields, rotated: int) -> LongRopeScaling:
    return LongRopeScaling(
        short_factor=parameters.numbers("short_factor", length=rotated // 2, low=1e-6, high=1e6),
        long_factor=parameters.numbers("long_factor", length=rotated // 2, low=1e-6, high=1e6),
        original_max_positions=_original_positions(fields, parameters, low=2),
        max_positions=fields.integer("max_position_embeddings", high=POSITIONS),
        attention_factor=parameters.optional_number("attention_factor", low=1e-6, high=1e6),
    )


def _original_positions(fields: Fields, parameters: Fields, low: int = 1) -> int:
    """The trained length: in the scaling, else beside it (Phi-3), else the model's whole length, as HF does."""
    key = "original_max_position_embeddings"
    for place in (parameters, fields):
        if place.has(key):
            return place.integer(key, low=low, high=POSITIONS)
    return fields.integer("max_position_embeddings", low=low, high=POSITIONS)


def gemma3_rope(text: Fields, head_dim: int, *, has_local: bool) -> Rope:
    """Full layers' RoPE with the local layers' base; transformers 5 nests one object for each kind of layer."""
    nested = text.object("rope_parameters")
    full = nested.object("full_attention") if nested else None
    local = nested.object("sliding_attention") if nested else None
    if full is not None:
        text_with_full = Fields({**text.values, "rope_parameters": dict(full.values)}, text.where)
        rope = rope_facts(text_with_full, head_dim, theta=1_000_000.0)
    else:
        rope = rope_facts(text, head_dim, theta=1_000_000.0)
    place, key = (local, "rope_theta") if local is not None else (text, "rope_local_base_freq")
    base = place.number(key, default=10_000.0, low=1.0 + 1e-6, high=1e12)
    return rope.model_copy(update={"local_theta": base}) if has_local else rope
