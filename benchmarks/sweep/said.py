"""What kvgen says of a config, layer by layer, and where transformers' modules differ. The only place that asks kvgen."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.sweep.truth import LayerTruth, NormTruth, Rotation
from kvgen import models
from kvgen.errors import ConfigError, ToolError
from kvgen.lowering.frequencies import cos_sin_factor, inverse_frequencies
from kvgen.models.layers import LayerFacts, Norm, QueryScale

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Said:
    """kvgen's answer to a config: layers, why it refused it or its spec, or the traceback that no config may cause."""

    layers: list[LayerFacts]
    refused: str = ""
    no_spec: str = ""
    crashed: str = ""


def layers(config: Mapping[str, Any]) -> Said:
    """What kvgen reads of the config, and whether `kvgen init` writes a spec for it, which then builds."""
    try:
        found = models.facts(config).layers()
    except (ConfigError, ToolError) as error:
        return Said([], refused=str(error))
    except Exception:
        return Said([], crashed=traceback.format_exc(limit=-4))
    try:
        text = models.spec_text(config, source="config.json")
        exec(compile(text, "<spec>", "exec"), {"__name__": "spec"})
        return Said(found)
    except (ConfigError, ToolError) as error:
        return Said(found, no_spec=str(error))
    except Exception:
        return Said(found, crashed=traceback.format_exc(limit=-4))


def differences(truth: Sequence[LayerTruth], said: Sequence[LayerFacts]) -> list[str]:
    """Every fact in which they differ, each once with the layers that have it; empty where kvgen is right."""
    found: dict[str, list[int]] = {}
    if len(truth) != len(said):
        return [f"layers: kvgen {len(said)}, transformers {len(truth)}"]
    for there, here in zip(truth, said, strict=True):
        for text in _layer(there, here):
            found.setdefault(text, []).append(there.index)
    return [f"{text} (layers {_ranges(numbers)})" for text, numbers in found.items()]


def _layer(there: LayerTruth, here: LayerFacts) -> list[str]:
    if not there.attends or not here.cache:
        return (
            []
            if there.attends == here.cache
            else [f"keys and values: kvgen {here.cache}, transformers {there.attends}"]
        )
    pairs: list[tuple[str, Any, Any]] = [
        ("query heads", here.q_heads, there.q_heads),
        ("scale", here.scale, there.scale),
        ("window", here.window, there.window),
        ("chunk", here.chunk, there.chunk),
        ("soft cap", here.softcap or None, there.softcap or None),
        ("sinks", here.sinks, there.sinks),
        ("alibi", here.alibi, there.alibi),
        ("KV source", here.kv_source, there.kv_source),
        ("causal", True, there.causal if there.causal is not None else True),
    ]
    scaled = here.q_scale
    pairs.append(("q scale", None if scaled is None else _said_scale(scaled), there.q_scale))
    if there.latent is not None:
        mla = here.mla
        said = None if mla is None else (mla.kv_lora_rank, mla.qk_rope_head_dim, mla.qk_nope_head_dim, mla.v_head_dim)
        pairs.append(("latent (rank, rope, nope, v)", said, there.latent))
    else:
        pairs.append(("KV heads", here.kv_heads, there.kv_heads))
        pairs += [("K dim", here.head_dim_k, there.k_dim), ("V dim", here.head_dim_v, there.v_dim)]
    for role, norm, names in (
        ("q norm", here.q_norm, ("q", "qk")),
        ("k norm", here.k_norm, ("latent",) if there.latent else ("k", "qk")),
        ("v norm", here.v_norm, ("v",)),
    ):
        measured = next((there.norms[n] for n in names if n in there.norms), None)
        if not (role != "q norm" and there.kv_source is not None):
            pairs.append((role, _said_norm(norm), _true_norm(measured)))
    wrong = [f"{name}: kvgen {mine}, transformers {theirs}" for name, mine, theirs in pairs if not _same(mine, theirs)]
    wrong += _rope(there, here)
    return wrong


def _same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, tuple) and isinstance(theirs, tuple):
        return len(mine) == len(theirs) and all(_same(a, b) for a, b in zip(mine, theirs, strict=True))
    if isinstance(mine, float) or isinstance(theirs, float):
        if mine is None or theirs is None:
            return mine is theirs
        return abs(float(mine) - float(theirs)) <= TOLERANCE * abs(float(theirs))
    return bool(mine == theirs)


def _said_scale(scaled: QueryScale) -> tuple[Any, ...]:
    if scaled.form == "power":
        return (f"(1 + (position + {scaled.shift}) / {scaled.positions}) ** {scaled.coefficient:g}",)
    return scaled.coefficient, scaled.positions, scaled.shift


def _said_norm(norm: Norm | None) -> tuple[Any, ...] | None:
    return None if norm is None else (norm.kind, norm.dim, norm.eps, norm.offset, norm.weight, norm.order)


def _true_norm(norm: NormTruth | None) -> tuple[Any, ...] | None:
    if norm is None:
        return None
    return (norm.kind, norm.dim, norm.eps, norm.offset, norm.weight, "after" if norm.after_rope else "before")


def _rope(there: LayerTruth, here: LayerFacts) -> list[str]:
    if there.rope is None or here.rope is None:
        if (there.rope is None) == (here.rope is None):
            return []
        mine, theirs = (("none" if r is None else "turns") for r in (here.rope, there.rope))
        return [f"RoPE: kvgen {mine}, transformers {theirs}"]
    return _turns(rotation(here, there.rope.width), there.rope)


def _turns(mine: Rotation, theirs: Rotation) -> list[str]:
    """Where two rotations of as many elements differ."""
    wrong: list[str] = []
    if mine.partner != theirs.partner:
        turned = sum(p >= 0 for p in mine.partner), sum(p >= 0 for p in theirs.partner)
        styles = ["interleaved" if r.interleaved else "neox" for r in (mine, theirs)]
        wrong.append(f"pairs: kvgen {turned[0]} of {mine.width} {styles[0]}, transformers {turned[1]} {styles[1]}")
    elif not _same(mine.angle, theirs.angle):
        i = next(i for i in range(mine.width) if not _same(mine.angle[i], theirs.angle[i]))
        wrong.append(f"frequency of element {i}: kvgen {mine.angle[i]:.8g}, transformers {theirs.angle[i]:.8g}")
    if not _same(mine.factor, theirs.factor):
        wrong.append(f"factor of cos and sin: kvgen {mine.factor:.6g}, transformers {theirs.factor:.6g}")
    return wrong


def rotation(here: LayerFacts, width: int) -> Rotation:
    """What kvgen's RoPE does to `width` elements, the ones that transformers' RoPE function is given."""
    rope = here.rope
    assert rope is not None
    turned = rope.dim or width
    if here.proportional:  # part of the pairs of the whole head turn, with the whole head's frequencies
        angles = inverse_frequencies(rope.model_copy(update={"dim": None}), width)[: turned // 2]
    else:
        angles = inverse_frequencies(rope, turned)
    half = (width if here.proportional else turned) // 2
    partner, angle = [-1] * width, [0.0] * width
    for i, f in enumerate(angles):
        a, b = (2 * i, 2 * i + 1) if rope.style == "interleaved" else (i, i + half)
        if b < width and f != 0.0:
            partner[a], partner[b], angle[a], angle[b] = b, a, f, f
    return Rotation(width, tuple(partner), tuple(angle), cos_sin_factor(rope), rope.style == "interleaved")


def _ranges(numbers: list[int]) -> str:
    if len(numbers) > 6:
        return f"{numbers[0]}, {numbers[1]}, ... {numbers[-1]}: {len(numbers)}"
    return ", ".join(map(str, numbers))
