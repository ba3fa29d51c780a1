"""Engines' memory written down by hand: what a user passes, and where the engine itself puts every element and scale.

Addresses are bytes; every buffer of an engine begins at a number of its own. Nothing here reads kvgen's layouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvgen.schema.cache import Cache

Ints = NDArray[np.int64]
View = Callable[[str, int], Ints]
# (kv, layer, page, token, head, dim) -> byte; `value` gives half bytes where codes have 4 bits, bits where it says so.
Place = Callable[[int, int, Ints, Ints, Ints, Ints], Ints]

K, V, KS, VS = 0, 1 << 40, 2 << 40, 3 << 40


@dataclass(frozen=True)
class Sizes:
    """Pages, layers, tokens a page, heads, head dim."""

    n: int
    layers: int
    p: int
    h: int
    d: int


@dataclass(frozen=True)
class Engine:
    """`view(tensor, layer)` is what a user passes, each entry the address of that element; `value` and `scale` are the
    engine's own formulas. `pages` counts the ids they know, `bits` are those of a code; 1: codes narrower than bytes are
    addressed by bits."""

    cache: Cache
    view: View
    value: Place
    scale: Place | None = None
    pages: int = 0
    bits: int = 16


def buffer(start: int, itemsize: int, *shape: int) -> Ints:
    """A row-major array of `shape` whose entries are their own addresses."""
    return start + itemsize * np.arange(math.prod(shape), dtype=np.int64).reshape(shape)


def one(array: Ints) -> View:
    return lambda name, layer: array


def row656(page: int) -> tuple[Place, Place]:
    """512 fp8 | 4 f32 | 64 bf16 a token."""
    return (
        lambda kv, layer, p, t, h, d: K + (p * page + t) * 656 + np.where(d < 512, d, 528 + 2 * (d - 512)),
        lambda kv, layer, p, t, h, d: K + (p * page + t) * 656 + 512 + 4 * (d // 128),
    )


def footer(
    page: int, codes: int, bits: int, plain: int, group: int, each: int, align: int
) -> tuple[View, Place, Place]:
    """Pages of `page` rows, `codes` codes of `bits` bits and `plain` bf16 each, then `each` bytes of scales a row, one byte per
    `group` dims; a page begins a multiple of `align` bytes behind the one before."""
    row = codes * bits // 8 + 2 * plain
    stride = -(-page * (row + each) // align) * align
    half = bits == 4  # such codes are addressed by half bytes

    def value(kv: int, layer: int, p: Ints, t: Ints, h: Ints, d: Ints) -> Ints:
        start = K + p * stride + t * row
        code = 2 * start + d if half else start + d
        return np.where(d < codes, code, start + codes * bits // 8 + 2 * (d - codes))

    def scale(kv: int, layer: int, p: Ints, t: Ints, h: Ints, d: Ints) -> Ints:
        return K + p * stride + page * row + t * each + d // group

    return lambda name, layer: buffer(K, 1, 3, stride)[:, : page * (row + each)], value, scale


def inline(codes: int, bits: int, plain: int, group: int, each: int, page: int) -> tuple[View, Place, Place]:
    """Rows of `codes` codes, `each` bytes of scales and `plain` bf16."""
    at = codes * bits // 8
    row = at + each + 2 * plain
    half = bits == 4

    def value(kv: int, layer: int, p: Ints, t: Ints, h: Ints, d: Ints) -> Ints:
        start = K + (p * page + t) * row
        return np.where(d < codes, 2 * start + d if half else start + d, start + at + each + 2 * (d - codes))

    def scale(kv: int, layer: int, p: Ints, t: Ints, h: Ints, d: Ints) -> Ints:
        return K + (p * page + t) * row + at + d // group

    return lambda name, layer: buffer(K, 1, 3, page, 1, row), value, scale
