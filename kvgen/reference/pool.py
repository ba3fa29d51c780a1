"""Logical arrays and the raw memory of a pool: NumPy transpose and reshape of the axes that a layout's text names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvgen.spec.cache import Cache

Raw = NDArray[Any]


def _factor(word: str) -> tuple[str, int]:
    """An axis and how far one step along it goes: dim/8 -> ("dim", 8), dim%8 -> ("dim", 1), dim/8%4 -> ("dim", 8)."""
    name, _, divide = word.partition("%")[0].partition("/")
    return ("page" if name == "block" else name), int(divide or 1)


class Rows:
    """K or V of one layer, token by token; views of the pool's memory, which `write` changes.

    `array` is a tensor whose dimensions are the words of `axes` in their order ("page kv layer token head dim",
    "block head dim/8 token dim%8", ...), with any strides. `layer` and `kv` choose along the axes of those names.
    `heads` and `dim` are the extents of a row, also where the text leaves out an axis of extent 1. `swizzle` = (bits,
    base, shift): the element at offset o of a page lies at `o ^ ((o >> (base + shift)) % 2^bits << base)`.
    """

    def __init__(
        self,
        array: Raw,
        axes: str,
        *,
        heads: int,
        dim: int,
        layer: int = 0,
        kv: int = 0,
        swizzle: tuple[int, int, int] | None = None,
    ) -> None:
        words = [_factor(w) for w in axes.split()]
        if array.ndim != len(words):
            raise ValueError(f"array: got {array.ndim} dimensions for the axes {axes!r}")
        for name, index in (("layer", layer), ("kv", kv)):
            if (name, 1) in words:
                at = words.index((name, 1))
                array = array.take([index], at) if array.size == 0 else array[(slice(None),) * at + (index,)]
                words.pop(at)
        page = words.index(("page", 1))
        # A logical axis is its factors from the largest step to the smallest.
        order = [i for name in ("token", "head", "dim") for i, _ in _descending(words, name)]
        self.heads, self.dim = heads, dim
        self._view = array.transpose([page, *order])
        token_factors = len(_descending(words, "token"))
        self._token_shape = self._view.shape[1 : 1 + token_factors]
        self._row_shape = self._view.shape[1 + token_factors :]
        self.pages, self.tokens = self._view.shape[0], math.prod(self._token_shape)
        if math.prod(self._row_shape) != heads * dim:
            raise ValueError(f"array: got rows of {self._row_shape}, not {heads} heads of {dim}")
        self._places: NDArray[np.int64] | None = None
        if swizzle is not None:
            self._swizzle(array, page, order, swizzle)

    def _swizzle(self, array: Raw, page: int, order: Sequence[int], swizzle: tuple[int, int, int]) -> None:
        inner = np.moveaxis(array, page, 0)
        size = math.prod(inner.shape[1:])
        steps = np.cumprod((inner.itemsize, *inner.shape[:0:-1]))[:-1][::-1]
        if inner.strides[1:] != tuple(int(s) for s in steps):
            raise ValueError(
                f"swizzle: got a page with strides {inner.strides[1:]} bytes; its elements must be neighbours"
            )
        bits, base, shift = swizzle
        offsets = np.arange(size, dtype=np.int64)
        moved = offsets ^ ((offsets >> (base + shift)) % 2**bits << base)
        # moved[o] in the order of the page's own axes, then of token, head, dim.
        axes = [o - (o > page) for o in order]
        self._places = moved.reshape(inner.shape[1:]).transpose(axes).reshape(self.tokens, self.heads, self.dim)
        self._flat = as_strided(inner, (inner.shape[0], size), (inner.strides[0], inner.itemsize))

    def read(self, page: int, token: int) -> Raw:
        """The row `[heads, dim]` of one token, a copy."""
        if self._places is not None:
            return np.asarray(self._flat[page][self._places[token]])
        return np.array(self._view[self._index(page, token)]).reshape(self.heads, self.dim)

    def write(self, page: int, token: int, row: Raw) -> None:
        """Store `row` `[heads, dim]`, of the pool's dtype, as one token."""
        if self._places is not None:
            self._flat[page][self._places[token]] = row
        else:
            self._view[self._index(page, token)] = row.reshape(self._row_shape)

    def logical(self) -> Raw:
        """All of it, `[page, token, head, dim]`, a copy."""
        shape = (self.pages, self.tokens, self.heads, self.dim)
        if self._places is not None:
            return np.asarray(self._flat[:, self._places])
        return self._view.reshape(shape).copy()

    def _index(self, page: int, token: int) -> tuple[int, ...]:
        factors = np.unravel_index(token, self._token_shape) if self._token_shape else ()
        return (page, *(int(i) for i in factors))


def _descending(words: Sequence[tuple[str, int]], name: str) -> list[tuple[int, int]]:
    """(dimension, step) of the factors of one axis, largest step first."""
    return sorted(((i, step) for i, (n, step) in enumerate(words) if n == name), key=lambda found: -found[1])


def cache_rows(cache: Cache, pools: Sequence[Raw | Sequence[Raw]], layer: int) -> tuple[Rows, ...]:
    """(K,) or (K, V) of one layer.

    `pools` are the tensors as a generated `Cache` takes them: one for layout.kv, or K's and V's; each a list of one
    tensor a layer where layout.layers is "pointers".
    """
    layout = cache.layout
    texts = [layout.kv] if layout.kv is not None else [t for t in (layout.k, layout.v) if t is not None]
    found: list[Rows] = []
    for role in range(1 if cache.stores == "k" else 2):
        place = min(role, len(texts) - 1)
        text, given = texts[place], pools[place]
        assert text is not None
        array = given if isinstance(given, np.ndarray) else given[layer]
        dim = cache.head_dim if role == 0 else cache.v_dim
        found.append(Rows(array, text, heads=cache.kv_heads, dim=dim, layer=layer, kv=role, swizzle=layout.swizzle))
    return tuple(found)
