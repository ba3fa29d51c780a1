"""One layer of transformers' eager attention, in f32, on rows drawn from a seed (`tests/models/steps.py`).

The model is built without memory for its weights (`benchmarks/sweep/truth.py`), run once so that a layer's attention module
is called with real positions and masks, and that module is called again with its projections replaced by the drawn rows.
Which number of which projection becomes which element of q, k and v is found by a run on the numbers' own indices, with
norms and RoPE passing through: so fused and interleaved projections need no reader here.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.sweep import truth
from tests.models.steps import Floats, Step

TOKENS = 23
WINDOW = 9  # windows and chunks of a step: real ones are longer than a step that runs in a second


class Unable(Exception):
    """The layer cannot be run apart from its model; the text says why."""


class Given(torch.nn.Module):
    """A projection whose result is given: `[tokens, out]`, whatever it is asked."""

    def __init__(self, out: int) -> None:
        super().__init__()
        self.rows = torch.zeros(TOKENS, out)
        self.weight = torch.zeros(out, 1)

    def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return self.rows.reshape(*x.shape[:-1], -1).clone()


def with_short_windows(values: dict[str, Any]) -> dict[str, Any]:
    """The config with every window and chunk cut to WINDOW tokens, so that a step reaches past it."""
    made = dict(values)
    for name, value in values.items():
        if isinstance(value, dict) and name.endswith(("text_config", "llm_config")):
            made[name] = with_short_windows(value)
        elif name in ("sliding_window", "attention_chunk_size", "window_size") and isinstance(value, int):
            made[name] = WINDOW
    return made


def steps(name: str, values: dict[str, Any]) -> Iterator[Step]:
    """A step with its output for one layer of each kind of a config; kinds as `benchmarks/sweep/truth.py` tells them apart."""
    values = with_short_windows(values)
    config = truth.text_of(truth.config_of(values))
    kinds: dict[Any, int] = {}
    for layer in truth.layers(config):
        if layer.attends:
            rope = layer.rope and (layer.rope.partner, layer.rope.angle, layer.rope.factor)
            shape = (layer.q_heads, layer.kv_heads, layer.k_dim, layer.v_dim, layer.scale, layer.window, layer.chunk)
            kinds.setdefault((shape, rope, layer.sinks, tuple(layer.norms), layer.kv_source is None), layer.index)
    model = truth.build(config)
    calls = _calls(model, sorted(kinds.values()))
    for index in sorted(kinds.values()):
        yield step(name, values, index, *calls[index])


def _calls(
    model: torch.nn.Module, wanted: list[int]
) -> dict[int, tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """The wanted layers' attention modules and what they were called with, for TOKENS tokens."""
    found: dict[int, tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]] = {}

    def note(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.setdefault(int(module.layer_idx), (module, args, kwargs))  # type: ignore[arg-type]

    for module in model.modules():
        if getattr(module, "layer_idx", None) in wanted and ("Attention" in type(module).__name__):
            module.register_forward_pre_hook(note, with_kwargs=True)
    with truth._recording(model), torch.no_grad():
        model(input_ids=torch.arange(1, TOKENS + 1)[None], use_cache=False)
    return found


def step(
    name: str, values: dict[str, Any], index: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Step:
    """The layer's step: its shapes by a run on indices, its output by a run on drawn rows."""
    place = sys.modules[type(module).__module__]
    args, kwargs = _real(args), {k: _real(v) for k, v in kwargs.items()}
    given = _give(module)
    base = 0
    for one in given.values():
        one.rows = torch.arange(base, base + one.rows.shape[1], dtype=torch.float32).expand(TOKENS, -1)
        base += one.rows.shape[1]
    assert base < 2**24, "indices are exact in f32"
    latent = _latent(module)
    with _passing(module, place):
        q, k, v, _ = _attention(module, args, kwargs)
    norms = {n: m for n, m in module.named_modules() if "Norm" in type(m).__name__}
    weights = {
        truth._role(n): tuple(m.weight.shape) for n, m in norms.items() if getattr(m, "weight", None) is not None
    }
    weights = {role: shape for role, shape in weights.items() if role in ("q", "k", "v", "qk", "latent")}
    sinks = next((n for n, p in module.named_parameters(recurse=False) if "sink" in n), None)
    maps = {n: a[0, :, 0].long() for n, a in (("q", q), ("k", k), ("v", v))}  # [heads, dim] of indices
    made = Step(
        name, values, index, TOKENS, q.shape[1], k.shape[1], k.shape[-1], v.shape[-1],
        latent=latent, weights=weights, sinks=sinks is not None,
        one_projection=latent is None and maps["k"].shape == maps["v"].shape and bool((maps["k"] == maps["v"]).all()),
    )  # fmt: skip
    drawn = {n: torch.from_numpy(a) for n, a in made.draw().items()}
    flat = torch.zeros(TOKENS, base)
    if latent is None:
        for part in ("q", "k", "v"):
            flat[:, maps[part].reshape(-1)] = drawn[part].reshape(TOKENS, -1)
    else:
        flat[:, maps["q"].reshape(-1)] = drawn["q"].reshape(TOKENS, -1)
    base = 0
    for one in given.values():
        size = one.rows.shape[1]
        one.rows = flat[:, base : base + size]
        base += size
    if latent is not None:
        given[next(n for n in given if n.startswith("kv_a_proj"))].rows = drawn["k"].reshape(TOKENS, -1)
        module.kv_b_proj.weight = torch.nn.Parameter(drawn["up"].reshape(-1, latent[0]), requires_grad=False)
    for n, m in norms.items():
        if (role := truth._role(n)) in weights:
            m.weight = torch.nn.Parameter(drawn[f"{role}_weight"].reshape(m.weight.shape), requires_grad=False)
    if sinks is not None:
        setattr(module, sinks, torch.nn.Parameter(drawn["sinks"], requires_grad=False))
    *_, out = _attention(module, args, kwargs)
    return _with(made, out[0, -1].numpy().astype(np.float32))


def _with(step: Step, output: Floats) -> Step:
    from dataclasses import replace

    return replace(step, output=output)


def _latent(module: Any) -> tuple[int, int, int, int] | None:
    rank = getattr(module, "kv_lora_rank", None)
    return None if rank is None else (rank, module.qk_rope_head_dim, module.qk_nope_head_dim, module.v_head_dim)


def _give(module: torch.nn.Module) -> dict[str, Given]:
    """Replace the module's projections; a latent layer keeps its up-projection. By name, in order."""
    found: dict[str, Given] = {}
    for name, part in list(module.named_modules()):
        weight = getattr(part, "weight", None)
        if not name or weight is None or weight.ndim != 2 or "Norm" in type(part).__name__:
            if weight is not None and weight.ndim <= 2 and "Norm" in type(part).__name__:
                part.weight = torch.nn.Parameter(torch.ones(tuple(weight.shape)), requires_grad=False)
                if getattr(part, "bias", None) is not None:
                    part.bias = torch.nn.Parameter(torch.zeros(tuple(weight.shape)), requires_grad=False)
            continue
        if name == "kv_b_proj":
            part.weight = torch.nn.Parameter(torch.zeros(tuple(weight.shape)), requires_grad=False)
            if getattr(part, "bias", None) is not None:
                part.bias = None
            continue
        parent, _, last = name.rpartition(".")
        found[name] = Given(part.nf if hasattr(part, "nf") else weight.shape[0])
        setattr(module.get_submodule(parent) if parent else module, last, found[name])
    for name, given in list(module.named_parameters(recurse=False)):
        setattr(module, name, torch.nn.Parameter(torch.zeros(tuple(given.shape)), requires_grad=False))
    return found


def _real(value: Any) -> Any:
    """Shapes without memory as zeros, everything else as it is."""
    if isinstance(value, truth.Shaped):
        return torch.zeros(tuple(value.shape), dtype=value.dtype)
    if isinstance(value, tuple | list):
        return type(value)(_real(v) for v in value)
    return value


@contextlib.contextmanager
def _passing(module: torch.nn.Module, place: Any) -> Iterator[None]:
    """Norms, RoPE and scaling by position pass their input through."""
    norms = [m for m in module.modules() if "Norm" in type(m).__name__]
    kept: list[tuple[Any, str, Any]] = [(place, n, f) for n, f in vars(place).items() if _turns(n, f)]
    scaled = getattr(module, "attn_temperature_tuning", None)
    for norm in norms:
        norm.forward = lambda x, *a, **k: x  # type: ignore[method-assign,assignment]
    for _, name, _ in kept:
        setattr(place, name, _states if "rot" in name else lambda *a, **k: torch.ones(()))
    if scaled is not None:
        module.attn_temperature_tuning = False
    try:
        yield
    finally:
        for norm in norms:
            del norm.forward
        for where, name, function in kept:
            setattr(where, name, function)
        if scaled is not None:
            module.attn_temperature_tuning = scaled


def _turns(name: str, function: Any) -> bool:
    return callable(function) and (("apply" in name and "rot" in name) or name == "get_llama_4_attn_scale")


def _states(*args: Any, **kwargs: Any) -> Any:
    """What a RoPE function was given to turn: one tensor, or q and k."""
    given = [a for a in [*args, *kwargs.values()] if isinstance(a, torch.Tensor)]
    if isinstance(kwargs.get("k"), torch.Tensor) or (
        len(args) > 1 and isinstance(args[1], torch.Tensor) and args[1].ndim >= 4
    ):
        return given[0], given[1]
    return given[0]


def _attention(module: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """q, k, v as attention gets them, and what transformers' eager attention makes of them, `[1, tokens, heads, dim]`."""
    place, seen = sys.modules[type(module).__module__], []
    eager: Callable[..., Any] | None = getattr(place, "eager_attention_forward", None)
    if eager is None:
        raise Unable(f"{type(module).__name__} computes scores itself")

    def instead(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **more: Any) -> Any:
        sees = attention_mask.sees
        at = [
            [bool(sees(torch.tensor(0), torch.tensor(0), torch.tensor(i), torch.tensor(j))) for j in range(TOKENS)]
            for i in range(TOKENS)
        ]
        mask = torch.zeros(1, 1, TOKENS, TOKENS).masked_fill(~torch.tensor(at), float(torch.finfo(torch.float32).min))
        out = eager(module, query, key, value, mask, **more)
        seen.append((query, key, value, out[0]))
        return out

    with torch.no_grad():
        truth.instead = instead
        try:
            module(*args, **kwargs)
        except Exception:
            if not seen:  # what follows attention (gates, an output projection) is not compared
                raise
        finally:
            truth.instead = None
    query, key, value, out = seen[0]
    return query, key, value, out
