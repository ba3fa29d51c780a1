"""Logical arrays and raw memory: NumPy transpose and reshape of the axes that a layout's text names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvgen.reference.quant import pack_codes, unpack_codes

Raw = NDArray[Any]
OUTER = ("page", "kv", "layer")


class Word(NamedTuple):
    """One axis as a layout's text writes it: dim/8 is a step of 8 dims, dim%8 counts 8 of them, dim/8%4 does both."""

    name: str
    step: int
    modulo: int  # 0: no remainder is taken

    def extent(self, whole: int) -> int:
        """How many places the axis has where the whole logical one has `whole`."""
        return self.modulo or whole // self.step


def words(axes: str) -> list[Word]:
    """The axes of a layout's text, "block" being a page."""
    found = []
    for text in axes.split():
        rest, _, modulo = text.partition("%")
        name, _, step = rest.partition("/")
        found.append(Word("page" if name == "block" else name, int(step or 1), int(modulo or 0)))
    return found


class Elements:
    """One kind of element of one layer's pages, row by row: values, codes or scales; a view that `write` writes through.

    `array` is a tensor whose dimensions are the words of `axes` in their order ("page kv layer token head dim",
    "block head dim/8 token dim%8", ...), with any strides. `layer` and `kv` choose along the axes of those names.
    `heads` and `dim` are the extents of a row, also where the text leaves out an axis of extent 1. `packed` bits (0: none) say
    that the last axis holds bytes of elements of so many bits, from the lowest bit up; rows are then their bits as numbers.
    `strided`: those of a byte stand a row's bytes apart.
    `swizzle` = (bits, base, shift): the element at offset o of a page lies at `o ^ ((o >> (base + shift)) % 2^bits << base)`.
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
        packed: int = 0,
        strided: bool = False,
    ) -> None:
        left = [(w.name, w.step) for w in words(axes)]
        if array.ndim != len(left):
            raise ValueError(f"array: got {array.ndim} dimensions for the axes {axes!r}")
        for name, index in (("layer", layer), ("kv", kv)):
            if (name, 1) in left:
                at = left.index((name, 1))
                array = array[(slice(None),) * at + (index,)]
                left.pop(at)
        page = left.index(("page", 1))
        # A logical axis is its factors from the largest step to the smallest.
        order = [i for name in ("token", "head", "dim") for i, _ in _descending(left, name)]
        self.heads, self.dim, self.packed, self.strided = heads, dim, packed, strided
        self._view = array.transpose([page, *order])
        token_factors = len(_descending(left, "token"))
        self._token_shape = self._view.shape[1 : 1 + token_factors]
        self._row_shape = self._view.shape[1 + token_factors :]
        self._width = dim * packed // 8 if packed else dim
        self.pages: int = self._view.shape[0]
        self.tokens: int = math.prod(self._token_shape)
        if math.prod(self._row_shape) != heads * self._width or dim * packed % 8:
            raise ValueError(f"array: got rows of {self._row_shape}, not {heads} heads of {dim}")
        self._places: NDArray[np.int64] | None = None
        if swizzle is not None:
            self._swizzle(array, page, order, swizzle)

    def _swizzle(self, array: Raw, page: int, order: Sequence[int], swizzle: tuple[int, int, int]) -> None:
        inner = np.moveaxis(array, page, 0)
        steps = np.cumprod((inner.itemsize, *inner.shape[:0:-1]))[:-1][::-1]
        if inner.strides[1:] != tuple(int(s) for s in steps):
            raise ValueError(
                f"swizzle: got a page with strides {inner.strides[1:]} bytes; its elements must be neighbours"
            )
        bits, base, shift = swizzle
        each = 8 // (self.packed or 8)
        shape = (*inner.shape[1:-1], inner.shape[-1] * each)
        offsets = np.arange(math.prod(shape), dtype=np.int64)
        moved = offsets ^ ((offsets >> (base + shift)) % 2**bits << base)
        # moved[o] in the order of the page's own axes, then of token, head, dim.
        axes = [o - (o > page) for o in order]
        places = moved.reshape(shape).transpose(axes).reshape(self.tokens, self.heads, self.dim)
        if self.packed:
            first = places[..., 0::each]
            if (first % each).any() or any((places[..., i::each] != first + i).any() for i in range(each)):
                raise ValueError(f"swizzle: {swizzle} tears the elements of a byte apart")
            places = first // each
        self._places = places
        size = math.prod(inner.shape[1:])
        self._flat = as_strided(inner, (inner.shape[0], size), (inner.strides[0], inner.itemsize))

    def as_stored(self, rows: Raw) -> Raw:
        """Rows `[..., dim]` as memory has them: packed codes in bytes."""
        return pack_codes(rows, self.packed, self.strided) if self.packed else rows

    def unpacked(self, rows: Raw) -> Raw:
        """The inverse of `as_stored`."""
        return unpack_codes(rows, self.packed, self.strided) if self.packed else rows

    def read(self, page: int, token: int) -> Raw:
        """The row `[heads, dim]` of one token, a copy."""
        if self._places is not None:
            row = np.asarray(self._flat[page][self._places[token]])
        else:
            row = np.array(self._view[self._index(page, token)]).reshape(self.heads, self._width)
        return self.unpacked(row)

    def write(self, page: int, token: int, row: Raw) -> None:
        """Store `row` `[heads, dim]`, of the tensor's dtype, as one token."""
        row = self.as_stored(row)
        if self._places is not None:
            self._flat[page][self._places[token]] = row
        else:
            self._view[self._index(page, token)] = row.reshape(self._row_shape)

    def read_run(self, page: int, first: int, count: int) -> Raw:
        """The rows `[T, heads, dim]` of `count` tokens from `first`, a copy."""
        if self._places is not None or len(self._token_shape) != 1:
            rows = [self.read(page, token) for token in range(first, first + count)]
            return np.stack(rows) if rows else np.zeros((0, self.heads, self.dim), self._view.dtype)
        found = np.array(self._view[page, first : first + count]).reshape(count, self.heads, self._width)
        return self.unpacked(found)

    def write_run(self, page: int, first: int, rows: Raw) -> None:
        """Store `rows` `[T, heads, dim]` as the tokens from `first`."""
        if self._places is not None or len(self._token_shape) != 1:
            for i, row in enumerate(rows):
                self.write(page, first + i, row)
            return
        own = self.as_stored(rows)
        self._view[page, first : first + len(rows)] = own.reshape(len(rows), *self._row_shape)

    def logical(self) -> Raw:
        """All of it, `[page, token, head, dim]`, a copy."""
        rows = [[self.read(page, token) for token in range(self.tokens)] for page in range(self.pages)]
        return np.array(rows).reshape(self.pages, self.tokens, self.heads, self.dim)

    def _index(self, page: int, token: int) -> tuple[int, ...]:
        if len(self._token_shape) == 1:
            return page, token
        factors = np.unravel_index(token, self._token_shape) if self._token_shape else ()
        return (page, *(int(i) for i in factors))


class Padded(Elements):
    """The same, of which the last `pad` along dim are no elements: they are written as zeros and not read."""

    def __init__(self, array: Raw, axes: str, *, pad: int, dim: int, **more: Any) -> None:
        super().__init__(array, axes, dim=dim + pad, **more)
        self.dim, self.pad = dim, pad

    def read(self, page: int, token: int) -> Raw:
        return super().read(page, token)[:, : self.dim]

    def write(self, page: int, token: int, row: Raw) -> None:
        super().write(page, token, _zeros_behind(row, self.pad))

    def read_run(self, page: int, first: int, count: int) -> Raw:
        return super().read_run(page, first, count)[..., : self.dim]

    def write_run(self, page: int, first: int, rows: Raw) -> None:
        super().write_run(page, first, _zeros_behind(rows, self.pad))


def _zeros_behind(rows: Raw, pad: int) -> Raw:
    """`rows` with so many bytes' worth of zero bits behind each."""
    zeros = np.zeros((*rows.shape[:-1], pad * rows.itemsize), np.uint8).view(rows.dtype)
    return np.concatenate([rows, zeros], axis=-1)


def _descending(left: Sequence[tuple[str, int]], name: str) -> list[tuple[int, int]]:
    """(dimension, step) of the factors of one axis, largest step first."""
    return sorted(((i, step) for i, (n, step) in enumerate(left) if n == name), key=lambda found: -found[1])


def typed(array: Raw, kind: np.dtype[Any]) -> Raw:
    """The same memory as elements of `kind`, which are as wide as the array's."""
    return array if array.dtype == kind else array.view(kind)


def cut(array: Raw, begin: int, shape: Mapping[str, int] | Sequence[int], kind: np.dtype[Any]) -> Raw:
    """From byte `begin` of every run of bytes along the last axis: elements of `kind` in the given shape, a view."""
    sizes = tuple(shape.values()) if isinstance(shape, Mapping) else tuple(shape)
    count = math.prod(sizes)
    run = array.view(np.uint8)[..., begin : begin + count * kind.itemsize].view(kind)
    if run.shape[-1] != count:
        raise ValueError(f"array: got runs of {array.shape[-1]} bytes, too few for {count} elements at byte {begin}")
    found = run.reshape(*run.shape[:-1], *sizes)
    assert not found.size or np.may_share_memory(found, array)  # a copy lies elsewhere; exactly is slow
    return found


def without_dim(axes: str, block: tuple[int, int, int]) -> str:
    """The axes of a tensor of scales beside values of `axes`: the same, groups of dims last.

    dim's factors go; token and head are counted in blocks, in one piece where a block has more than one of them.
    """
    kept: list[str] = []
    for text in axes.split():
        name = text.partition("%")[0].partition("/")[0]
        if name == "dim":
            continue
        several = (name == "token" and block[0] != 1) or (name == "head" and block[1] != 1)
        text = name if several else text
        if text not in kept:
            kept.append(text)
    return " ".join([*kept, "dim"])


def in_tiles(axes: str) -> str:
    """The axes of scales in the 128 x 4 tiles of block-scaled tensor-core instructions: a page's tiles, then the 32 rows
    of four tokens that stand 32 apart, then those four, then four groups."""
    outer = [t for t in axes.split() if t in (*OUTER, "block")]
    heads = [t for t in axes.split() if t.startswith("head")]
    return " ".join([*outer, *heads, "token/128 dim/4 token%32 token/32%4 dim%4"])
