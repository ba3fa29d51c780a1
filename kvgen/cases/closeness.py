"""How close attention has to come to float64: within what f32 arithmetic owes, or by FlashAttention 3's rule.

That rule: no row of q is further off than twice (three times, under a soft cap) what naive attention is that rounds every
intermediate to the type that the kernel computes in, and what adding and subtracting 0.3 does to the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen.layout.dtypes import dtype
from kvgen.ops import Decode, Extend
from kvgen.reference import Decoded
from kvgen.reference.attention import Arguments, modified
from kvgen.reference.decode import VisibleKeys, products, sums
from kvgen.schema.kernel_set import KernelSet

Raw = NDArray[Any]
Floats = NDArray[np.float64]
# Half a unit in the last place of 1, and the smallest positive number.
HALF_ULP: Final = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8, "e4m3": 2.0**-4}
TINY: Final = {"f32": 2.0**-126, "f16": 2.0**-24, "bf16": 2.0**-126, "e4m3": 2.0**-9}


@dataclass(frozen=True)
class Numerics:
    """Numerics of a decode, or of an extend (`rows` 0): scale, types, mask, score and sinks. `compute` is the type that
    probabilities are rounded to ("f32": not at all)."""

    scale: float
    compute: str
    out: str
    rows: int = 1
    mask: Any = None
    cross: bool = False
    score: Any = None
    sinks: Raw | None = None
    sinks_in_lse: bool = True
    arguments: Mapping[str, Any] | None = None
    lse_base: str = "e"
    lse_empty: str = "-inf"
    q_scale: float = 1.0
    out_scale: float = 1.0

    def oracle(self) -> dict[str, Any]:
        """The arguments of kvgen.reference.decode."""
        names = [f.name for f in fields(self) if f.name not in ("compute", "out")]
        return {name: getattr(self, name) for name in names}


def numerics(kernels: KernelSet, op: Decode | Extend, arguments: Mapping[str, Any] | None = None) -> Numerics:
    """Numerics of a set's decode or extend, with the arrays and scalars that a call brings by name."""
    arguments = arguments or {}
    cache = kernels.kv
    return Numerics(
        scale=op.softmax_scale(kernels),
        compute=computes_in(kernels, op),
        out=op.out_dtype or cache.dtype,
        rows=op.rows if isinstance(op, Decode) else 0,
        mask=op.mask,
        cross=op.cross,
        score=op.score,
        sinks=arguments.get("sinks"),
        sinks_in_lse=op.sinks == "lse",
        arguments=arguments,
        lse_base=op.lse_base,
        lse_empty=op.lse_empty,
        q_scale=float(arguments["q_scale"][0]) if "q_scale" in arguments else 1.0,
        out_scale=float(arguments["out_scale"][0]) if "out_scale" in arguments else 1.0,
    )


@lru_cache(maxsize=256)
def computes_in(kernels: KernelSet, op: Decode | Extend) -> str:
    """The type that the kernel of a decode or extend rounds its operands to, as its plan says: CUDA cores keep f32."""
    template = op.plan(kernels)[0].template
    return "f32" if template.endswith("_simt.cu.j2") else kernels.kv.dtype


def limits(wanted: Decoded, given: Numerics, q: Raw, row: int) -> tuple[Floats, Floats]:
    """How far a row that saw something may be off: (out `[q_heads, v_dim]`, lse `[q_heads]`)."""
    seen, right = wanted.seen[row], wanted.out[row]
    assert seen is not None
    query, base = q[row].astype(np.float64) * given.q_scale, 1 / math.log(2) if given.lse_base == "2" else 1.0
    scores, slack = final_scores(query, seen, given)
    sinks = None if given.sinks is None else given.sinks.astype(np.float64)
    how: dict[str, Any] = {"scores": scores, "slack": slack, "sinks": sinks, "out_scale": given.out_scale}
    allowed, lse_allowed = bounds(query, seen.k, seen.v, given.scale, right, given.out, **how)
    rounding = HALF_ULP[given.out] * np.abs(right) + TINY[given.out]
    if given.compute != "f32":
        low, low_lse = naive(query, seen, given)
        factor = 3 if getattr(given.score, "softcap", None) is not None else 2
        some = np.isfinite(wanted.lse[row])
        far = np.abs(np.subtract(low_lse, wanted.lse[row], where=some, out=np.zeros(len(right)))).max()
        # Naive attention of one token, or of one head, may happen to be right.
        usual, usual_lse = roundings(query, seen, given, scores)
        error = factor * max(np.abs(low - right).max(), usual)
        lse_error = factor * max(far, usual_lse * base)
        rows, rows_lse = rounded_rows(query, seen, given, right, wanted.lse[row])
        error = np.fmax(error, rows + factor * usual) + 2 * _unsettled(right, given.out)
        # Not a number where V of a token without weight is none.
        return np.fmax(error + rounding, allowed), lse_allowed * base + np.fmax(lse_error, rows_lse)
    return allowed, lse_allowed * base


def _unsettled(right: Floats, element: str) -> float:
    """The largest change of the result by adding and subtracting 0.3 in its type."""
    kind = dtype(element).numpy()
    x, third = right.astype(kind), np.array(0.3).astype(kind)
    return float(np.abs((x + third - third).astype(np.float64) - x.astype(np.float64)).max())


def final_scores(query: Floats, seen: VisibleKeys, given: Numerics) -> tuple[Floats, Floats]:
    """The scores `[q_heads, n]` as the softmax gets them, and what f32 gets wrong on the way from scale * (q . k)."""
    raw = products(query, seen.k, given.scale)
    if given.score is None:
        return raw, np.zeros_like(raw)
    sizes = [np.abs(raw)]

    def note(x: Floats) -> Floats:
        sizes.append(np.abs(x))
        return x

    arguments = Arguments(given.arguments or {}, len(query), seen.k.shape[1])
    scores = modified(given.score, seen.at, seen.tokens, raw[None], arguments, note)[0]
    # Each step some units in the last place of what it works on; tanh as far off as its largest result's.
    size = sum(np.where(np.isfinite(x), x, 0).reshape(-1, *x.shape[-2:])[0] + 0 * raw for x in sizes)
    return scores, 4 * 2.0**-24 * (size + 4 * (getattr(given.score, "softcap", None) or 0))


def bounds(
    q: Floats,
    k: Floats,
    v: Floats,
    scale: float,
    out: Floats,
    element: str,
    *,
    scores: Floats | None = None,
    slack: Floats | float = 0.0,
    sinks: Floats | None = None,
    out_scale: float = 1.0,
) -> tuple[Floats, Floats]:
    """The error that f32 arithmetic may make: (of out `[q_heads, v_dim]`, of the natural lse `[q_heads]`), absolutely.

    A score of D products is off by (D + 4) u sum |q k|, u = 2^-24, and `slack`; a weight e^(s - max) by that of both scores,
    by u |s - max| for the difference in base 2, and by 2^-22 an exponential: its own, and one a rescaling, of which there
    are at most n + 8. Sums of n terms add n u. The result, divided by `out_scale`, is rounded once. `scores` are those after
    modifications.
    """
    n, u = len(k), 2.0**-24
    size = np.abs(v)
    error = (q.shape[1] + 4) * u * products(np.abs(q), np.abs(k), scale) + slack
    scores = products(q, k, scale) if scores is None else scores
    error = np.where(np.isneginf(scores), 0, error)
    if sinks is not None:  # one more score, whose value is 0
        scores = np.concatenate([scores, sinks[:, None]], axis=1)
        error = np.concatenate([error, u * np.abs(sinks)[:, None]], axis=1)
        size = np.concatenate([size, np.zeros((1, *size.shape[1:]))])
    top = scores.max(axis=1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    weights = np.exp(scores - top)
    weights /= np.maximum(weights.sum(axis=1, keepdims=True), TINY["f32"])
    far = np.where(weights > 0, np.abs(scores - top), 0)
    relative = np.expm1(error + error.max(axis=1, keepdims=True) + 2 * u * far)
    relative += (n + 10) * 2.0**-22 + n * u
    together = (weights * relative).sum(axis=1)
    off = (sums(weights * relative, size) + together[:, None] * sums(weights, size)) / out_scale
    out_error = off * 1.01 + HALF_ULP[element] * (np.abs(out) + off) + TINY[element]
    lse = np.abs(top[:, 0]) * 4 * u + error.max(axis=1) + together + 2.0**-21 * (1 + math.log(n))
    return out_error, lse


def rounded_rows(
    q: Floats, seen: VisibleKeys, given: Numerics, right: Floats, lse: Floats
) -> tuple[Floats | float, Floats | float]:
    """How far (out, lse) of one row is off if K and V alone are rounded to the type that the kernel computes in; 0 where they
    are numbers of that type.

    Products take operands of that type, so that every kernel that does not multiply codes has these roundings, whatever it
    rounds besides. Naive attention has them too, but its others may cancel them, and `roundings` takes them to be
    independent. They are not where a scale belongs to many dims: equal codes, and codes of which one is a power of two times
    the other, are off by the same share, and a score of D dims by up to D times one rounding, not sqrt(D) times.
    """
    rounded = rounder(given.compute)
    if all(np.array_equal(rounded(x), x, equal_nan=True) for x in (seen.k, seen.v)):
        return 0.0, 0.0
    out, out_lse = naive(q, seen, given, rows_alone=True)
    some = np.isfinite(lse)
    return np.abs(out - right), np.abs(np.subtract(out_lse, lse, where=some, out=np.zeros(len(lse))))


def naive(q: Floats, seen: VisibleKeys, given: Numerics, *, rows_alone: bool = False) -> tuple[Floats, Floats]:
    """Attention of one row with K, V and (but for `rows_alone`) every intermediate rounded to the type that the kernel computes
    in, the log-sum-exp only as far as its terms are; (out, lse) as the oracle has them."""
    rounded = rounder(given.compute)
    k, v = rounded(seen.k), rounded(seen.v)
    if rows_alone:
        rounded = np.asarray
    scores = rounded(rounded(products(q, k, 1.0)) * given.scale)
    arguments = Arguments(given.arguments or {}, len(q), seen.k.shape[1])
    scores = modified(given.score, seen.at, seen.tokens, scores[None], arguments, rounded)[0]
    sinks = None if given.sinks is None else given.sinks.astype(np.float64)
    top = scores.max(axis=1) if sinks is None else np.maximum(scores.max(axis=1), sinks)
    top = np.where(np.isfinite(top), top, 0)[:, None]
    weights = rounded(np.exp(scores - top))
    alone = weights.sum(axis=1, keepdims=True)
    total = alone if sinks is None else alone + rounded(np.exp(sinks[:, None] - top))
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = rounded(np.nan_to_num(weights / total))
        lse = (top + np.log(total if given.sinks_in_lse else alone))[:, 0] / (
            math.log(2) if given.lse_base == "2" else 1.0
        )
    return rounded(sums(shares, v)) / given.out_scale, lse


def roundings(query: Floats, seen: VisibleKeys, given: Numerics, scores: Floats) -> tuple[float, float]:
    """The usual error of (out, natural lse) by rounding to the type that the kernel computes in: the root of the mean square, of
    the head and dim that has the largest. A rounding is off by half of HALF_ULP then; each weight and value has one, and each
    score and every term of it."""
    top = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    weights /= np.maximum(weights.sum(axis=1, keepdims=True), TINY["f32"])  # without sinks, which make them smaller
    finite = np.where(np.isfinite(scores), scores, 0)
    squares = finite**2 + products(query**2, seen.k**2, given.scale**2)
    out = np.sqrt(2 * sums(weights**2, seen.v**2))
    lse = np.sqrt((weights**2 * squares).sum(axis=1))
    half = HALF_ULP[given.compute] / 2
    return float(half * out.max() / given.out_scale), float(half * lse.max())


def rounder(element: str) -> Callable[[Floats], Floats]:
    """Rounding to a type and back."""
    kind = dtype(element).numpy()
    return lambda x: x.astype(kind).astype(np.float64)
