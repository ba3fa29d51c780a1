"""A model's config -> kernel sets for its layers, as transformers calls attention: behind norms, RoPE and up-projections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvgen import models
from kvgen.errors import ConfigError
from kvgen.models.layers import LayerFacts
from kvgen.ops.append import Append
from kvgen.ops.decode import Decode
from kvgen.ops.extend import Extend
from kvgen.spec.cache import Paged
from kvgen.spec.cache_fields import Layout
from kvgen.spec.kernel_set import Arch, KernelSet
from kvgen.spec.mask import Mask
from kvgen.spec.quant import Quant
from kvgen.spec.score import Score

DtypeName = Literal["bf16", "f16", "f32"]
KvDtype = Literal["auto", "e4m3"]


@dataclass(frozen=True)
class Attention:
    """What a layer's attention is computed by: `kernels` is the number of its set, `suffix` names its operations there.

    `latent`: the model gives its cache latent rows, and attention the heads that it projects them up to. The rest is what
    the model has to call attention with.
    """

    kernels: int
    suffix: str
    latent: bool
    q_heads: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: bool


def sets_of(
    config: Mapping[str, Any], dtype: DtypeName, *, page_size: int, kv_dtype: KvDtype, arch: Sequence[Arch]
) -> tuple[list[KernelSet], list[Attention | None]]:
    """The sets of a model, one for each shape of heads, and which of their operations each layer has; None: no K and V
    of its own.

    Raises ConfigError for a config that kvgen.models does not read, for layers with states, and for attention that
    transformers does not hand out: ALiBi and indexers.
    """
    facts = models.facts(config)
    shapes: dict[tuple[int, int, int, int], dict[tuple[object, ...], LayerFacts]] = {}
    for kind in facts.kinds:
        _refuse(kind)
        if kind.kv_source is None:
            shapes.setdefault(_shape(kind), {}).setdefault(_asks(kind), kind)
    listed = list(shapes)
    suffixes = {
        shape: {asks: "" if i == 0 else f"_{i}" for i, asks in enumerate(kinds)} for shape, kinds in shapes.items()
    }
    sets = []
    for shape, kinds in shapes.items():
        q_heads, kv_heads, head_dim, v_dim = shape
        apart = v_dim != head_dim
        text = "page layer token head dim"
        cache = Paged(
            dtype=dtype,
            kv_heads=kv_heads,
            head_dim=head_dim,
            v_head_dim=v_dim if apart else None,
            page_size=page_size,
            layout=Layout(k=text, v=text) if apart else Layout(kv="page kv layer token head dim"),
            quant=Quant(dtype="e4m3", scale_dtype="f32") if kv_dtype == "e4m3" else None,
        )
        found: list[Append | Decode | Extend] = [Append()]
        for asks, kind in kinds.items():
            suffix = suffixes[shape][asks]
            mask = Mask(window=kind.window) if kind.chunk is None else Mask(chunk=kind.chunk)
            score = None if kind.softcap is None else Score(softcap=kind.softcap)
            sinks: Literal["out"] | None = "out" if kind.sinks else None
            common: dict[str, Any] = {"mask": mask, "score": score, "sinks": sinks, "scale": kind.scale}
            found.append(Decode(name=f"decode{suffix}", split="balanced", **common))
            found.append(Extend(name=f"extend{suffix}", **common))
        sets.append(KernelSet(q_heads=q_heads, cache=cache, ops=tuple(found), arch=tuple(arch)))
    layers: list[Attention | None] = []
    for number in facts.pattern:
        kind = facts.kinds[number]
        if kind.kv_source is not None:  # transformers hands it the rows of that layer
            layers.append(None)
            continue
        shape = _shape(kind)
        suffix = suffixes[shape][_asks(kind)]
        layers.append(
            Attention(
                kernels=listed.index(shape),
                suffix=suffix,
                latent=kind.mla is not None,
                q_heads=shape[0],
                scale=kind.scale,
                window=kind.window,
                softcap=kind.softcap,
                sinks=kind.sinks,
            )
        )
    return sets, layers


def _refuse(kind: LayerFacts) -> None:
    if not kind.cache:
        raise ConfigError(
            f"config: its {kind.kind} layers keep a state instead of keys and values, which KvgenCache does not hold; use "
            "another cache and attn_implementation"
        )
    what = "ALiBi" if kind.alibi else "an indexer's tokens" if kind.index_topk is not None else ""
    if what:
        raise ConfigError(
            f"config: its {kind.kind} layers attend with {what}, which transformers does not hand to attention functions; use "
            "another attn_implementation"
        )


def _shape(kind: LayerFacts) -> tuple[int, int, int, int]:
    """Query heads, KV heads, dims of K and of V, as transformers has them: latent rows are projected up before."""
    if kind.mla is not None:
        return kind.q_heads, kind.q_heads, kind.mla.qk_dim, kind.mla.v_head_dim
    return kind.q_heads, kind.kv_heads, kind.head_dim_k, kind.head_dim_v


def _asks(kind: LayerFacts) -> tuple[object, ...]:
    return kind.window, kind.chunk, kind.softcap, kind.sinks, kind.scale
