"""RMS norm, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.rounding import ulp
from kvgen.spec.norm import RmsNorm

Floats = NDArray[np.float64]
LOST = 2.0**-22


def rms_norm(x: NDArray[Any], weight: NDArray[Any], norm: RmsNorm, dtype: np.dtype[Any]) -> Floats:
    """x `[T, heads, dim]`, weight `[n]` -> `[T, heads, dim]`, not rounded at the end: the caller rounds to what it stores.

    n is dim, norm.dim or heads * dim, as `norm.over` says; elements past norm.dim pass. Before the weight, `multiply="after"`
    rounds x / rms to `dtype`, the tensor's.
    """
    scaled, factor = _parts(x, weight, norm)
    if norm.multiply == "after":
        scaled = scaled.astype(dtype).astype(np.float64)
    return _put(x, scaled * factor, norm)


def rms_norm_error(x: NDArray[Any], weight: NDArray[Any], norm: RmsNorm, dtype: np.dtype[Any]) -> Floats:
    """How far a kernel's result, rounded to `dtype`, may lie from `rms_norm`'s, which is not: `[T, heads, dim]`.

    One ulp, and 2^-22 of the number for what f32 arithmetic loses. Where `multiply="after"` rounds x / rms between two
    numbers of `dtype`, so near to their middle that f32 may take the other one, also their distance times the weight.
    0 for elements that pass.
    """
    scaled, factor = _parts(x, weight, norm)
    allowed = np.zeros(scaled.shape)
    if norm.multiply == "after":
        least, most = ((scaled * (1 + sign * LOST)).astype(dtype).astype(np.float64) for sign in (-1, 1))
        allowed = np.abs((most - least) * factor)
        scaled = scaled.astype(dtype).astype(np.float64)
    result = scaled * factor
    return _put(np.zeros(x.shape), allowed + ulp(result, dtype) + LOST * np.abs(result), norm)


def _parts(x: NDArray[Any], weight: NDArray[Any], norm: RmsNorm) -> tuple[Floats, Floats]:
    """x / rms of what is normalised, `[T, groups, n]`, and the weight with its offset, `[n]`."""
    tokens, heads, dim = x.shape
    wide = x.astype(np.float64)
    wide = wide.reshape(tokens, 1, heads * dim) if norm.over == "row" else wide[..., : norm.dim]
    factor = weight.astype(np.float64) + norm.weight_offset
    if factor.shape != (wide.shape[2],):
        raise ValueError(f"weight: got {list(weight.shape)}; {wide.shape[2]} elements are normalised together")
    return wide / np.sqrt(np.mean(wide * wide, axis=2, keepdims=True) + norm.eps), factor


def _put(x: NDArray[Any], done: Floats, norm: RmsNorm) -> Floats:
    """`done` in its places, the rest of x around it."""
    out = x.astype(np.float64)
    if norm.over == "row":
        return done.reshape(out.shape)
    out[..., : done.shape[2]] = done
    return out
