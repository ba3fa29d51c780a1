"""What a checkpoint asks of the cache and attention in one layer, whether or not kvgen's kernels can do it yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvgen.spec.model import Mla, Rope


@dataclass(frozen=True)
class Norm:
    """A norm of q, k or v.

    `kind`: "rms" is x / sqrt(mean(x^2) + eps), "layer" subtracts the mean too and divides by the standard deviation.
    `over`: each "head", or a token's whole "row" of heads; `dim` is how many elements the mean runs over. `weight` False:
    the norm has no weights. `offset` is added to every weight (1.0 in Gemma). `order`: "before" or "after" RoPE.
    `multiply` as in kvgen.RmsNorm: the cast to the tensor's type comes before ("after") or behind the weights ("before").
    """

    dim: int
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    over: Literal["head", "row"] = "head"
    weight: bool = True
    offset: float = 0.0
    order: Literal["before", "after"] = "before"
    multiply: Literal["after", "before"] = "after"


@dataclass(frozen=True)
class QueryScale:
    """q of position p is multiplied by 1 + coefficient * ln(1 + floor((p + shift) / positions)) (Llama 4, Ministral 3)."""

    coefficient: float
    positions: int
    shift: int = 0


@dataclass(frozen=True)
class LayerFacts:
    """One layer of a model, counted from 0.

    `kind` names the layers that are alike, such as "full", "local", "chunked" or "mamba". `cache` False: the layer keeps a
    state instead of keys and values, and every field after it has no meaning. `kv_source`: the layer whose keys and
    values this one reads; it stores none of its own. None: its own.

    For latent attention `kv_heads` is 1, `head_dim_k` the cached row's elements, `head_dim_v` its latent part's. `scale` is
    what q . k is multiplied by. `window` counts the tokens that a query sees, its own included; with `chunk` it sees those
    of its position's chunk. `rope` None: the layer has no rotary positions. `mrope`: pairs of each section where positions
    are three a token, `interleaved` where the sections alternate pair by pair instead of lying in runs.
    """

    index: int
    kind: str
    cache: bool = True
    q_heads: int = 0
    kv_heads: int = 0
    head_dim_k: int = 0
    head_dim_v: int = 0
    scale: float = 0.0
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    rope: Rope | None = None
    proportional: bool = False
    mrope: tuple[int, ...] = ()
    interleaved: bool = False
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    q_scale: QueryScale | None = None
    mla: Mla | None = None
    kv_source: int | None = None
