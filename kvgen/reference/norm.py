"""RMS norm and LayerNorm, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.rounding import ulp
from kvgen.schema.norm import LayerNorm, RmsNorm

Floats = NDArray[np.float64]
LOST = 2.0**-22


def rms_norm(
    x: NDArray[Any],
    weight: NDArray[Any] | None,
    norm: RmsNorm,
    dtype: np.dtype[Any],
    mean_square: NDArray[Any] | None = None,
) -> Floats:
    """x `[T, heads, dim]`, weight `[n]` -> `[T, heads, dim]`, not rounded at the end: the caller rounds to what it stores.
    weight None: the norm has none. `mean_square` `[T]`: that of each row, where norm.mean_square is "given".

    n is dim, norm.dim or heads * dim, as `norm.over` says; elements past norm.dim pass. Before the weight, `multiply="after"`
    rounds x / rms to `dtype`, the tensor's.
    """
    scaled, factor = _parts(x, weight, norm, mean_square)
    if _casts(norm):
        scaled = scaled.astype(dtype).astype(np.float64)
    return _put(x, scaled * factor, norm)


def rms_norm_error(
    x: NDArray[Any],
    weight: NDArray[Any] | None,
    norm: RmsNorm,
    dtype: np.dtype[Any],
    mean_square: NDArray[Any] | None = None,
) -> Floats:
    """How far a kernel's result, rounded to `dtype`, may lie from `rms_norm`'s, which is not: `[T, heads, dim]`.

    One ulp, and 2^-22 of the number for what f32 arithmetic loses. Where `multiply="after"` rounds x / rms between two
    numbers of `dtype`, so near to their middle that f32 may take the other one, also their distance times the weight.
    0 for elements that pass.
    """
    scaled, factor = _parts(x, weight, norm, mean_square)
    allowed = np.zeros(scaled.shape)
    if _casts(norm):
        least, most = ((scaled * (1 + sign * LOST)).astype(dtype).astype(np.float64) for sign in (-1, 1))
        allowed = np.abs((most - least) * factor)
        scaled = scaled.astype(dtype).astype(np.float64)
    result = scaled * factor
    return _put(np.zeros(x.shape), allowed + ulp(result, dtype) + LOST * np.abs(result), norm)


def norm_gain(
    x: NDArray[Any],
    weight: NDArray[Any] | None,
    norm: RmsNorm | LayerNorm,
    mean_square: NDArray[Any] | None = None,
) -> Floats:
    """What a small change of an element of x is multiplied by, the mean square left as it is: `[T, heads, dim]`, not negative;
    1 for elements that pass."""
    wide = x.astype(np.float64)
    if isinstance(norm, LayerNorm):
        assert weight is not None
        root = np.sqrt(np.var(wide, axis=2, keepdims=True) + norm.eps)
        return np.broadcast_to(np.abs(weight.astype(np.float64)) / root, x.shape)
    tokens, heads, dim = x.shape
    part = wide.reshape(tokens, 1, heads * dim) if norm.over == "row" else wide[..., : norm.dim]
    _, factor = _parts(x, weight, norm, mean_square)
    root = np.sqrt(_mean_square(part, norm, mean_square) + norm.eps)
    return _put(np.ones(x.shape), np.broadcast_to(np.abs(factor) / root, part.shape), norm)


def layer_norm(x: NDArray[Any], weight: NDArray[Any], bias: NDArray[Any] | None, norm: LayerNorm) -> Floats:
    """x `[T, heads, dim]`, weight and bias `[dim]` or `[heads, dim]` -> `[T, heads, dim]`, not rounded."""
    wide = x.astype(np.float64)
    shape = x.shape[1:] if norm.per_head else x.shape[2:]
    for name, array in (("weight", weight), ("bias", bias)):
        if array is not None and array.shape != shape:
            raise ValueError(f"{name}: got {list(array.shape)}; it is {list(shape)}")
    centered = wide - np.mean(wide, axis=2, keepdims=True)
    found: Floats = (
        centered / np.sqrt(np.mean(centered**2, axis=2, keepdims=True) + norm.eps) * weight.astype(np.float64)
    )
    return found if bias is None else found + bias.astype(np.float64)


def layer_norm_error(x: NDArray[Any], weight: NDArray[Any], bias: NDArray[Any] | None, norm: LayerNorm) -> Floats:
    """How far f32 arithmetic may be from `layer_norm`: what the mean, the difference and the root lose of the head's largest
    element, as a share of the standard deviation, times the weight; and a rounding of the result."""
    wide = x.astype(np.float64)
    mean = np.mean(wide, axis=2, keepdims=True)
    root = np.sqrt(np.mean((wide - mean) ** 2, axis=2, keepdims=True) + norm.eps)
    largest = np.abs(wide).max(axis=2, keepdims=True)
    lost = LOST * (largest / root + np.abs(wide - mean) / root * (1 + (largest / root) ** 2))
    allowed: Floats = lost * np.abs(weight.astype(np.float64)) + LOST * np.abs(layer_norm(x, weight, bias, norm))
    return allowed


def _casts(norm: RmsNorm) -> bool:
    """Whether x / rms is rounded to the tensor's dtype before the weights."""
    return norm.weight and norm.multiply == "after"


def _mean_square(wide: Floats, norm: RmsNorm, given: NDArray[Any] | None) -> Floats:
    """Mean of the squares of `[T, groups, n]` along n, or the given one of each row, `[T, groups, 1]`."""
    if (given is None) == norm.given:
        raise ValueError(f"mean_square: got {None if given is None else list(given.shape)} with {norm.mean_square!r}")
    if given is None:
        return np.asarray(np.mean(wide * wide, axis=2, keepdims=True))
    return given.astype(np.float64).reshape(-1, 1, 1)


def _parts(
    x: NDArray[Any], weight: NDArray[Any] | None, norm: RmsNorm, mean_square: NDArray[Any] | None = None
) -> tuple[Floats, Floats]:
    """x / rms of what is normalised, `[T, groups, n]`, and the weight with its offset, `[n]`; ones where there is none."""
    tokens, heads, dim = x.shape
    wide = x.astype(np.float64)
    wide = wide.reshape(tokens, 1, heads * dim) if norm.over == "row" else wide[..., : norm.dim]
    factor = np.ones(wide.shape[2]) if weight is None else weight.astype(np.float64) + norm.weight_offset
    if (weight is None) == norm.weight or factor.shape != (wide.shape[2],):
        got = None if weight is None else list(weight.shape)
        raise ValueError(f"weight: got {got}; {wide.shape[2]} elements are normalised together")
    return wide / np.sqrt(_mean_square(wide, norm, mean_square) + norm.eps), factor


def _put(x: NDArray[Any], done: Floats, norm: RmsNorm) -> Floats:
    """`done` in its places, the rest of x around it."""
    out = x.astype(np.float64)
    if norm.over == "row":
        return done.reshape(out.shape)
    out[..., : done.shape[2]] = done
    return out
