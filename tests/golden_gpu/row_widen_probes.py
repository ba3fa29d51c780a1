"""Codes widened for products of warpgroups, Q beside them, and scales of tokens (kernels/row_widen.cu) in float64."""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.golden_gpu.column_probes import UNUSED, close
from tests.golden_gpu.compare import Rule, Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe, pattern
from tests.golden_gpu.row_wgmma_probes import grouped

UNIT: Final = "row_widen"
DIMS: Final = 128

# Rows of codes ------------------------------------------------------------------------------------------------------

# Bytes of a row, tokens of a tile, dims of a scale, type of scales: int8, u4 with zero points, e4m3 with scales of tokens, e2m1;
# e2m1 and e4m3 that become bf16.
TILES: Final = (
    (128, 64, 32, np.float16),
    (64, 128, 32, np.float16),
    (128, 64, 128, np.float32),
    (64, 128, 16, ml_dtypes.float8_e4m3fn),
    (64, 128, 32, ml_dtypes.float8_e8m0fnu),
    (128, 64, 16, ml_dtypes.float8_e8m0fnu),
)
E2M1: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
# Dims of each eight as codes of 4 bits come.
APART: Final = (0, 4, 1, 5, 2, 6, 3, 7)


def _swizzled(codes: Array) -> Array:
    """Rows as a tensor copy leaves them that swizzles as many bytes as a row has."""
    at = np.arange(codes.size)
    found = np.zeros(codes.size, np.uint8)
    found[at ^ (at >> 7 & codes.shape[1] // 16 - 1) << 4] = codes.reshape(-1)
    return found


def _codes(n: int) -> Array:
    size, tokens, *_ = TILES[n]
    return np.random.default_rng(300 + n).integers(0, 256, (tokens, size)).astype(np.uint8)


def _scales(n: int) -> NDArray[Any]:
    """Of tokens, two heads, groups of dims; a zero point behind each of u4."""
    _, tokens, dims, kind = TILES[n]
    rng = np.random.default_rng(310 + n)
    found = rng.uniform(0.25, 4, (tokens, 2, DIMS // dims, 2 if n == 1 else 1)) * rng.choice([1, -1])
    if n >= 4:  # every power of two, and NaN
        exponents = rng.integers(0, 256, found.shape).astype(np.uint8)
        return exponents.view(kind)
    if n == 1:
        found[..., 1] = rng.uniform(-2, 17, found.shape[:-1])
    typed: NDArray[Any] = found.astype(kind)
    return typed


def _rows_inputs() -> dict[str, Array]:
    codes, scales = np.zeros((len(TILES), DIMS * 128), np.uint8), np.zeros((len(TILES), 4096), np.uint8)
    for n in range(len(TILES)):
        own, of_own = _swizzled(_codes(n)), _scales(n).reshape(-1).view(np.uint8)
        codes[n, : own.size], scales[n, : of_own.size] = own, of_own
    return {
        "codes": codes,
        "scales": scales,
        "out": np.full((len(TILES), DIMS * 128), 0xEEEE, np.uint16),
        "token_scales": np.full(64, UNUSED, np.uint32),
    }


def _rows(arrays: Arrays) -> dict[str, Wanted]:
    out = arrays["out"].copy()
    tokens = np.zeros(64)
    for n, (_, count, dims, _) in enumerate(TILES):
        codes, scales = _codes(n), _scales(n)[:, 1].astype(np.float64)
        scales[np.arange(count) % 7 == 3] = 2.0**-127 if n >= 4 else 0  # zero bits
        nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(count, -1)
        scale = scales[..., 0].repeat(dims, axis=1)
        with np.errstate(invalid="ignore"):
            if n == 0:
                found = codes.view(np.int8) * scale
            elif n == 1:
                moved = nibbles - scales[..., 1].repeat(dims, axis=1)
                found = moved.astype(np.float16).astype(np.float64) * scale
            elif n == 4:
                found = E2M1[nibbles] * scale
            elif n == 5:
                found = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
            elif n == 2:
                found, tokens = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64), scales[:, 0, 0]
            else:
                found = E2M1[nibbles] * 2.0**-14 * scale
            with np.errstate(over="ignore"):
                halves = pattern(found.astype(ml_dtypes.bfloat16 if n >= 4 else np.float16))
        if n in (1, 3):
            halves = halves.reshape(count, -1, 8)[..., APART].reshape(count, DIMS)
        out[n, : count * DIMS] = grouped(halves).reshape(-1)
    rules = tuple(Rule("bf16" if n >= 4 else "f16", any_nan=True, any_zero=True) for n in range(len(TILES)))
    return {"out": Wanted(out, rules), "token_scales": close(tokens, 0.0)}


# Q ------------------------------------------------------------------------------------------------------------------

QUERY_COLS: Final = (0, 9, 63, 17, 64, 70, 127, 101)


def _query_inputs() -> dict[str, Array]:
    q = np.random.default_rng(320).standard_normal((len(QUERY_COLS), DIMS))
    return {
        "q": pattern(q.astype(ml_dtypes.bfloat16)),
        "cols": np.array(QUERY_COLS, np.uint32),
        "plain": np.full(128 * DIMS, 0xEEEE, np.uint16),
        "apart": np.full(128 * DIMS, 0xEEEE, np.uint16),
        "places": np.full(32, UNUSED, np.uint32),
    }


def _query(arrays: Arrays) -> dict[str, Wanted]:
    q = pattern(arrays["q"].view(ml_dtypes.bfloat16).astype(np.float16))
    q[3] = 0
    plain, apart = np.full((2, 128, DIMS), 0xEEEE, np.uint16)
    plain[list(QUERY_COLS)] = q
    apart[list(QUERY_COLS)] = q.reshape(len(q), -1, 8)[..., APART].reshape(q.shape)
    places = np.concatenate([np.argsort(APART), APART, np.arange(8), np.arange(8)]).astype(np.uint32)
    return {
        "plain": exact(grouped(plain).reshape(-1)),
        "apart": exact(grouped(apart).reshape(-1)),
        "places": exact(places),
    }


# Scales of tokens ---------------------------------------------------------------------------------------------------

BLOCKS, COLS, TOKENS, SLACK = 4, 64, 32, 8
# Tokens that a block's chunk has: scales of others may be anything.
ENDS: Final = (24, 32, 32, 32)


def _weights_inputs() -> dict[str, Array]:
    """Scales of V that differ little, by more than f16 holds, with infinities and NaN, and tiny ones."""
    rng = np.random.default_rng(330)
    signs = rng.choice([1, -1], (BLOCKS, TOKENS))
    v_scales = signs * np.exp2(rng.uniform([[-1], [-15], [-1], [-119]], [[3], [5], [3], [-115]], (BLOCKS, TOKENS)))
    v_scales[0, 24:28], v_scales[0, 28:] = np.nan, 0
    v_scales[2, [0, 20, 21]] = [np.inf, np.nan, -np.inf]
    limits = np.minimum(rng.integers(0, TOKENS + 9, (BLOCKS, COLS)), np.array(ENDS)[:, None])
    limits[2, :2] = 1  # columns that see no scale that is a number
    top = np.where(rng.random((BLOCKS, COLS)) < 0.5, -np.inf, rng.uniform(-9, 9, (BLOCKS, COLS)))
    top[2, :2] = -np.inf
    top[0, 16:32] = 50  # no maximum of this warp rises
    floats: dict[str, NDArray[Any]] = {
        "scores": rng.normal(0, 20, (BLOCKS, COLS, TOKENS)),
        "k_scales": rng.uniform(0.5, 2, (BLOCKS, TOKENS)),
        "v_scales": v_scales,
        "max": top,
        "sum": np.where(np.isneginf(top), 0, rng.uniform(0.5, 4, top.shape)),
        "weights": np.zeros((BLOCKS, COLS, TOKENS)),
        "shrink": np.zeros((BLOCKS, COLS)),
    }
    found = {name: pattern(x.astype(np.float32)) for name, x in floats.items()}
    found |= {
        "limits": limits.astype(np.uint32),
        "ends": np.array(ENDS, np.uint32),
        "rises": np.full((BLOCKS, COLS // 16), UNUSED, np.uint32),
        "hidden": np.full((BLOCKS, COLS, TOKENS), UNUSED, np.uint32),
    }
    order = "scores k_scales v_scales limits ends max sum weights shrink rises hidden"
    return {name: found[name] for name in order.split()}


def _weights(arrays: Arrays) -> dict[str, Wanted]:
    scores, k_scales, v_scales, top, total = (
        arrays[name].view(np.float32).astype(np.float64) for name in ("scores", "k_scales", "v_scales", "max", "sum")
    )
    seen = np.arange(TOKENS) < arrays["limits"][..., None]
    logs = np.where(seen, scores * k_scales[:, None] * 0.25, -np.inf)
    high = logs.max(axis=2)
    for block, end in enumerate(ENDS):
        own = np.abs(v_scales[block, :end])
        if np.isfinite(own).all() and own.max() < own.min() * 2**10:
            high[block] += max(np.floor(np.log2(own.max())) + 1, -100)
        else:
            finite = np.isfinite(v_scales[block])
            each = logs[block][:, finite] + np.log2(np.abs(v_scales[block][finite]))
            high[block] = np.maximum(high[block] - 100, each.max(axis=1))
    higher = high > top + SLACK
    after = np.where(higher, high, top)
    with np.errstate(invalid="ignore"):
        shrink = np.where(higher, np.exp2(top - after), 1)
        plain = np.where(seen, np.exp2(logs - after[..., None]), 0)
        weights = np.where(seen, plain * v_scales[:, None], 0)
    return {
        "max": close(after, 1e-5, 1e-5),
        "sum": close(total * shrink + plain.sum(axis=2), 1e-4),
        "weights": close(weights, 1e-4),
        "shrink": close(shrink, 1e-4),
        "rises": exact(higher.reshape(BLOCKS, -1, 16).any(axis=2).astype(np.uint32)),
        "hidden": exact((~seen).astype(np.uint32)),
    }


def probes() -> list[Probe]:
    """All of this module."""
    return [
        Probe("library_row_widen_rows", UNIT, "row_widen_rows", _rows_inputs, _rows, 128, (len(TILES), 1, 1)),
        Probe("library_row_widen_query", UNIT, "row_widen_query", _query_inputs, _query, 32),
        Probe("library_row_widen_weights", UNIT, "row_widen_weights", _weights_inputs, _weights, 128, (BLOCKS, 1, 1)),
    ]
