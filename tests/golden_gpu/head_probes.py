"""Heads in registers (kernels/heads.cu): numbers of which sums and products are exact, so that only roots may be off."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

import ml_dtypes
import numpy as np

from tests.golden_gpu.compare import Rule, Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.oracle import floats
from tests.golden_gpu.probe import Arrays, Probe, pattern

BF16: Final = ml_dtypes.bfloat16
UNIT: Final = "heads"
EPS, FACTOR = 0.0625, 0.25
ROOT: Final = Rule("f32", relative=2.0**-22, any_nan=True)


@dataclass(frozen=True)
class Form:
    """As the macros of heads.cu say: types of the rows and weights, how many elements are normed, whether rounded before
    the weights; dims of a head, which of them are rotated and how, and lanes of a head.
    """

    rows: str
    weight: str
    count: int
    cast_before_weight: bool
    dims: int
    rotary_begin: int
    rotary_dim: int
    neox: bool
    lanes: int

    @property
    def heads(self) -> int:
        return 32 // self.lanes


FORMS: Final = {
    "heads_neox": Form("bf16", "f32", 40, False, 40, 8, 16, True, 4),
    "heads_interleaved": Form("f32", "bf16", 18, True, 24, 0, 24, False, 2),
    "heads_single": Form("f32", "f32", 3, True, 5, 1, 4, False, 8),
    "heads_wide": Form("f32", "bf16", 64, False, 64, 0, 32, True, 32),
}
TYPES: Final = {"f32": np.dtype(np.float32), "bf16": np.dtype(BF16)}


def _inputs(form: Form) -> dict[str, Array]:
    rng = np.random.default_rng(110)
    most = 120 if form.rows == "bf16" else 400  # what bf16 has, or has to round
    rows = rng.integers(-most, most + 1, (form.heads, form.dims)).astype(TYPES[form.rows])
    bias = rng.integers(-8, 9, form.dims).astype(BF16)
    weight = (rng.integers(-12, 13, form.count) / 4).astype(TYPES[form.weight])
    angles = rng.choice([1.0, -1.0, 0.5, 2.0, -0.25, 0.75], (form.rotary_dim // 2, 2)).astype(np.float32)
    found: dict[str, Array] = {"rows": pattern(rows), "bias": pattern(bias), "weight": pattern(weight)}
    found |= {"angles": pattern(angles), "out": np.zeros(rows.size, np.uint32)}
    return found | {"squares": np.zeros(32, np.uint32), "factors": np.zeros(32, np.uint32)}


def _wanted(form: Form, arrays: Arrays) -> dict[str, Wanted]:
    rows = arrays["rows"].view(TYPES[form.rows]).astype(np.float64).reshape(form.heads, form.dims)
    x = rows + arrays["bias"].view(BF16).astype(np.float64)
    squares = (x[:, : form.count] ** 2).sum(axis=1).repeat(form.lanes)
    factors = (squares / form.count + EPS) ** -0.5
    scaled = x[:, : form.count] * FACTOR
    if form.cast_before_weight:
        scaled = scaled.astype(BF16).astype(np.float64)
    x[:, : form.count] = scaled * (arrays["weight"].view(TYPES[form.weight]).astype(np.float64) + 1)
    cos, sin = arrays["angles"].view(np.float32).astype(np.float64).reshape(-1, 2).T
    rotary = np.arange(form.rotary_begin, form.rotary_begin + form.rotary_dim)
    one, two = rotary.reshape(2, -1) if form.neox else rotary.reshape(-1, 2).T
    x[:, one], x[:, two] = x[:, one] * cos - x[:, two] * sin, x[:, two] * cos + x[:, one] * sin
    return {
        "out": floats(x.reshape(-1).astype(np.float32), any_zero=True),
        "squares": floats(squares.astype(np.float32)),
        "factors": Wanted(pattern(factors.astype(np.float32)), ROOT, factors[:, None]),
    }


# Out of the cache: a page of 8 tokens and 2 heads of 40 dims, in bytes with scales and zero points of 16 dims, and in bf16.


def _take_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(111)
    scales = rng.uniform(0.01, 2, (16, 3, 2)).astype(np.float16)
    scales[..., 1] = rng.integers(-5, 260, (16, 3))
    plain = rng.standard_normal(640).astype(BF16)
    outs = {"whole": 320, "parts": 192, "values": 320, "four": 128}
    return {
        "codes": rng.integers(0, 256, 640, np.uint8),
        "plain": pattern(plain),
        "scales": pattern(scales.reshape(-1)),
        **{name: np.zeros(count, np.uint32) for name, count in outs.items()},
    }


def _take(arrays: Arrays) -> dict[str, Wanted]:
    block = np.arange(40) // 16
    scales = arrays["scales"].view(np.float16).astype(np.float32).reshape(16, 3, 2)[:, block]
    codes = arrays["codes"].astype(np.float32).reshape(16, 40)
    values = (codes - scales[..., 1]) * scales[..., 0]
    plain = arrays["plain"].view(BF16).astype(np.float32).reshape(16, 40)
    four = np.concatenate([values[2 * (i % 8) + 1, i // 8 * 4 :][:4] for i in range(32)])
    return {
        "whole": floats(values[:8].reshape(-1)),
        "parts": floats(np.ascontiguousarray(values[:8, 16:]).reshape(-1)),
        "values": floats(plain[:8].reshape(-1)),
        "four": floats(four),
    }


# Numbers ------------------------------------------------------------------------------------------------------------


def _numbers_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(112)
    x = np.exp2(rng.uniform(-100, 100, 256)).astype(np.float32)
    x[:8] = [1.0, 4.0, 0.25, 2.0**-126, 3.0, 2.0**100, np.nan, -1.0]
    pairs = rng.integers(-100, 101, (32, 2, 2)).astype(np.float32)
    return {
        "in": pattern(x),
        "pairs": pattern(pairs),
        "rows": pattern(rng.standard_normal(256).astype(BF16)),
        "roots": np.zeros(256, np.uint32),
        "rotated": np.zeros((32, 2), np.uint32),
        "read": np.zeros((32, 2, 8), np.uint32),
        "eight": np.zeros(256, np.uint16),
        "four": np.zeros((32, 4), np.uint16),
        "visits": np.zeros(41, np.uint32),
        "normed": np.zeros(320, np.uint32),
    }


def _numbers(arrays: Arrays) -> dict[str, Wanted]:
    x = arrays["in"].view(np.float32)
    with np.errstate(invalid="ignore"):
        roots = x.astype(np.float64) ** -0.5
    (a, b), (cos, sin) = np.moveaxis(arrays["pairs"].view(np.float32), 0, -1)
    rows = arrays["rows"].view(BF16).astype(np.float32)
    normed = np.stack([rows[16 * h :][:40] for h in range(8)]).astype(np.float64)
    factors = ((normed[:, :24] ** 2).mean(axis=1, keepdims=True) + EPS) ** -0.5
    normed[:, :24] *= factors * (rows[:24].astype(np.float64) + 1)
    return {
        "roots": Wanted(pattern(roots.astype(np.float32)), ROOT, roots[:, None]),
        "rotated": floats(np.stack([a * cos - b * sin, b * cos + a * sin], axis=-1), any_zero=True),
        "read": floats(np.stack([x.reshape(32, 8), rows.reshape(32, 8)], axis=1)),
        "eight": exact(arrays["rows"]),
        "four": exact(pattern(rows.reshape(32, 8)[:, :4].astype(np.float16))),
        "visits": exact(np.array([5] * 40 + [0], np.uint32)),
        "normed": Wanted(
            pattern(normed.astype(np.float32).reshape(-1)), Rule("f32", relative=2.0**-21), normed.reshape(-1, 1)
        ),
    }


def probes() -> list[Probe]:
    """All of this module."""
    return [
        *(Probe(f"library_{k}", UNIT, k, partial(_inputs, f), partial(_wanted, f), 32) for k, f in FORMS.items()),
        Probe("library_heads_take", UNIT, "heads_take", _take_inputs, _take, 32),
        Probe("library_heads_numbers", UNIT, "heads_numbers", _numbers_inputs, _numbers, 32),
    ]
