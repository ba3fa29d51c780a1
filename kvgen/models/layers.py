"""A checkpoint's demands on the cache and attention, layer by layer, whether or not kvgen's kernels can do it yet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from kvgen.schema.model import Compressed, Indexer, Mla, Model, Rope
from kvgen.schema.norm import LayerNorm, RmsNorm

CacheDtype = Literal["bf16", "f16", "f32"]


@dataclass(frozen=True)
class Norm:
    """A norm of q, k or v.

    `kind`: "rms" is x / sqrt(mean(x^2) + eps), "layer" subtracts the mean too and divides by the standard deviation.
    `over`: each "head", or a token's whole "row" of heads; `dim` is how many elements the mean runs over. `weight` False:
    the norm has no weights. `offset` is added to every weight (1.0 in Gemma). `order`: "before" or "after" RoPE.
    `multiply` as in kvgen.RmsNorm: the cast to the tensor's type comes before ("after") or behind the weights ("before").
    `mean_square` "given": that of a row of which other GPUs have heads, as in kvgen.RmsNorm.
    Of a layer norm, `bias`: it adds one of the weights' shape; `per_head`: each head has weights of its own.
    """

    dim: int
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    over: Literal["head", "row"] = "head"
    weight: bool = True
    offset: float = 0.0
    order: Literal["before", "after"] = "before"
    multiply: Literal["after", "before"] = "after"
    bias: bool = False
    per_head: bool = False
    mean_square: Literal["computed", "given"] = "computed"


@dataclass(frozen=True)
class QueryScale:
    """q of position p is multiplied by a number that grows with p.

    `form` "log": 1 + coefficient * ln(1 + floor((p + shift) / positions)) (Llama 4 with shift 1, Ministral 3);
    "power": (1 + (p + shift) / positions) ** coefficient (Beam).
    """

    coefficient: float
    positions: int
    shift: int = 0
    form: Literal["log", "power"] = "log"


@dataclass(frozen=True)
class LayerFacts:
    """One layer of a model, counted from 0.

    `kind` names the layers that are alike, such as "full", "local", "chunked" or "linear". `cache` False: the layer keeps a
    state instead of keys and values, and every field after it has no meaning. `kv_source`: the layer whose keys and
    values this one reads; it stores none of its own. None: its own.

    For latent attention `kv_heads` is 1, `head_dim_k` the cached row's elements, `head_dim_v` its latent part's. `scale` is
    what q . k is multiplied by. `window` counts the tokens that a query sees, its own included; with `chunk` it sees those
    of its position's chunk. `rope` None: the layer has no rotary positions; `proportional`: `rope.dim` elements are rotated, as
    pairs (i, i + head_dim / 2) by the frequencies of a whole head. `mrope`: pairs of each section where positions are
    several a token; they lie in "runs", alternate in a "cycle" (t h w t h w), or h w h w and then t ("hw_t").
    `indexer` chooses the tokens that a query sees; where it is the layer's own, `index_rope` rotates its q and keys, and
    `index_norm` is the norm of its keys. `q_factor`: what the model multiplies q by between its norm
    and RoPE (Muse Spark); in a spec it is part of the scale of scores. `compressed`: entries of several tokens that a query
    reads beside its window's rows; the row of a token is then key and value of all heads.
    """

    index: int
    kind: str
    cache: bool = True
    q_heads: int = 0
    kv_heads: int = 0
    head_dim_k: int = 0
    head_dim_v: int = 0
    scale: float = 0.0
    q_factor: float = 1.0
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    rope: Rope | None = None
    proportional: bool = False
    mrope: tuple[int, ...] = ()
    mrope_layout: Literal["runs", "cycle", "hw_t"] = "runs"
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    q_scale: QueryScale | None = None
    mla: Mla | None = None
    indexer: Indexer | None = None
    index_rope: Rope | None = None
    index_norm: LayerNorm | None = None
    kv_source: int | None = None
    compressed: Compressed | None = None

    @property
    def interleaved(self) -> bool:
        """True: the sections of M-RoPE alternate pair by pair."""
        return bool(self.mrope) and self.mrope_layout == "cycle"


@dataclass(frozen=True)
class Checkpoint:
    """A model's cache and attention as a config.json states them.

    `kinds` are its kinds of layers, each with the number of its first layer; `pattern[i]` says which one layer i is of.
    `model` is the same as a spec states it. The other fields are those of the first kind that has a cache: for latent
    attention `kv_heads` is 1, `head_dim` the cached row's elements and `stores` "k"; `norm` is that of q and k before RoPE,
    of a latent row's latent part. `notes` are sentences for the spec's docstring.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: CacheDtype
    stores: Literal["kv", "k"]
    model: Model
    norm: RmsNorm | None = None
    kinds: tuple[LayerFacts, ...] = ()
    pattern: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    @property
    def cached(self) -> tuple[LayerFacts, ...]:
        """The kinds of layers that have keys and values."""
        return tuple(kind for kind in self.kinds if kind.cache)

    def layers(self) -> list[LayerFacts]:
        """The model's layers, first to last."""
        return [replace(self.kinds[kind], index=i) for i, kind in enumerate(self.pattern)]
