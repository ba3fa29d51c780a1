"""RoPE, in float64 but for the angle, whose f32 roundings are part of what a model means.

The frequencies are computed here anew from a rope's facts, in NumPy: kvgen.lowering.frequencies is what they check.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.rounding import ulp
from kvgen.schema.model import LinearScaling, Llama3Scaling, LongRopeScaling, Rope, YarnScaling

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]
Part = Literal["first", "last"]
ONE = np.float32(1)


@dataclass(frozen=True)
class Table:
    """cos and sin of every position, `[P, d]` for d rotated elements, whatever they were multiplied by included.

    "halves": d / 2 cosines, then d / 2 sines (vLLM's `cos_sin_cache`). "pairs": cosine and sine of pair 0, then of pair 1
    (MAX's `freqs_cis`).
    """

    values: NDArray[Any]
    form: Literal["halves", "pairs"]

    def read(self, positions: NDArray[Any], pair: int) -> tuple[Floats, Floats]:
        """cos and sin of one pair; raises IndexError for a position that the table does not have."""
        if ((positions < 0) | (positions >= len(self.values))).any():
            raise IndexError(f"positions: got {positions.min()} to {positions.max()} for {len(self.values)} rows")
        half = self.values.shape[1] // 2
        cos, sin = (pair, half + pair) if self.form == "halves" else (2 * pair, 2 * pair + 1)
        return self.values[positions, cos].astype(np.float64), self.values[positions, sin].astype(np.float64)


def frequencies(rope: Rope, dims: int, *, local: bool = False, long: bool = False) -> Singles:
    """Radians a position of each of dims / 2 pairs, as transformers computes them in f32. Of a proportional rope `dims` are the
    whole head's, and the pairs behind the first rope.dim / 2 have 0."""
    if rope.proportional:
        assert rope.dim is not None
        whole = frequencies(rope.model_copy(update={"proportional": False}), dims)
        return np.where(np.arange(dims // 2) < rope.dim // 2, whole, np.float32(0))
    theta, scaling = rope.theta, rope.scaling
    if local and rope.local_theta is not None:
        theta, scaling = rope.local_theta, None
    exponents = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    powers = np.power(np.float64(np.float32(theta)), exponents.astype(np.float64)).astype(np.float32)
    plain: Singles = ONE / powers
    if isinstance(scaling, LinearScaling):
        linear: Singles = plain / np.float32(scaling.factor)
        return linear
    if isinstance(scaling, LongRopeScaling):
        factors = np.array(scaling.long_factor if long else scaling.short_factor, np.float32)
        stretched: Singles = ONE / (factors * powers)
        return stretched
    if isinstance(scaling, YarnScaling):
        ends = [
            dims * math.log(scaling.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))
            for rotations in (scaling.beta_fast, scaling.beta_slow)
        ]
        if scaling.truncate:
            ends = [math.floor(ends[0]), math.ceil(ends[1])]
        low, high = max(ends[0], 0), min(ends[1], dims - 1)
        width = high - low if high != low else high + 0.001 - low
        ramp = np.clip((np.arange(dims // 2, dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)
        kept = ONE - ramp.astype(np.float32)
        ramped: Singles = ONE / (np.float32(scaling.factor) * powers) * (ONE - kept) + plain * kept
        return ramped
    if isinstance(scaling, Llama3Scaling):
        n, factor = scaling.original_max_positions, np.float32(scaling.factor)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        waves = (ONE / plain) * np.float32(2 * math.pi)
        long_waves, short_waves = waves > np.float32(n / low), waves < np.float32(n / high)
        if low == high:  # no band between them
            return np.where(long_waves, plain / factor, plain).astype(np.float32)
        blend = ((ONE / waves) * np.float32(n) - np.float32(low)) / np.float32(high - low)
        between = (ONE - blend) * plain / factor + blend * plain
        return np.where(long_waves, plain / factor, np.where(short_waves, plain, between)).astype(np.float32)
    return plain


def magnitude(rope: Rope, *, local: bool = False) -> float:
    """Factor of cos and sin."""
    scaling = None if local and rope.local_theta is not None else rope.scaling
    if isinstance(scaling, LongRopeScaling) and scaling.attention_factor is None:
        stretch = scaling.max_positions / scaling.original_max_positions
        return 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(scaling.original_max_positions))
    if isinstance(scaling, YarnScaling) and scaling.attention_factor is None:
        up, down = (scaling.mscale, scaling.mscale_all_dim) if scaling.mscale and scaling.mscale_all_dim else (1.0, 0.0)
        return (0.1 * up * math.log(scaling.factor) + 1) / (0.1 * down * math.log(scaling.factor) + 1)
    if isinstance(scaling, YarnScaling | LongRopeScaling):
        assert scaling.attention_factor is not None
        return scaling.attention_factor
    return 1.0


def pairs(rope: Rope, dim: int, *, dims: int | None = None, part: Part | None = None) -> list[tuple[int, int]]:
    """The two elements of each pair, of a head of `dim`; see `rotate`. A proportional rope pairs the whole head."""
    dims = dim if rope.proportional else dims or rope.dim or dim
    if dims % 2 or dims > dim:
        raise ValueError(f"dims: got {dims} rotated elements of {dim}")
    begin = dim - dims if (part or rope.part) == "last" else 0
    half, step, distance = dims // 2, *((1, dims // 2) if rope.style == "neox" else (2, 1))
    return [(begin + i * step, begin + i * step + distance) for i in range(half)]


def rotate(
    x: NDArray[Any],
    positions: NDArray[Any],
    rope: Rope,
    *,
    cos_sin: Table | None = None,
    sections: Sequence[int] | None = None,
    sections_order: Literal["runs", "interleaved"] = "runs",
    dims: int | None = None,
    part: Part | None = None,
    local: bool = False,
    long: bool = False,
) -> Floats:
    """x `[T, heads, dim]` at positions `[T]` -> `[T, heads, dim]`, not rounded: the caller rounds to what it stores.

    Pair i's elements (a, b) become (a cos - b sin, b cos + a sin). The angle is f32(position) * f32(frequency), rounded to
    f32 as transformers does; its cosine and sine are exact, times `magnitude`. `cos_sin` has them instead, factor included.
    With `sections` (M-RoPE; they sum to the number of pairs that rotate) positions are `[len(sections), T]`, and a pair takes
    the row of the section that holds it (Qwen2-VL), or, "interleaved" (Qwen3-VL), that of `_interleaved`. `dims` and `part`
    are where a row differs from the rope's own facts (latent rows: the last 64). `local` and `long` choose among its
    frequencies.
    """
    found = x.astype(np.float64)
    two = pairs(rope, x.shape[2], dims=dims, part=part)
    rotary_pairs = rope.dim // 2 if rope.proportional and rope.dim is not None else len(two)
    if sections is not None and (sum(sections) != rotary_pairs or len(positions) != len(sections)):
        raise ValueError(
            f"sections: got {list(sections)} of {len(positions)} rows of positions for {rotary_pairs} pairs"
        )
    if sections is None:
        rows = [0] * rotary_pairs
    elif sections_order == "interleaved":
        rows = [_interleaved(i, sections) for i in range(rotary_pairs)]
    else:
        rows = np.repeat(np.arange(len(sections)), sections).tolist()
    given = np.asarray(positions).reshape(1 if sections is None else len(sections), len(x))
    factor = magnitude(rope, local=local)
    speeds = None if cos_sin is not None else frequencies(rope, 2 * len(two), local=local, long=long)
    for i, (a, b) in enumerate(two[:rotary_pairs]):
        at = given[rows[i]]
        if speeds is None:
            assert cos_sin is not None
            cos, sin = cos_sin.read(at, i)
        else:
            angle = (at.astype(np.float32) * speeds[i]).astype(np.float64)
            cos, sin = np.cos(angle) * factor, np.sin(angle) * factor
        first, second = x[..., a].astype(np.float64), x[..., b].astype(np.float64)
        found[..., a] = first * cos[:, None] - second * sin[:, None]
        found[..., b] = second * cos[:, None] + first * sin[:, None]
    return found


def _interleaved(pair: int, sections: Sequence[int]) -> int:
    """The section of a pair in transformers' order for Qwen3-VL: the frequencies of time, of which every third pair from 1 on,
    below 3 * sections[1], is overwritten by height's, and every third from 2 on, below 3 * sections[2], by width's."""
    for section in (1, 2):
        if pair in range(section, 3 * sections[section], 3):
            return section
    return 0


def rotate_error(
    x: NDArray[Any], rope: Rope, dtype: np.dtype[Any], *, dims: int | None = None, part: Part | None = None
) -> Floats:
    """How far a kernel's result, rounded to `dtype`, may lie from `rotate`'s, which is not: `[T, heads, dim]`.

    One ulp of `dtype` at the larger of a pair's two elements (times `magnitude`, where that is above 1), and 2^-22 of it for
    what f32 arithmetic loses: 2 to 4 ulp of f32, hardly anything of another dtype. 0 for elements that pass.
    """
    found = np.zeros(x.shape)
    two = pairs(rope, x.shape[2], dims=dims, part=part)
    for a, b in two[: rope.dim // 2] if rope.proportional and rope.dim is not None else two:
        larger = np.maximum(np.abs(x[..., a].astype(np.float64)), np.abs(x[..., b].astype(np.float64)))
        larger *= max(1.0, magnitude(rope))
        found[..., a] = found[..., b] = ulp(larger, dtype) + 2.0**-22 * larger
    return found
