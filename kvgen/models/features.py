"""What some layers of a model ask for and no operation of kvgen does yet: one row a feature.

A row goes away when the operation has it; `kvgen.models.text` then writes it into the spec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from kvgen.models.layers import LayerFacts, Norm


@dataclass(frozen=True)
class Feature:
    """`what` in words, `lacking` the operation and what it does instead; `asked` says whether a layer asks for it."""

    what: str
    lacking: str
    asked: Callable[[LayerFacts], bool]


def _norms(layer: LayerFacts) -> Iterator[Norm]:
    """Norms of q and k."""
    return (norm for norm in (layer.q_norm, layer.k_norm) if norm is not None)


FEATURES: Final = (
    Feature(
        "a layer norm of q and k",
        "ops.Append has RMS norms only",
        lambda layer: any(norm.kind == "layer" for norm in _norms(layer)),
    ),
    Feature(
        "a norm of q and k after RoPE",
        "ops.Append norms before it turns",
        lambda layer: layer.rope is not None and any(norm.order == "after" for norm in _norms(layer)),
    ),
    Feature(
        "an RMS norm without weights",
        "ops.Append multiplies by weights",
        lambda layer: any(not norm.weight for norm in _norms(layer)),
    ),
    Feature("an RMS norm of v", "ops.Append norms q and k", lambda layer: layer.v_norm is not None),
    Feature("q scaled by its position", "ops.Append has no such scale", lambda layer: layer.q_scale is not None),
    Feature(
        "layers that read another layer's keys and values",
        "ops.Append stores k and v with every q",
        lambda layer: layer.kv_source is not None,
    ),
    Feature(
        "proportional RoPE, a part of the whole head's pairs",
        "Rope turns the first elements of a head as a head of their own",
        lambda layer: layer.proportional,
    ),
    Feature(
        "M-RoPE whose sections alternate pair by pair",
        "ops.Append's sections lie in runs",
        lambda layer: bool(layer.mrope) and layer.mrope_layout != "runs",
    ),
    Feature(
        "latent rows with windows or sinks",
        "ops.MlaDecode has neither",
        lambda layer: layer.mla is not None and (layer.window is not None or layer.sinks),
    ),
)


def lacking(layers: tuple[LayerFacts, ...]) -> tuple[Feature, LayerFacts] | None:
    """The first feature that kvgen lacks for these kinds of layers, and a kind that asks for it."""
    return next(((one, layer) for one in FEATURES for layer in layers if layer.cache and one.asked(layer)), None)
