"""A model's config -> kernel sets for its layers, as transformers calls attention: behind norms, RoPE and up-projections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from kvgen import models
from kvgen.architectures import Arch
from kvgen.errors import ConfigError
from kvgen.models.layers import Checkpoint, LayerFacts
from kvgen.models.serving import shard
from kvgen.ops.append import Append
from kvgen.ops.decode import Decode
from kvgen.ops.extend import Extend
from kvgen.schema.cache import Paged
from kvgen.schema.cache_fields import Layout
from kvgen.schema.kernel_set import KernelSet
from kvgen.schema.mask import Mask
from kvgen.schema.quant import Quant
from kvgen.schema.score import Score

DtypeName = Literal["bf16", "f16", "f32"]
KvDtype = Literal["auto", "e4m3"]


# Models that multiply q by the scale themselves, and call attention with 1.
_SCALED_BEFORE: Final = frozenset({"opt"})
# Models whose layers have a state beside keys and values.
_STATES_BESIDE: Final = frozenset({"falcon_h1"})


@dataclass(frozen=True)
class Attention:
    """The kernels of a layer's attention: `kernels` is the number of its set, `suffix` names its operations there.

    `latent`: the model gives its cache latent rows, and attention the heads that it projects them up to. The rest is what
    the model has to call attention with; heads are those of one GPU.
    """

    kernels: int
    suffix: str
    latent: bool
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    window: int | None
    chunk: int | None
    softcap: float | None
    sinks: bool

    @property
    def options(self) -> dict[str, Any]:
        """Options of an attention operation for these layers."""
        return {**self.unmasked, "mask": Mask(window=self.window) if self.chunk is None else Mask(chunk=self.chunk)}

    @property
    def unmasked(self) -> dict[str, Any]:
        """Options without the mask."""
        return {
            "score": None if self.softcap is None else Score(softcap=self.softcap),
            "sinks": "out" if self.sinks else None,
            "scale": self.scale,
        }


def attention_of(config: Mapping[str, Any], tp: int = 1) -> list[Attention | None]:
    """Attention of each layer of a model on one of `tp` GPUs; None: it reads the keys and values of another layer.

    Raises ConfigError for a config that kvgen.models does not read, for heads that `tp` GPUs cannot share, for layers with
    states, and for attention that transformers does not hand out: ALiBi and indexers.
    """
    if config.get("model_type") in _STATES_BESIDE:
        raise ConfigError(
            f"model_type: got {config['model_type']!r}, whose layers keep a state beside keys and values, which KvgenCache does "
            "not hold; use another cache and attn_implementation"
        )
    facts = _shard_of(models.facts(_with_plain_rope(config)), tp)
    scaled = config.get("model_type") in _SCALED_BEFORE
    shapes: dict[tuple[int, int, int, int], list[tuple[object, ...]]] = {}
    layers: list[Attention | None] = []
    for number in facts.pattern:
        kind = facts.kinds[number]
        _refuse(kind)
        if kind.kv_source is not None:  # transformers hands it the rows of that layer
            layers.append(None)
            continue
        shape, asks = _shape(kind), _asks(kind)
        kinds = shapes.setdefault(shape, [])
        if asks not in kinds:
            kinds.append(asks)
        found = kinds.index(asks)
        layers.append(
            Attention(
                list(shapes).index(shape),
                "" if found == 0 else f"_{found}",
                kind.mla is not None,
                *shape,
                scale=1.0 if scaled else kind.scale,
                window=kind.window,
                chunk=kind.chunk,
                softcap=kind.softcap,
                sinks=kind.sinks,
            )
        )
    return layers


def _with_plain_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with RoPE parameters that every reader takes: whole heads, and fixed frequencies in place of dynamic ones.

    The model applies RoPE before its rows come to the cache, so that frequencies and rotary dims have no meaning here. Scales of
    attention that the parameters state (YaRN's) stay.
    """
    return {
        name: _plain_rope(value)
        if name in ("rope_parameters", "rope_scaling") and isinstance(value, Mapping)
        else value
        for name, value in config.items()
    }


def _plain_rope(given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of one RoPE, or of one for each kind of layers."""
    if given and all(isinstance(value, Mapping) for value in given.values()):
        return {kind: _plain_rope(value) for kind, value in given.items()}
    kind = given.get("rope_type", given.get("type"))
    if kind == "dynamic" and not given.get("alpha"):
        return {"rope_type": "default", "rope_theta": given.get("rope_theta", 10000.0), "partial_rotary_factor": 1.0}
    return dict(given) if kind == "proportional" else {**given, "partial_rotary_factor": 1.0}


def sets_of(
    layers: Sequence[Attention | None],
    dtype: DtypeName,
    *,
    page_size: int,
    kv_dtype: KvDtype,
    arch: Sequence[Arch],
) -> list[KernelSet]:
    """The sets of a KvgenCache for these layers, one for each shape of heads, in the order of their numbers."""
    distinct = dict.fromkeys(one for one in layers if one is not None)
    sets = []
    for number in range(1 + max((one.kernels for one in distinct), default=-1)):
        kinds = [one for one in distinct if one.kernels == number]
        first = kinds[0]
        v_differs = first.v_head_dim != first.head_dim
        text = "page layer token head dim"
        cache = Paged(
            dtype=dtype,
            kv_heads=first.kv_heads,
            head_dim=first.head_dim,
            v_head_dim=first.v_head_dim if v_differs else None,
            page_size=page_size,
            layout=Layout(k=text, v=text) if v_differs else Layout(kv="page kv layer token head dim"),
            quant=Quant(dtype="e4m3", scale_dtype="f32") if kv_dtype == "e4m3" else None,
        )
        found: list[Append | Decode | Extend] = [Append()]
        for kind in kinds:
            found.append(Decode(name=f"decode{kind.suffix}", split="balanced", **kind.options))
            found.append(Extend(name=f"extend{kind.suffix}", **kind.options))
        sets.append(KernelSet(q_heads=first.q_heads, cache=cache, ops=tuple(found), arch=tuple(arch)))
    return sets


def _shard_of(facts: Checkpoint, tp: int) -> Checkpoint:
    try:
        return shard(facts, tp)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--tp:", "tp:")) from None  # there it is an option of the command line


def _refuse(kind: LayerFacts) -> None:
    if not kind.cache:
        raise ConfigError(
            f"config: its {kind.kind} layers keep a state instead of keys and values, which KvgenCache does not hold; use "
            "another cache and attn_implementation"
        )
    what = "ALiBi" if kind.alibi else "an indexer's tokens" if kind.indexer is not None else ""
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
