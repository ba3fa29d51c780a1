"""convert: the tokens of one cache, or some of their heads, in another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.elements import Elements, Raw
from kvgen.reference.faults import FaultLog
from kvgen.reference.pool import Rows
from kvgen.reference.segments import Coded, Part, Plain
from kvgen.reference.tables import Place, TableView
from kvgen.runtime.faults import Fault


def convert(
    table: TableView,
    pools: Sequence[Rows],
    source: TableView,
    sources: Sequence[Rows],
    *,
    max_tokens: int | None = None,
    same_scales: bool = False,
    heads: int | None = None,
    source_head: int = 0,
    target_head: int = 0,
) -> int:
    """Store every token that `source` holds by its own lengths in `pools`, where `table` says; returns the error word.

    A request whose length the source's table cannot hold, or of more living tokens than `max_tokens`, is skipped and
    reported at position 0; a token without a valid page on either side is skipped and reported. In rings the last
    `window` tokens of the source's length live.

    Parts that lie alike on both sides are copied as they are if they are plain and of one dtype, or quantized by the same
    rule (codes, block, recipe); those under scales of the caller's only with `same_scales`. All else goes through f32.

    `heads` of every token move, from `source_head` on, and become those from `target_head` on; None: all of them.
    """
    faults = FaultLog()
    for b in range(table.requests):
        n = source.length(b)
        first = 0 if n is None else max(source.first_token(n), table.first_token(n))
        if n is None or not source.holds(b, n) or (max_tokens is not None and n - first > max_tokens):
            faults.add(Fault.LENGTH, b, 0)
            continue
        for position in range(first, n):
            if table.overtaken(position // table.tokens, n):
                continue
            found = source.places(b, position // source.tokens)
            target = table.places(b, position // table.tokens)
            if isinstance(found, Fault):
                faults.add(found, b, position)
                continue
            if isinstance(target, Fault):
                faults.add(target, b, position)
                continue
            for pool, other, to, place in zip(pools, sources, target, found, strict=False):
                count = pool.heads if heads is None else heads
                moved = Moved(slice(source_head, source_head + count), slice(target_head, target_head + count))
                _move(pool, position % table.tokens, to, other, b, position, place, moved, same_scales)
    return faults.word


class Moved(NamedTuple):
    """Heads that move: in the source, and in the cache that is written."""

    source: slice
    target: slice

    def put(self, new: Raw, old: Raw, sharing: int = 1) -> Raw:
        """`old` with the moved ones of `new`; rows are those of `sharing` heads."""
        found = old.copy()
        at, to = (slice(s.start // sharing, -(-s.stop // sharing)) for s in self)
        found[to] = new[at]
        return found


def _move(
    pool: Rows,
    token: int,
    to: Place,
    other: Rows,
    b: int,
    position: int,
    place: Place,
    moved: Moved,
    same_scales: bool,
) -> None:
    numbers = other.token_numbers(b, position, place).astype(np.float32)
    there, begin = position % other.tokens, 0
    for part in pool.parts:
        dims = slice(begin, begin + part.dim)
        twin = _twin(other, begin, part.dim)
        begin += part.dim
        if isinstance(part, Coded) and isinstance(twin, Coded) and _alike(part, twin, same_scales):
            _put(part.codes, to.page, token, twin.codes.read(place.page, there), moved)
            if part.scales is not None and twin.scales is not None:
                _put(part.scales, to.scales, token, twin.scales.read(place.scales, there), moved, part.block[1])
        elif isinstance(part, Plain) and isinstance(twin, Plain) and _dtype(part) == _dtype(twin):
            _put(part.elements, to.page, token, twin.elements.read(place.page, there), moved)
        else:
            _quantize(part, to, token, numbers[:, dims], moved)


def _put(elements: Elements, page: int, token: int, row: Raw, moved: Moved, sharing: int = 1) -> None:
    """Store the heads of a row that move."""
    elements.write(page, token, moved.put(row, elements.read(page, token), sharing))


def _quantize(part: Part, to: Place, token: int, numbers: NDArray[np.float32], moved: Moved) -> None:
    """Store the heads of `numbers` that move as the part stores values; all others keep their bytes."""
    if isinstance(part, Plain):
        with np.errstate(over="ignore"):
            _put(part.elements, to.page, token, numbers.astype(_dtype(part)), moved)
        return
    codes = part.codes.read(to.page, token).copy()
    scales = None if part.scales is None else part.scales.read(to.scales, token).copy()
    row = moved.put(numbers, np.zeros((part.heads, part.dim), np.float32))
    part.write(to, token, row[None])
    back = Moved(moved.target, moved.target)
    part.codes.write(to.page, token, back.put(part.codes.read(to.page, token), codes))
    if part.scales is not None and scales is not None:
        part.scales.write(to.scales, token, back.put(part.scales.read(to.scales, token), scales, part.block[1]))


def _dtype(part: Plain) -> np.dtype[Any]:
    return part.elements.read(0, 0).dtype if part.pages else np.dtype(np.float32)


def _twin(other: Rows, begin: int, dim: int) -> Part | None:
    """The other side's part of the same dims."""
    at = 0
    for part in other.parts:
        if (at, part.dim) == (begin, dim) and not other.residual:
            return part
        at += part.dim
    return None


def _alike(part: Coded, twin: Coded, same_scales: bool) -> bool:
    """Whether codes and scales mean the same in both."""
    a, b = part.quant, twin.quant
    if (a.dtype, a.zero, a.scale_dtype, a.scale, a.recipe) != (b.dtype, b.zero, b.scale_dtype, b.scale, b.recipe):
        return False
    if (a.codebook, a.norm_correction, a.packing) != (b.codebook, b.norm_correction, b.packing):
        return False
    every = a.scale == "given" and a.block.head is None and b.block.head is None  # a scale of all heads, however many
    heads_alike = every or part.block[1] == twin.block[1]
    if a.scale_dtype is not None and not (heads_alike and part.block[::2] == twin.block[::2]):
        return False
    mine = a.scale_dtype is None or (a.scale == "computed" and a.recipe != "global")
    return mine or same_scales
