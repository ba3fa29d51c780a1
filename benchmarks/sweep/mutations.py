"""Changes of one field of a config: deleted, null, flipped, other numbers, and RoPE in every spelling that files have."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.sweep import said
from benchmarks.sweep.types import Found, every_type

LAYERS = 8  # more than any pattern's unit but Jamba's, and quick to run
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# Fields that attention, its positions or its norms can depend on.
_OF_ATTENTION = re.compile(
    r"head|layer|window|rope|theta|rotary|scal|multiplier|cap|norm|eps|qk|lora|_dim|hidden_size|position|sliding|pattern"
    r"|attn|attention|kv|bidirectional|sink|alibi|interleave|multi_query|decoder_architecture"
)
_NOT = re.compile(
    r"token|dropout|init|router|expert|moe|vision|audio|mlp|aux|loss|bias|_attn_implementation|architectures|model_type"
)
# What a class makes of other fields for all layers, and Mamba's infinity, which transformers refuses as JSON has it.
_UNREADABLE = ("per_layer_config", "time_step_limit")
_Change = tuple[str, dict[str, Any]]


def families(only: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every text type that kvgen reads by its model_type, with a config of few layers; `only` names some."""
    seen: set[str] = set()
    for found in every_type():
        if isinstance(found, Found) and found.text_type not in seen and (not only or found.text_type in only):
            seen.add(found.text_type)
            values = shortened(found.text_values)
            answer = said.layers(values)
            if not answer.refused:
                yield found.text_type, values


def shortened(values: dict[str, Any]) -> dict[str, Any]:
    """The config with LAYERS layers; lists of one entry a layer are cut alike."""
    made = {k: v for k, v in copy.deepcopy(values).items() if k not in ("architectures", *_UNREADABLE)}
    key = next((k for k in _LAYER_KEYS if k in made), None)
    if key is None or made[key] <= LAYERS:
        return made
    whole, made[key] = made[key], LAYERS
    if "num_layers_per_stack" in made:  # HRM: a stack of one layer that is run so often
        made["num_layers_per_stack"] = 1
    for name, value in made.items():
        if isinstance(value, list) and len(value) == whole:
            made[name] = value[:LAYERS]
    return made


def of(values: dict[str, Any]) -> Iterator[_Change]:
    """The config unchanged, then every change of it, each with a few words that name it."""
    yield "as it is", values
    for name in sorted(values):
        if _OF_ATTENTION.search(name) and not _NOT.search(name):
            yield f"no {name}", {k: v for k, v in values.items() if k != name}
            if values[name] is not None:
                yield f"{name}: null", {**values, name: None}
            yield from _other_values(values, name)
    yield from _ropes(values)
    yield from _windows(values)


def _other_values(values: dict[str, Any], name: str) -> Iterator[_Change]:
    value = values[name]
    if isinstance(value, bool):
        yield f"{name}: {not value}".lower(), {**values, name: not value}
    elif isinstance(value, int) and value > 1 and value % 2 == 0 and name not in _LAYER_KEYS:
        yield f"{name}: half", {**values, name: value // 2}
    elif isinstance(value, float):
        yield f"{name}: times 1.5", {**values, name: value * 1.5}


def _ropes(values: dict[str, Any]) -> Iterator[_Change]:
    """RoPE of each type, as transformers 5 and 4 spell it, and in files that mix both."""
    if "rope_parameters" not in values and "rope_theta" not in values:
        return
    dims = _rotated(values)
    given = values.get("rope_parameters") or {}
    nested = {k: v for k, v in given.items() if isinstance(v, dict)}
    first = next(iter(nested.values()), given)
    theta = float(first.get("rope_theta") or values.get("rope_theta") or 10_000.0)
    rest = {
        k: v
        for k, v in values.items()
        if k not in ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
    }
    trained = {"original_max_position_embeddings": 4096}
    yarn = {"rope_type": "yarn", "factor": 4.0}
    longrope = {"rope_type": "longrope", "short_factor": _factors(dims), "long_factor": _factors(dims, 2.0)}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    forms: dict[str, dict[str, Any]] = {
        "default": {"rope_type": "default"},
        "linear": {"rope_type": "linear", "factor": 2.0},
        "dynamic": {"rope_type": "dynamic", "factor": 2.0},
        "yarn": {**yarn, **trained},
        "yarn, betas": {**yarn, **trained, "beta_fast": 16.0, "beta_slow": 2.0},
        "yarn, mscale": {**yarn, **trained, "mscale": 1.0, "mscale_all_dim": 0.7},
        "yarn, attention_factor": {**yarn, **trained, "attention_factor": 1.25},
        "yarn, truncate false": {**yarn, **trained, "truncate": False},
        "yarn, no original": yarn,
        "llama3": {**llama3, "original_max_position_embeddings": 8192},
        "longrope": {**longrope, **trained},
        "longrope, factor": {**longrope, **trained, "factor": 16.0},
        "longrope, factor alone": {**longrope, "factor": 16.0},
        "longrope, attention_factor": {**longrope, **trained, "attention_factor": 1.5},
        "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
        "partial, linear": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
    }
    for name, form in forms.items():
        whole = {**form, "rope_theta": theta}
        if nested:
            yield f"rope_parameters: {name}", {**rest, "rope_parameters": {k: dict(whole) for k in nested}}
            for kind in nested:
                yield f"rope_parameters.{kind}: {name}", {**rest, "rope_parameters": {**nested, kind: whole}}
        else:
            yield f"rope_parameters: {name}", {**rest, "rope_parameters": whole}
        old = {k: v for k, v in form.items() if k != "partial_rotary_factor"}
        part = {"partial_rotary_factor": form["partial_rotary_factor"]} if "partial_rotary_factor" in form else {}
        yield f"rope_scaling: {name}", {**rest, **part, "rope_theta": theta, "rope_scaling": old}
        typed = {"type": old["rope_type"], **{k: v for k, v in old.items() if k != "rope_type"}}
        yield f"rope_scaling.type: {name}", {**rest, **part, "rope_theta": theta, "rope_scaling": typed}
    linear = {"rope_type": "linear", "factor": 2.0}
    yield "no RoPE fields", rest
    yield "rope_theta alone", {**rest, "rope_theta": theta * 3}
    yield "rope_scaling: null", {**rest, "rope_theta": theta, "rope_scaling": None}
    yield "rope_scaling: {}", {**rest, "rope_theta": theta, "rope_scaling": {}}
    yield "rope_scaling beside rope_parameters", {**values, "rope_scaling": {**linear, "rope_theta": theta}}
    yield "rope_scaling {} beside rope_parameters", {**values, "rope_scaling": {}}
    yield "rope_parameters without a type", {**rest, "rope_parameters": {"rope_theta": theta * 3}}
    yield "rope_parameters without theta", {**rest, "rope_parameters": dict(linear)}
    yield (
        "su",
        {
            **rest,
            "rope_theta": theta,
            "rope_scaling": {"type": "su", "short_factor": _factors(dims), "long_factor": _factors(dims, 2.0)},
        },
    )
    inside = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "rope_theta": theta}
    yield (
        "original_max_position_embeddings twice",
        {**rest, "rope_parameters": inside, "original_max_position_embeddings": 2048},
    )
    beside = {k: v for k, v in inside.items() if k != "original_max_position_embeddings"}
    yield (
        "original_max_position_embeddings beside",
        {**rest, "rope_parameters": beside, "original_max_position_embeddings": 2048},
    )


def _windows(values: dict[str, Any]) -> Iterator[_Change]:
    layers = next((values[k] for k in _LAYER_KEYS if k in values), LAYERS)
    if "sliding_window" in values:
        yield "sliding_window: 64", {**values, "sliding_window": 64}
        yield "sliding_window: 0", {**values, "sliding_window": 0}
        used = {**values, "use_sliding_window": True, "sliding_window": 64}
        yield "use_sliding_window: true, 64", {k: v for k, v in used.items() if k != "layer_types"}
        yield (
            "use_sliding_window: true, from layer 4",
            {**{k: v for k, v in used.items() if k != "layer_types"}, "max_window_layers": 4},
        )
        yield "use_sliding_window: true, null", {**used, "sliding_window": None}
        yield "use_sliding_window: false", {**values, "use_sliding_window": False, "sliding_window": 64}
    for name, unit in {
        "alternating": ("sliding_attention", "full_attention"),
        "all full": ("full_attention",),
        "all sliding": ("sliding_attention",),
    }.items():
        types = [unit[i % len(unit)] for i in range(layers)]
        yield (
            f"layer_types: {name}",
            {**values, "sliding_window": values.get("sliding_window") or 64, "layer_types": types},
        )
    yield "use_bidirectional_attention: true", {**values, "use_bidirectional_attention": True}


def _rotated(values: dict[str, Any]) -> int:
    heads = values.get("num_attention_heads") or 1
    dims = values.get("qk_rope_head_dim") or values.get("head_dim") or values.get("hidden_size", heads) // heads
    given = values.get("rope_parameters") or {}
    part = values.get("partial_rotary_factor") or given.get("partial_rotary_factor") or 1.0
    return int(dims * part)


def _factors(dims: int, times: float = 1.0) -> list[float]:
    return [round(times * (1.0 + i / 16), 4) for i in range(dims // 2)]
