"""What the steps of calibrate.cu's instructions come to: for each kernel of one instruction its operands and its values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

UNROLL: Final = 16  # steps a trip
_ONE: Final = 0x3F800000
_HALVES: Final = 0x3C003C00


@dataclass(frozen=True)
class Pipe:
    """A kernel of `measure`: its operands, its chains side by side, and the values of `lane` and `chain` after n steps."""

    entry: str
    chains: int
    value: Callable[[NDArray[np.int64], NDArray[np.int64], int], NDArray[Any]]
    a: int = 0
    b: int = 0
    each: int = 1  # instructions a step


def affine(n: int, factor: int, more: int) -> tuple[int, int]:
    """n times x -> factor x + more, modulo 2^32."""
    found, power = (1, 0), (factor, more)
    while n:
        if n & 1:
            found = (found[0] * power[0] & 0xFFFFFFFF, (found[1] * power[0] + power[1]) & 0xFFFFFFFF)
        power = (power[0] * power[0] & 0xFFFFFFFF, (power[1] * power[0] + power[1]) & 0xFFFFFFFF)
        n >>= 1
    return found


def _permuted(lane: Any, chain: Any, n: int) -> Any:
    x, by = 0x03020100 + lane + chain, n % 3 * 8
    low = x & 0xFFFFFF
    return x & 0xFF000000 | (low >> by | low << (24 - by)) & 0xFFFFFF


def _imad(lane: Any, chain: Any, n: int) -> Any:
    factor, more = affine(n, 1664525, 1013904223)
    return ((lane + chain) * factor + more) & 0xFFFFFFFF


def _exp2(lane: Any, chain: Any, n: int) -> Any:
    x = ((lane + chain) / 64).astype(np.float32)
    for _ in range(min(n, 64)):
        x = np.exp2(-x)
    return (x * np.float32(65536)).astype(np.int64)


def _to_half(lane: Any, chain: Any, n: int) -> Any:
    x = (0x3F800000 + ((lane + chain) << 16)).astype(np.uint32)
    for _ in range(min(n, 8)):  # the same from then on
        x = x.view(np.float32).astype(np.float16).view(np.uint16).astype(np.uint32) | np.uint32(0x3C000000)
    return x.astype(np.int64)


def _half_bits(n: int) -> int:
    return int(np.float16(n).view(np.uint16))


def circle(n: int) -> int:
    """The place of a constant after n steps, in bytes."""
    return 4 * (7 * n % 61)


PIPES: Final[dict[str, Pipe]] = {
    "fma": Pipe("fma", 8, lambda lane, chain, n: lane + chain + n, _ONE, _ONE),
    "half": Pipe("half", 8, lambda lane, chain, n: 0 * (lane + chain) + _half_bits(n) * 0x10001, _HALVES, _HALVES),
    "permute": Pipe("permute", 8, _permuted, 0x3021),
    "imad": Pipe("imad", 8, _imad, 1664525, 1013904223),
    "exp2": Pipe("exp2", 8, _exp2),
    "floor": Pipe("floor", 8, lambda lane, chain, n: 2 * (lane + chain)),
    "to_half": Pipe("to_half", 8, _to_half, _ONE),
    "fp8": Pipe("fp8", 8, lambda lane, chain, n: 0x3011 + lane + chain * 256, each=2),
    "shuffle": Pipe("shuffle", 8, lambda lane, chain, n: (np.where(lane < 31, (lane + n) % 31, lane) ** 2 + chain) * (lane + 1)),
    "lds": Pipe("lds", 8, lambda lane, chain, n: 4 * (lane + n % 3 * 32) + 0 * chain),
    "ldsm": Pipe("ldsm", 4, lambda lane, chain, n: 512 * (n % 3) + 19 * lane + 192 + 384 * ((n - 1) % 3) + 0 * chain),
    "hmma": Pipe("hmma", 4, lambda lane, chain, n: 4 * (lane + chain + 16 * n), _HALVES, _HALVES),
    "ldc": Pipe("ldc", 1, lambda lane, chain, n: circle(n) + 0 * (lane + chain)),
    "barrier": Pipe("barrier", 1, lambda lane, chain, n: lane + n + 0 * chain),
}  # fmt: skip
