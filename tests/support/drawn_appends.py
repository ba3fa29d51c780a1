"""Appends drawn at random from all that their options say together; what the rules refuse is drawn again."""

from __future__ import annotations

import random
from typing import Any, Final

from kvgen import (
    CSR,
    Block,
    KernelSet,
    Latent,
    LayerNorm,
    Paged,
    PerKV,
    PositionScale,
    Quant,
    Ring,
    RmsNorm,
    Rope,
    ops,
)
from kvgen.errors import SpecError
from tests.support.cache_matrix import CHOSEN

_QUANTS: Final = (
    None,
    Quant(dtype="e4m3", scale_dtype="f32"),
    Quant(dtype="i8", scale_dtype="f16", zero=True),
    Quant(dtype="i4", scale_dtype="f16", block=Block(dim=8)),
    Quant(dtype="e4m3", scale_dtype="f32", scale="given", block=Block(token=None, dim=8)),
)


LATENT_ROPE: Final = Rope(style="interleaved", theta=1e4)


def _cache(draw: random.Random) -> Any:
    kind = draw.choice(("paged", "paged", "paged", "latent", "chosen", "per_kv"))
    fields: dict[str, Any] = {"dtype": draw.choice(("f32", "f16", "bf16")), "page_size": draw.choice((8, 16))}
    if kind == "latent":
        quant = draw.choice(_QUANTS[:2])
        return Latent(latent_dim=draw.choice((32, 48)), rope_dim=draw.choice((8, 16)), quant=quant, **fields)
    if kind == "chosen":
        return CHOSEN[draw.choice(("xpacked", "kivi", "k_only", "nvfp4", "hnd", "continuous"))]
    fields |= {"kv_heads": draw.choice((1, 2, 3)), "head_dim": draw.choice((16, 24, 40, 64))}
    if kind == "per_kv":
        return Paged(table=PerKV(), layout="page layer token head dim", **fields)
    table = draw.choice(({}, {"table": CSR()}, {"table": Ring(window=40)}))
    return Paged(quant=draw.choice(_QUANTS), lengths=draw.choice(("before", "after")), **table, **fields)


def _norm(draw: random.Random) -> RmsNorm | LayerNorm | None:
    return draw.choice(
        (
            None,
            None,
            RmsNorm(),
            RmsNorm(weight_offset=1.0, multiply="before", weight_dtype="f32"),
            RmsNorm(dim=8),
            RmsNorm(weight=False),
            RmsNorm(weight=False, over="row"),
            LayerNorm(),
            LayerNorm(bias=True, per_head=True),
            LayerNorm(bias=True, weight_dtype="f32"),
        )
    )


def _rope(draw: random.Random) -> Rope | None:
    style: Any = draw.choice(("neox", "interleaved"))
    part: dict[str, Any] = draw.choice(
        (
            {},
            {},
            {"dim": 8},
            {"dim": 12, "part": "last"},
            {"dim": 12, "proportional": True},
            {"dim": 8, "proportional": True},
        )
    )
    return draw.choice((None, Rope(style=style, theta=1e4, **part), Rope(style=style, theta=1e4, **part)))


def _append(draw: random.Random, cache: Any) -> ops.Append:
    """What a cache may have, mostly: few draws are refused."""
    latent = isinstance(cache, Latent)
    rope = draw.choice((None, LATENT_ROPE)) if latent else _rope(draw)
    inputs = draw.choice(("separate", "parts", "parts", "q") if latent else ("separate", "separate", "qkv", "q"))
    norms = "q" if inputs == "q" else "k" if latent else "qkv"
    if latent and draw.random() < 0.5:
        norms = {"q": "", "k": "qk"}[norms]
    fields: dict[str, Any] = {
        "rows": draw.choice(("ragged", "padded") if inputs == "q" else ("ragged", "ragged", "padded", "slots")),
        "inputs": inputs,
        "bias": not latent and draw.random() < 0.3,
        "rope": rope,
        **{f"{role}_norm": _norm(draw) for role in norms if role != "v" or draw.random() < 0.5},
        "q_dim": cache.head_dim if latent and draw.random() < 0.5 else None,
        "norm_order": draw.choice(("before", "after")) if norms not in ("", "k") else "before",
        "positions": draw.choice(("lengths", "given")),
        "q_out": draw.choice(("same", "same", "e4m3")),
        "position_scale": draw.choice((None, PositionScale(scale=0.3, period=7, offset=draw.choice((0, 1))))),
    }
    if rope is not None and draw.random() < 0.4:
        fields |= {"angles": draw.choice(("pairs", "halves")), "angles_dtype": draw.choice(("f32", "same"))}
    if rope is not None and rope.dim is not None and draw.random() < 0.5:
        pairs = rope.dim // 2
        fields |= {"sections": (pairs - 2, 1, 1), "sections_order": draw.choice(("runs", "interleaved"))}
    return ops.Append(**fields)


def drawn(seed: int) -> KernelSet:
    """The set of a seed, always the same; one that uses at least one of norm_order, a norm without weights, LayerNorm, a norm of
    v, interleaved sections, proportional RoPE, a factor of q, or q alone."""
    draw = random.Random(f"append {seed}")
    while True:
        try:
            cache = _cache(draw)
            op = _append(draw, cache)
            kernels = KernelSet(
                name=f"append_drawn_{seed}",
                q_heads=getattr(cache, "kv_heads", 1) * draw.choice((1, 2, 3)),
                cache=cache,
                ops=[op],
            )
        except SpecError:
            continue
        if _uses_something_new(op):
            return _transformed(draw, kernels)


def _transformed(draw: random.Random, kernels: KernelSet) -> KernelSet:
    """The set, mostly with a Hadamard transform besides where the rules allow one."""
    op = kernels.ops[0]
    asked = draw.choice((None, "qk", "qkv", "qkv"))
    try:
        if asked is not None:
            fields = {"name": kernels.name, "q_heads": kernels.q_heads, "cache": kernels.cache}
            return KernelSet(ops=[op.model_copy(update={"hadamard": asked})], **fields)
        return kernels
    except SpecError:
        return kernels


def _uses_something_new(op: ops.Append) -> bool:
    norms = [norm for norm in (op.q_norm, op.k_norm, op.v_norm) if norm is not None]
    plain = any(isinstance(norm, LayerNorm) or not norm.weight for norm in norms)
    rope = isinstance(op.rope, Rope) and op.rope.proportional
    orders = op.norm_order == "after" or op.sections_order == "interleaved"
    return plain or rope or orders or op.v_norm is not None or op.position_scale is not None or op.inputs == "q"
