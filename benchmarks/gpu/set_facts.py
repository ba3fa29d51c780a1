"""The numbers of a set that its generated package does not have, and that timings need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvgen import Continuous, KernelSet, Ring
from kvgen.cases.step import Step
from kvgen.layout.storage import Segment
from kvgen.ops import Append, Decode, Extend
from kvgen.schema.quant import Quant


@dataclass(frozen=True)
class Facts:
    """A set as timings see it. A set of states has a name and operations alone."""

    name: str
    ops: tuple[tuple[str, str], ...]
    """(name, kind) of each operation."""
    states: bool = False
    dtype: str = ""
    q_heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    v_dim: int = 0
    stores: str = ""
    layers: str = ""
    table: str = ""
    id_multiplier: int = 1
    window: int = 0
    lengths: str = ""
    scales: dict[str, float] = field(default_factory=dict)
    """The score scale of each decode and extend."""
    token_bytes: int = 0
    """Bytes of one token in one layer as it is stored: K and V, scales included."""
    key_bytes: int = 0
    """Bytes of a token's K."""
    loss: float = 0.0
    """The largest error of quantization for values below 1; 0 where they are stored as they are."""
    residual: int = 0
    """Tokens of K that are quantized together; 0: each on its own."""
    changed: dict[str, str] = field(default_factory=dict)
    """The roles ("k", "kv") whose rows an append stores as others than they come, by the append's name."""
    rows: dict[str, int] = field(default_factory=dict)
    """Query rows of a request, of each decode operation."""
    sees: dict[str, int] = field(default_factory=dict)
    """Tokens that a row of a causal decode or extend sees at most, 0: all; only of those without score, sinks or another mask."""


def facts_of(kernels: KernelSet) -> Facts:
    """The facts of a set."""
    ops = tuple((op.name, op.kind) for op in kernels.ops)
    if kernels.cache.states:
        return Facts(kernels.name, ops, states=True)
    cache, table = kernels.kv, kernels.kv.page_table
    return Facts(
        name=kernels.name,
        ops=ops,
        dtype=cache.dtype,
        q_heads=kernels.q_heads,
        kv_heads=cache.kv_heads,
        head_dim=cache.head_dim,
        v_dim=cache.v_dim,
        stores=cache.stores,
        layers=cache.layout.layers,
        table="block" if isinstance(cache, Continuous) else table.kind,
        id_multiplier=table.id_multiplier,
        window=table.window if isinstance(table, Ring) else 0,
        lengths=cache.lengths,
        scales={
            op.name: getattr(op, "scale", None) or 1 / math.sqrt(cache.head_dim)
            for op in kernels.ops
            if op.kind in ("decode", "extend")
        },
        rows={op.name: op.rows for op in kernels.ops if isinstance(op, Decode)},
        sees={op.name: op.mask.window or 0 for op in kernels.ops if isinstance(op, Decode | Extend) and _is_causal(op)},
        token_bytes=_token_bytes(kernels, cache.storage.segments),
        key_bytes=_token_bytes(kernels, cache.storage.roles["k"]),
        loss=max((_loss(quant) for quant in cache.quants.values() if quant is not None), default=0.0),
        residual=cache.storage.residual,
        changed={op.name: _changed(op, kernels) for op in kernels.ops if isinstance(op, Append)},
    )


def _is_causal(op: Decode | Extend) -> bool:
    """A row's result is the softmax over the tokens before it, or the last of these, and nothing else."""
    mask = op.mask
    return mask.causal and not (mask.chunk or mask.padding or mask.tree) and op.score is None and op.sinks is None


def _changed(op: Append, kernels: KernelSet) -> str:
    """The roles whose rows are not stored as they come."""
    step = Step(op, kernels)
    return "".join(role for role in kernels.cache.roles if step.changes(role))


def _token_bytes(kernels: KernelSet, segments: Sequence[Segment]) -> int:
    """Bytes of one token in one layer as it is stored, with the scales that it has of its own."""
    bits = 0.0
    for segment in segments:
        bits += kernels.kv.kv_heads * segment.size * segment.region.dtype.bits
        scales = segment.scales
        if scales is not None and scales.region is not None:
            bits += scales.heads * scales.groups * (1 + scales.zero) * scales.dtype.bits / scales.block[0]
    return math.ceil(bits / 8)


def _loss(quant: Quant) -> float:
    """The largest error for values below 1, whose scales are below 2^-6 where integers have given ones."""
    if quant.dtype in ("e4m3", "e5m2"):
        return 2.0**-4 if quant.dtype == "e4m3" else 2.0**-3
    return {"i8": 2.0**-6, "i4": 0.125, "e2m1": 0.25}.get(quant.dtype, 0.25)
