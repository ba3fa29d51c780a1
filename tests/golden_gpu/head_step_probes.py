"""Norms without weights, LayerNorm, a head's first pairs, q's factor, Hadamard transforms, blocks of codes
(kernels/head_steps.cu): sums are exact, roots are not."""

from __future__ import annotations

from typing import Final

import numpy as np

from kvgen.reference.attention_output import blocks_of
from kvgen.reference.quant import choose, pack_nibbles, quantize
from tests.golden_gpu.compare import Rule, Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.oracle import floats
from tests.golden_gpu.probe import Arrays, Probe, pattern

UNIT: Final = "head_steps"
HEADS, DIMS, COUNT, TURNING, LANES = 4, 40, 24, 8, 8
EPS: Final = 0.0625
NEAR: Final = Rule("f32", relative=2.0**-21)


def _rows(seed: int) -> Array:
    """Whole numbers around a whole mean, so that f32 sums of them and of their squares are exact."""
    rng = np.random.default_rng(seed)
    off = rng.integers(1, 200, (HEADS, DIMS // 2))
    return (np.concatenate([off, -off], axis=1) + rng.integers(-300, 300, (HEADS, 1))).astype(np.float32)


def _norm_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(121)
    rows, weight = _rows(120), (rng.integers(1, 13, DIMS) / 4).astype(np.float32)
    found: dict[str, Array] = {"rows": pattern(rows), "weight": pattern(weight)}
    found["bias"] = pattern((rng.integers(-12, 13, DIMS) / 4).astype(np.float32))
    found["masks"] = np.zeros(32, np.uint32)
    return found | {n: np.zeros(rows.size, np.uint32) for n in ("plain", "by", "standard", "layer", "biased")}


def _near(x: Array, rule: Rule = NEAR) -> Wanted:
    flat = x.reshape(-1)
    return Wanted(pattern(flat.astype(np.float32)), rule, flat[:, None])


def _norms(arrays: Arrays) -> dict[str, Wanted]:
    x = arrays["rows"].view(np.float32).astype(np.float64).reshape(HEADS, DIMS)
    weight, bias = (arrays[name].view(np.float32).astype(np.float64) for name in ("weight", "bias"))
    plain, by = x.copy(), x.copy()
    plain[:, :COUNT] /= np.sqrt((x[:, :COUNT] ** 2).mean(axis=1, keepdims=True) + EPS)
    by[:, :COUNT] *= 0.25
    centered = x - x.mean(axis=1, keepdims=True)
    standard = centered / np.sqrt((centered**2).mean(axis=1, keepdims=True) + EPS)
    return {
        "masks": exact(np.repeat([0xFF << 8 * h for h in range(HEADS)], LANES).astype(np.uint32)),
        "plain": _near(plain),
        "by": floats(by.reshape(-1).astype(np.float32)),
        "standard": _near(standard),
        "layer": _near(standard * weight),
        "biased": _near(standard * weight + bias, Rule("f32", relative=2.0**-21, absolute=2.0**-20)),
    }


def _rotary_inputs() -> dict[str, Array]:
    angles = np.random.default_rng(122).choice([1.0, -1.0, 0.5, 2.0, -0.25, 0.75], (TURNING, 2)).astype(np.float32)
    found: dict[str, Array] = {"rows": pattern(_rows(123)), "angles": pattern(angles)}
    return found | {name: np.zeros(HEADS * DIMS, np.uint32) for name in ("rotated", "scaled")}


def _rotated(arrays: Arrays) -> dict[str, Wanted]:
    x = arrays["rows"].view(np.float32).astype(np.float64).reshape(HEADS, DIMS)
    cos, sin = arrays["angles"].view(np.float32).astype(np.float64).reshape(TURNING, 2).T
    one, two = np.arange(TURNING), DIMS // 2 + np.arange(TURNING)
    x[:, one], x[:, two] = x[:, one] * cos - x[:, two] * sin, x[:, two] * cos + x[:, one] * sin
    flat = x.reshape(-1).astype(np.float32)
    return {"rotated": floats(flat, any_zero=True), "scaled": floats(flat / 2, any_zero=True)}


def _factor_inputs() -> dict[str, Array]:
    positions = np.array([0, 1, 98, 99, 100, 198, 199, 298, 299, 12345, 2**24 - 1, 2**31 - 2, *range(999, 1999, 50)])
    return {"positions": positions.astype(np.uint32), "factors": np.zeros(32, np.uint32)}


def _factors(arrays: Arrays) -> dict[str, Wanted]:
    periods = (arrays["positions"].astype(np.int64) + 1) // 100
    return {"factors": _near(1 + 0.25 * np.log(1.0 + periods))}


def _hadamard_inputs() -> dict[str, Array]:
    rows = np.random.default_rng(124).integers(-999, 1000, (8, 64)).astype(np.float32)
    return {"rows": pattern(rows), "transformed": np.zeros(rows.size, np.uint32), "pairs": np.zeros(64, np.uint32)}


def _transformed(arrays: Arrays) -> dict[str, Wanted]:
    x = arrays["rows"].view(np.float32).astype(np.float64).reshape(8, 64)
    signs = np.array([[1.0]])
    for _ in range(6):
        signs = np.block([[signs, signs], [signs, -signs]])
    two = x.reshape(-1)[:64].reshape(32, 2)
    pairs = np.stack([two[:, 0] + two[:, 1], two[:, 0] - two[:, 1]], axis=1)
    return {
        "transformed": floats((x @ signs / 8).reshape(-1).astype(np.float32), any_zero=True),
        "pairs": floats(pairs.reshape(-1).astype(np.float32), any_zero=True),
    }


def _block_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(125)
    rows = (rng.integers(-999, 1000, (8, 64)) * 2.0 ** rng.integers(-14, 3, (8, 1))).astype(np.float32)
    rows[0, :32], rows[1, 40], rows[2, 3] = 0, np.nan, np.inf
    found: dict[str, Array] = {"rows": pattern(rows)}
    found |= {"amax": np.zeros(128, np.uint32), "scale": np.zeros(128, np.uint32)}
    found |= {"powers": np.zeros(512, np.uint8), "power_scales": np.zeros(16, np.uint32)}
    found |= {"quotients": np.zeros(512, np.uint8), "quotient_scales": np.zeros(32, np.uint32)}
    return found | {"words": np.zeros(8, np.uint32), "nans": np.zeros(512, np.uint32)}


def _blocks(arrays: Arrays) -> dict[str, Wanted]:
    x = arrays["rows"].view(np.float32).reshape(8, 64)
    most = np.abs(x).reshape(8, 2, 32).max(axis=2)
    powers, codes = blocks_of(x, 32, "pow2", 0.25)
    quotients, others = blocks_of(x, 16, "amax", 0.25)
    exponent = np.where(np.isfinite(powers), np.frexp(np.where(np.isfinite(powers), powers, 1))[1] + 126, 255).astype(
        np.uint32
    )
    return {
        "amax": floats(np.repeat(most, 8, axis=1).reshape(-1)),
        "scale": floats(np.repeat(powers, 8, axis=1).reshape(-1).astype(np.float32)),
        "powers": exact(codes.reshape(-1)),
        "power_scales": floats(powers.T.reshape(-1).astype(np.float32)),
        "quotients": exact(others.reshape(-1)),
        "quotient_scales": floats(quotients.T.reshape(-1).astype(np.float32)),
        "words": exact(exponent[:, 0] | exponent[:, 1] << 8 | 0xFF << 16 | 127 << 24),
        "nans": floats(np.where(np.arange(8)[:, None] % 2 == 0, np.float32(np.nan), x).reshape(-1)),
    }


def _packed_inputs() -> dict[str, Array]:
    rows = _block_inputs()["rows"]
    return {"rows": rows, "codes": np.zeros(8 * 32, np.uint8), "scales": np.zeros(8 * 2, np.uint32)}


def _packed(arrays: Arrays) -> dict[str, Wanted]:
    blocks = arrays["rows"].view(np.float32).reshape(8, 2, 32)
    scales, _ = choose(np.maximum(np.abs(blocks).max(axis=2, keepdims=True), np.float32(0.25)), "e2m1", "f32", "pow2")
    codes = pack_nibbles(quantize(blocks, scales, None, "e2m1"))
    return {"codes": exact(codes.reshape(-1)), "scales": floats(scales.reshape(-1).astype(np.float32))}


def _pad_inputs() -> dict[str, Array]:
    out = np.random.default_rng(126).integers(1, 99, 6 * 24).astype(np.float32)
    return {"states": np.array([2, 0, 1, 2, 0, 2], np.uint32), "out": pattern(out)}


def _padded(arrays: Arrays) -> dict[str, Wanted]:
    rows = arrays["out"].view(np.float32).reshape(6, 24).copy()
    rows[arrays["states"] != 0, 8:] = 0
    return {"out": floats(rows.reshape(-1))}


def probes() -> list[Probe]:
    """All of this module."""
    return [
        Probe("library_head_norms", UNIT, "head_norms", _norm_inputs, _norms, 32),
        Probe("library_head_first_pairs", UNIT, "head_first_pairs", _rotary_inputs, _rotated, 32),
        Probe("library_head_hadamard", UNIT, "head_hadamard", _hadamard_inputs, _transformed, 32),
        Probe("library_head_blocks", UNIT, "head_blocks", _block_inputs, _blocks, 32),
        Probe("library_head_packed_blocks", UNIT, "head_packed_blocks", _packed_inputs, _packed, 32),
        Probe("library_head_pads", UNIT, "head_pads", _pad_inputs, _padded, 32),
        Probe("library_head_position_factors", UNIT, "head_position_factors", _factor_inputs, _factors, 32),
    ]
