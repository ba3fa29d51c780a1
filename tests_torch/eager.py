"""One layer of transformers' eager attention, in f32, on rows drawn from a seed (`tests/models/steps.py`).

The model is built without memory for its weights (`benchmarks/sweep/truth.py`), run once so that a layer's attention module
is called with real positions and masks, and that module is called again with its projections replaced by the drawn rows.
Which number of which projection becomes which element of q, k and v is found by a run on the numbers' own indices, with
norms and RoPE passing through: so fused and interleaved projections need no reader here.

Attention is the `eager_attention_forward` of the module's file; modules that multiply q, k and v themselves (BLOOM, Falcon,
MPT) are run as they are, and the factors and the result of their products are taken. An indexer (DeepSeek V3.2, GLM-5)
runs on rows of its own, and the tokens it picks are part of the step.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from benchmarks.sweep import truth
from kvgen import models
from kvgen.models.layers import LayerFacts
from tests.models.steps import Step

TOKENS = 23  # prime, and no head count or dim of a model; on two pages of 16
WINDOW = 9  # windows, chunks and lists of a step: real ones are longer than a step that runs in a second
SHORTENED = ("sliding_window", "sliding_window_size", "attention_chunk_size", "window_size", "index_topk")


class Given(torch.nn.Module):
    """A projection whose result is given: `[tokens, out]`, whatever it is asked."""

    def __init__(self, out: int) -> None:
        super().__init__()
        self.rows = torch.zeros(TOKENS, out)
        self.weight = torch.zeros(out, 1)

    def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return self.rows.reshape(*x.shape[:-1], -1).clone()


def with_short_windows(values: dict[str, Any]) -> dict[str, Any]:
    """The config with every window, chunk and top-k cut to WINDOW tokens, so that a step reaches past it.

    And the tokens after which q is scaled by position: Llama 4's, and those of Ministral 3, which are YaRN's too.
    """
    made = dict(values)
    if values.get("model_type") == "llama4_text":
        made["floor_scale"] = WINDOW
    if "llama_4_scaling_beta" in (values.get("rope_parameters") or {}):
        made["rope_parameters"] = {**values["rope_parameters"], "original_max_position_embeddings": WINDOW}
    for name, value in values.items():
        if isinstance(value, dict) and name.endswith(("text_config", "llm_config")):
            made[name] = with_short_windows(value)
        elif name in SHORTENED and isinstance(value, int) and not isinstance(value, bool):
            made[name] = WINDOW
    return made


def kinds_of_steps(values: dict[str, Any]) -> list[LayerFacts]:
    """The kinds of layers that a step is run of: of those that take another's picks one, as they differ in whose these are."""
    kinds = models.facts(values).kinds
    taking = [kind for kind in kinds if kind.indexer is not None and kind.indexer.source is not None]
    return [kind for kind in kinds if kind not in taking[1:]]


def with_few_layers(values: dict[str, Any]) -> dict[str, Any]:
    """The config cut behind the first layer of each kind, eight layers at least; whole where layers are named by number.

    benchmarks/model_sweep.py compares every layer's facts; a step is run of one layer of each kind.
    """
    found = models.facts(values)
    if any(kind.kv_source is not None for kind in found.kinds) or "linear_attn_config" in values:
        return values
    return _cut(values, len(found.pattern), max(8, 1 + max(kind.index for kind in kinds_of_steps(values))))


def _cut(values: dict[str, Any], layers: int, kept: int) -> dict[str, Any]:
    """Counts of `layers` and lists and patterns of that length, cut to `kept`."""
    if layers <= kept:
        return values
    made = dict(values)
    for name, value in values.items():
        if isinstance(value, dict) and name.endswith(("text_config", "llm_config")):
            made[name] = _cut(value, layers, kept)
        elif name in ("num_hidden_layers", "n_layer", "n_layers"):
            made[name] = kept
        elif isinstance(value, list) or (isinstance(value, str) and "pattern" in name):
            made[name] = value[:kept] if len(value) == layers else value
    return made


Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""An attention module, and the arguments it was called with."""


def steps(name: str, values: dict[str, Any]) -> Iterator[Step]:
    """A step with its output for one layer of each kind of a config; kinds as `benchmarks/sweep/truth.py` tells them apart."""
    values = with_short_windows(values)
    config = truth.text_of(truth.config_of(with_few_layers(values)))
    model = truth.build(config)
    if any(type(module).__name__ in truth.OWN_SCORES for module in model.modules()):
        model = truth.build(config, attention="eager")  # with real masks, which these modules add themselves
    calls: dict[int, Call] = {}
    with _noted(model, calls):
        found = truth.layers(config, model, TOKENS)
    kinds: dict[Any, int] = {}
    for layer in found:
        if layer.attends:
            rope = layer.rope and (layer.rope.partner, layer.rope.angle, layer.rope.factor)
            shape = (layer.q_heads, layer.kv_heads, layer.k_dim, layer.v_dim, layer.scale, layer.window, layer.chunk)
            more = (layer.sinks, tuple(layer.norms), layer.q_scale, layer.kv_source is None, _picks(calls, layer.index))
            kinds.setdefault((shape, rope, *more), layer.index)
    turned = _turned(model)
    picked: torch.Tensor | None = None
    for index in sorted(kinds.values()):
        source: tuple[Step, Seen] | None = None
        if (read := found[index].kv_source) is not None:
            source = step(name, values, read, calls[read], None, turned, None)
        made, seen = step(name, values, index, calls[index], picked, turned, source)
        picked = seen.picked
        yield made


def _turned(model: torch.nn.Module) -> tuple[list[list[int]], Any] | None:
    """Positions of three sections that differ, and M-RoPE's cosines and sines of them by the model; None: it has no sections."""
    rotary = next((m for m in model.modules() if getattr(m, "mrope_section", None)), None)
    if rotary is None:
        return None
    positions = [
        list(range(TOKENS)),
        [(5 * t + 3) % 17 for t in range(TOKENS)],
        [(7 * t + 1) % 13 for t in range(TOKENS)],
    ]
    with torch.no_grad():
        return positions, rotary(torch.zeros(1), torch.tensor(positions)[:, None])


def _picks(calls: dict[int, Call], index: int) -> str:
    """Whether a layer has an indexer, takes the tokens that an earlier layer's picked, or neither."""
    module = calls[index][0]
    if getattr(module, "skip_topk", False):
        return "takes"
    return "picks" if getattr(module, "indexer", None) is not None else "neither"


@contextlib.contextmanager
def _noted(model: torch.nn.Module, calls: dict[int, Call]) -> Iterator[None]:
    """The arguments of each attention module while the model runs, by layer."""

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(getattr(module, "layer_idx", None), int):
            calls.setdefault(module.layer_idx, (module, args, kwargs))

    hooks = [
        module.register_forward_pre_hook(note, with_kwargs=True)
        for module in model.modules()
        if "Attention" in type(module).__name__
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def step(
    name: str,
    values: dict[str, Any],
    index: int,
    call: Call,
    picked: torch.Tensor | None,
    turned: tuple[list[list[int]], Any] | None,
    source: tuple[Step, Seen] | None,
) -> tuple[Step, Seen]:
    """The layer's step: its shapes by a run on indices, its output by a run on drawn rows; and what attention was given.

    `picked`: what the last indexer before this layer picked, `[1, tokens, k]`, for layers that take it from there.
    `turned`: M-RoPE's positions and their cosines and sines. `source`: what the layer gave whose K and V this one reads.
    """
    module, args = call[0], _real(call[1])
    kwargs = {k: None if k in ("cache", "past_key_values", "layer_past") else _real(v) for k, v in call[2].items()}
    if getattr(module, "skip_topk", False):
        assert picked is not None, "an earlier layer picks the tokens"
        kwargs["prev_topk_indices"] = picked
    if source is not None:
        kwargs["shared_kv_states"] = {module.layer_type: (source[1].key, source[1].value)}
    if turned is not None:
        kwargs["position_embeddings"] = turned[1]
    if hasattr(module, "v_scale"):  # MiMo: V comes to append with the factor in it
        module.v_scale = 1.0
    place = sys.modules[type(module).__module__]
    given = _give(module)
    base = 0
    for one in given.values():
        one.rows = torch.arange(base, base + one.rows.shape[1], dtype=torch.float32).expand(TOKENS, -1)
        base += one.rows.shape[1]
    assert base < 2**24, "indices are exact in f32"
    latent = _latent(module)
    with _passing(module, place):
        at = _attention(module, args, kwargs)
    norms = {n: m for n, m in module.named_modules() if "Norm" in type(m).__name__}
    weights = {
        truth._role(n): tuple(m.weight.shape) for n, m in norms.items() if getattr(m, "weight", None) is not None
    }
    weights = {role: shape for role, shape in weights.items() if role in ("q", "k", "v", "qk", "latent")}
    sinks = next((n for n, p in module.named_parameters(recurse=False) if "sink" in n), None)
    maps = {
        n: a[0, :, 0].long() for n, a in (("q", at.query), ("k", at.key), ("v", at.value))
    }  # [heads, dim] of indices
    made = Step(
        name, values, index, TOKENS, *at.query.shape[1:2], *at.key.shape[1:2], at.key.shape[-1], at.value.shape[-1],
        latent=latent, weights=weights, sinks=sinks is not None,
        one_projection=latent is None and maps["k"].shape == maps["v"].shape and bool((maps["k"] == maps["v"]).all()),
        positions=turned[0] if turned is not None else None, source=source[0] if source is not None else None,
    )  # fmt: skip
    slopes = _slopes(module, args, kwargs, given) if latent is None and at.own else None
    drawn = {n: torch.from_numpy(a) for n, a in made.draw().items()}
    flat = torch.zeros(TOKENS, base)
    if latent is None:
        for part in ("q", "k", "v") if source is None else ("q",):
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
    generator = torch.Generator().manual_seed(index)
    for n, one in given.items():
        if n.startswith("indexer."):
            one.rows = torch.randn(one.rows.shape, generator=generator)
    for n, m in norms.items():
        if (role := truth._role(n)) in weights:
            m.weight = torch.nn.Parameter(drawn[f"{role}_weight"].reshape(m.weight.shape), requires_grad=False)
    if sinks is not None:
        setattr(module, sinks, torch.nn.Parameter(drawn["sinks"], requires_grad=False))
    indexer = getattr(module, "indexer", None)
    with contextlib.nullcontext([picked]) if indexer is None else _picking(indexer) as lists:
        at = _attention(module, args, kwargs)
    at.picked = lists[0]
    indexed = indexer is not None or getattr(module, "skip_topk", False)
    tokens = [int(t) for t in at.picked[0, -1]] if indexed and at.picked is not None else None
    return replace(made, output=at.out[0, -1].numpy().astype(np.float32), slopes=slopes, picked=tokens), at


@contextlib.contextmanager
def _picking(indexer: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """What an indexer picks, `[1, tokens, k]` a call."""
    lists: list[torch.Tensor] = []
    hook = indexer.register_forward_hook(lambda module, args, picked: lists.append(picked))
    try:
        yield lists
    finally:
        hook.remove()


def _slopes(module: Any, args: Any, kwargs: Any, given: dict[str, Given]) -> list[float] | None:
    """ALiBi's slope of each query head, from the probabilities of the last token where every q . k is 0; None: there is none."""
    kept = {n: one.rows for n, one in given.items()}
    for one in given.values():
        one.rows = torch.zeros_like(one.rows)
    seen = _attention(module, args, kwargs).weights[0, :, -1].double()  # [heads, tokens]
    for n, rows in kept.items():
        given[n].rows = rows
    steepness = torch.log(seen[:, 1:] / seen[:, :-1]).mean(dim=1)
    return [float(s) for s in steepness] if bool((steepness.abs() > 1e-6).any()) else None


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
    """Shapes without memory as zeros, masks as what is added to scores, everything else as it is."""
    if isinstance(value, truth._Mask):
        zero, at = torch.tensor(0), [torch.tensor(t) for t in range(TOKENS)]
        sees = torch.tensor([[bool(value.sees(zero, zero, row, token)) for token in at] for row in at])
        return torch.zeros(1, 1, TOKENS, TOKENS).masked_fill(~sees, float(torch.finfo(torch.float32).min))
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


@dataclass
class Seen:
    """q, k and v as attention gets them and its probabilities, `[1, heads, tokens, ...]`; out `[1, tokens, heads, dim]`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor
    own: bool = False  # the module multiplies them itself
    picked: torch.Tensor | None = None  # what the indexer picked that this layer or one before it has, [1, tokens, k]


def _attention(module: Any, args: Any, kwargs: Any) -> Seen:
    """What transformers' eager attention is given by the module, and what it makes of that."""
    place, seen = sys.modules[type(module).__module__], []
    eager: Callable[..., Any] | None = getattr(place, "eager_attention_forward", None)

    def noted(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *rest: Any, **more: Any) -> Any:
        assert eager is not None
        out, weights = eager(module, query, key, value, attention_mask, *rest, **more)
        seen.append(Seen(query, key, value, weights, out))
        return out, weights

    kept = module.config._attn_implementation if eager is not None else None
    products = _Products()
    with torch.no_grad(), products if eager is None else contextlib.nullcontext():
        if eager is not None:
            place.eager_attention_forward = noted
            module.config._attn_implementation = "eager"
        try:
            module(*args, **kwargs)
        except Exception:
            if not seen and not products.made:  # what follows attention (gates, an output projection) is not compared
                raise
        finally:
            if eager is not None:
                place.eager_attention_forward = eager
                module.config._attn_implementation = kept
    return seen[0] if eager is not None else products.seen()


class _Products(TorchFunctionMode):
    """The products of a module that computes its scores itself: q with k, then the probabilities with v."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") in ("matmul", "__matmul__", "bmm", "baddbmm"):
            factors = [*args, *(kwargs or {}).values()]
            factors = [a for a in factors if isinstance(a, torch.Tensor)][-2:]
            self.made.append((factors[0], factors[1], result))
        return result

    def seen(self) -> Seen:
        def heads(a: torch.Tensor) -> torch.Tensor:
            return a.reshape(1, -1, *a.shape[-2:])

        (query, key, _), (weights, value, out) = self.made
        key, out = heads(key.transpose(-1, -2)), heads(out).transpose(1, 2)
        return Seen(heads(query), key, heads(value), heads(weights), out, own=True)
