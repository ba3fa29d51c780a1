"""The parts of a row: dims stored as they are, and dims stored as codes with a scale a block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.elements import Elements, Raw
from kvgen.reference.quant import choose, dequantize, quantize
from kvgen.reference.tables import Place
from kvgen.spec.quant import Quant

# Scale and zero of a block, each an array without dimensions; None where there is none.
Chosen = tuple[Raw | None, Raw | None]


@dataclass(frozen=True)
class Plain:
    """Dims in the cache's dtype, copied bit for bit."""

    elements: Elements

    @property
    def heads(self) -> int:
        return self.elements.heads

    @property
    def dim(self) -> int:
        return self.elements.dim

    @property
    def pages(self) -> int:
        return self.elements.pages

    @property
    def tokens(self) -> int:
        return self.elements.tokens

    def read(self, place: Place, token: int) -> Raw:
        """`[heads, dim]` in the cache's dtype."""
        return self.elements.read(place.page, token)

    def numbers(self, place: Place, token: int) -> NDArray[np.float64]:
        """`[heads, dim]`, exactly."""
        return self.read(place, token).astype(np.float64)

    def write(self, place: Place, first: int, rows: Raw) -> None:
        """`rows` `[T, heads, dim]` are the tokens from `first`."""
        for i, row in enumerate(rows):
            self.elements.write(place.page, first + i, row)


@dataclass(frozen=True)
class Coded:
    """Dims stored as codes.

    `codes` are bytes, or nibbles where the type is packed. `block` says how many tokens, heads and dims share a scale; the
    last block along dim is shorter where it does not divide. Computed scales lie in `scales`, rows of
    `[blocks of heads, blocks of dims]` a block of tokens, two places a block with a zero point: scale, zero. Given ones are
    the array `given` `[blocks of heads, blocks of dims]`. `global_scale` is the f32 factor of recipe "global", `kind` the
    cache's dtype.
    """

    quant: Quant
    block: tuple[int, int, int]
    codes: Elements
    scales: Elements | None
    given: Raw | None
    global_scale: float | None
    kind: np.dtype[Any]

    @property
    def heads(self) -> int:
        return self.codes.heads

    @property
    def dim(self) -> int:
        return self.codes.dim

    @property
    def pages(self) -> int:
        return self.codes.pages

    @property
    def tokens(self) -> int:
        return self.codes.tokens

    def numbers(self, place: Place, token: int) -> NDArray[np.float64]:
        """`[heads, dim]` dequantized, rounded to f32 and no further."""
        codes, found = self.codes.read(place.page, token), np.zeros((self.heads, self.dim))
        scales = self.scales.read(place.scales, token // self.block[0]) if self.scales else None
        for i, g, heads, dims in self._blocks():
            scale, zero = self._stored(scales, i, g)
            found[heads, dims] = dequantize(
                codes[heads, dims],
                _spread(scale),
                _spread(zero),
                self.quant.dtype,
                self.quant.recipe,
                "f32",
                self.global_scale,
            )
        return found

    def read(self, place: Place, token: int) -> Raw:
        """`[heads, dim]` in the cache's dtype: dequantized in f32, then rounded once."""
        with np.errstate(over="ignore"):
            return self.numbers(place, token).astype(np.float32).astype(self.kind)

    def write(self, place: Place, first: int, rows: Raw) -> None:
        """`rows` `[T, heads, dim]` are the tokens from `first`; where scales are computed, all that share them."""
        x, codes = rows.astype(np.float32), np.zeros(rows.shape, np.uint8)
        tokens, scales = self.block[0], None
        if self.scales is not None:
            if len(rows) != tokens or first % tokens:
                raise ValueError(f"rows: got {len(rows)} from token {first} on where {tokens} tokens share a scale")
            scales = self.scales.read(place.scales, first // tokens)
        for i, g, heads, dims in self._blocks():
            block = x[:, heads, dims].reshape(1, -1)
            if scales is None:
                scale, zero = self._stored(None, i, g)
            else:
                scale, zero = self._chosen(block)
                places = scales[i, g : g + 1] if zero is None else scales[i, 2 * g : 2 * g + 2]
                places[:] = [scale] if zero is None else [scale, zero]
            found = quantize(
                block, _spread(scale), _spread(zero), self.quant.dtype, self.quant.recipe, self.global_scale
            )
            codes[:, heads, dims] = found.reshape(codes[:, heads, dims].shape)
        for i, row in enumerate(codes):
            self.codes.write(place.page, first + i, row)
        if self.scales is not None and scales is not None:
            self.scales.write(place.scales, first // tokens, scales)

    def _blocks(self) -> Iterator[tuple[int, int, slice, slice]]:
        """(block of heads, block of dims, its heads, its dims) of every block of a token."""
        _, heads, dims = self.block
        for i, head in enumerate(range(0, self.heads, heads)):
            for g, dim in enumerate(range(0, self.dim, dims)):
                yield i, g, slice(head, head + heads), slice(dim, min(dim + dims, self.dim))

    def _stored(self, scales: Raw | None, i: int, g: int) -> Chosen:
        """Scale and zero of a block as they lie in memory."""
        if self.given is not None:
            return self.given[i, g], None
        if scales is None:
            return None, None
        return (scales[i, 2 * g], scales[i, 2 * g + 1]) if self.quant.zero else (scales[i, g], None)

    def _chosen(self, block: NDArray[np.float32]) -> Chosen:
        quant = self.quant
        assert quant.scale_dtype is not None
        scale, zero = choose(block, quant.dtype, quant.scale_dtype, quant.recipe, quant.zero, self.global_scale)
        return scale[0], None if zero is None else zero[0]


def _spread(one: Raw | None) -> Raw | None:
    """A block's scale as `quantize` and `dequantize` take it, for rows of the block."""
    return None if one is None else np.asarray(one)[None]


Part = Plain | Coded
