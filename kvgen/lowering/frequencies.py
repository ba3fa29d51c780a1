"""The frequencies and factors of RoPE, in the f32 steps in which transformers computes them.

Every step below is one f32 operation of transformers' `modeling_rope_utils` (4 and 5), rounded to nearest, so the numbers
are its `inv_freq` buffers bit for bit wherever PyTorch's theta ** e is the nearest f32. Of 75 000 drawn ones 6 were not
with PyTorch's plain power, each within 2 ulp. Its AVX power, of 1 ulp, misses 1 in 100: those differ by 1 ulp, 2 where
the reciprocal's ulp is the finer one, and up to 5 in llama3's blended band. Buffers made on another machine differ among
themselves as much.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import Final

from kvgen.schema.model import LinearScaling, Llama3Scaling, LongRopeScaling, Rope, YarnScaling

_SINGLE: Final = struct.Struct("<f")


def _f32(x: float) -> float:
    """x rounded to f32. Sums, products and quotients of f32 numbers, computed in f64, round once."""
    found: float = _SINGLE.unpack(_SINGLE.pack(x))[0]
    return found


@functools.lru_cache(maxsize=256)  # one rope has the same ones in every operation and set
def inverse_frequencies(rope: Rope, dims: int, *, local: bool = False, long: bool = False) -> tuple[float, ...]:
    """Radians that each pair of `dims` rotated elements rotates by per position: dims / 2 numbers, each exactly an f32.

    Of a `proportional` rope `dims` are the whole head's, and the numbers are those of its first rope.dim / 2 pairs, which rotate.
    `local` asks for a local layer's (`rope.local_theta`, unscaled, where it is given), `long` for LongRoPE's long factors
    (sequences beyond `original_max_positions`); neither matters to a rope that does not tell them apart. Raises ValueError
    where `dims` is odd, or where LongRoPE has factors for another number of pairs.
    """
    if dims < 2 or dims % 2:
        raise ValueError(f"dims: got {dims}; elements rotate in pairs; give an even number from 2")
    unscaled = local and rope.local_theta is not None
    theta = rope.local_theta if local and rope.local_theta is not None else rope.theta
    rotary_dim = rope.dim if rope.proportional and rope.dim is not None else dims
    powers = [_f32(_f32(theta) ** _f32(i / dims)) for i in range(0, rotary_dim, 2)]
    scaling = None if unscaled else rope.scaling
    if isinstance(scaling, LongRopeScaling):
        return _long_rope(scaling, powers, long=long)
    plain = [_f32(1.0 / power) for power in powers]
    if isinstance(scaling, LinearScaling):
        return tuple(_f32(f / _f32(scaling.factor)) for f in plain)
    if isinstance(scaling, Llama3Scaling):
        return tuple(_llama3(scaling, f) for f in plain)
    if isinstance(scaling, YarnScaling):
        return _yarn(scaling, theta, powers)
    return tuple(plain)


def cos_sin_factor(rope: Rope, *, local: bool = False) -> float:
    """Factor of cos and sin (YaRN, LongRoPE), 1.0 where the rope has no such factor; an f64 number."""
    if local and rope.local_theta is not None:
        return 1.0
    return rope.scaling.cos_sin_factor if isinstance(rope.scaling, YarnScaling | LongRopeScaling) else 1.0


def _long_rope(scaling: LongRopeScaling, powers: list[float], *, long: bool) -> tuple[float, ...]:
    factors = scaling.long_factor if long else scaling.short_factor
    if len(factors) != len(powers):
        raise ValueError(
            f"dims: got {2 * len(powers)} for {len(factors)} factors of LongRoPE; there is one for each pair; "
            f"give {2 * len(factors)}"
        )
    return tuple(_f32(1.0 / _f32(_f32(factor) * power)) for factor, power in zip(factors, powers, strict=True))


def _llama3(scaling: Llama3Scaling, f: float) -> float:
    positions, factor = float(scaling.original_max_positions), _f32(scaling.factor)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = _f32(_f32(1.0 / f) * _f32(2 * math.pi))  # PyTorch divides a number by a tensor in these two steps
    if wavelength > _f32(positions / low):
        return _f32(f / factor)
    if wavelength < _f32(positions / high) or low == high:
        return f
    smooth = _f32(_f32(_f32(_f32(1.0 / wavelength) * _f32(positions)) - _f32(low)) / _f32(high - low))
    return _f32(_f32(_f32(_f32(1.0 - smooth) * f) / factor) + _f32(smooth * f))


def _yarn(scaling: YarnScaling, theta: float, powers: list[float]) -> tuple[float, ...]:
    dims = 2 * len(powers)

    def pair(rotations: float) -> float:
        """The pair, as a fraction, that rotates so often over the original positions."""
        around = math.log(scaling.original_max_positions / (rotations * 2 * math.pi))
        return (dims * around) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    last += 0.001 if first == last else 0
    found = []
    for i, power in enumerate(powers):
        ramp = min(max(_f32(_f32(i - _f32(first)) / _f32(last - first)), 0.0), 1.0)
        kept = _f32(1.0 - ramp)
        stretched = _f32(1.0 / _f32(_f32(scaling.factor) * power))
        found.append(_f32(_f32(stretched * _f32(1.0 - kept)) + _f32(_f32(1.0 / power) * kept)))
    return tuple(found)
