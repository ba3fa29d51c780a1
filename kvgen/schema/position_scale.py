"""Factor of q by its position: temperature of attention over long sequences."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvgen.schema.base import Spec


class PositionScale(Spec):
    """q is multiplied by 1 + scale * ln(1 + floor((position + offset) / period)) (arXiv 2501.19399).

    It stands after the norm and RoPE of q. Llama 4 has it on layers without RoPE (`attn_temperature_tuning`):
    PositionScale(scale=0.1, period=8192, offset=1), from attn_scale and floor_scale. Ministral 3 and Mistral 4 have it on all
    layers (`llama_4_scaling_beta`): scale=beta, period=original_max_position_embeddings, offset=0. The factor is an f32
    number and q * factor is rounded once, as transformers does for Llama 4; for the other two transformers casts the factor
    to q's dtype first.
    """

    scale: Annotated[float, Field(gt=0.0, le=1e3, allow_inf_nan=False)]
    """Factor of the logarithm: 0.1 in Llama 4."""
    period: Annotated[int, Field(ge=1, le=2**24)]
    """Positions over which the factor stays the same: 8192 in Llama 4."""
    offset: Annotated[int, Field(ge=0, le=2**20)] = 0
    """Number added to a position: 1 in Llama 4, which counts tokens from 1."""
