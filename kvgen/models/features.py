"""What some layers of a model ask for and no operation of kvgen does yet: one row a feature.

A row goes away when the operation has it; `kvgen.models.text` then writes it into the spec.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvgen.models.layers import LayerFacts


@dataclass(frozen=True)
class Feature:
    """`what` in words, `lacking` the operation and what it does instead; `asked` says whether a layer asks for it."""

    what: str
    lacking: str
    asked: Callable[[LayerFacts], bool]


FEATURES: Final = (
    Feature(
        "q multiplied by (1 + (position + 1) / 2048) ** 0.1",
        "the position_scale of ops.Append is a logarithm's",
        lambda layer: layer.q_scale is not None and layer.q_scale.form == "power",
    ),
    Feature(
        "M-RoPE whose pairs go h w h w, then t",
        "the sections of ops.Append lie in runs or go round t, h and w",
        lambda layer: bool(layer.mrope) and layer.mrope_layout == "hw_t",
    ),
    Feature(
        "latent rows with windows",
        "ops.MlaDecode has none",
        lambda layer: layer.mla is not None and layer.window is not None,
    ),
)


def lacking(layers: tuple[LayerFacts, ...]) -> tuple[Feature, LayerFacts] | None:
    """The first feature that kvgen lacks for these kinds of layers, and a kind that asks for it."""
    return next(((one, layer) for one in FEATURES for layer in layers if layer.cache and one.asked(layer)), None)
