"""convert: the tokens of one cache in another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
) -> int:
    """Store every token that `source` holds by its own lengths in `pools`, where `table` says; returns the error word.

    A request whose length the source's table cannot hold, or of more living tokens than `max_tokens`, is skipped and
    reported at position 0; a token without a valid page on either side is skipped and reported. In rings the last
    `window` tokens of the source's length live.

    Parts that lie alike on both sides are copied as they are if they are plain and of one dtype, or quantized by the same
    rule (codes, block, recipe); those under scales of the caller's only with `same_scales`. All else goes through f32.
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
                _move(pool, position % table.tokens, to, other, b, position, place, same_scales)
    return faults.word


def _move(
    pool: Rows, token: int, to: Place, other: Rows, b: int, position: int, place: Place, same_scales: bool
) -> None:
    numbers = other.token_numbers(b, position, place).astype(np.float32)
    there, begin = position % other.tokens, 0
    for part in pool.parts:
        dims = slice(begin, begin + part.dim)
        twin = _twin(other, begin, part.dim)
        begin += part.dim
        if isinstance(part, Coded) and isinstance(twin, Coded) and _alike(part, twin, same_scales):
            part.codes.write(to.page, token, twin.codes.read(place.page, there))
            if part.scales is not None and twin.scales is not None:
                part.scales.write(to.scales, token, twin.scales.read(place.scales, there))
        elif isinstance(part, Plain) and isinstance(twin, Plain) and _dtype(part) == _dtype(twin):
            part.elements.write(to.page, token, twin.elements.read(place.page, there))
        else:
            row: NDArray[Any] = numbers[:, dims]
            if isinstance(part, Plain):
                with np.errstate(over="ignore"):
                    row = row.astype(_dtype(part))
            part.write(to, token, row[None])


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
    if a.scale_dtype is not None and part.block != twin.block:
        return False
    mine = a.scale_dtype is None or (a.scale == "computed" and a.recipe != "global")
    return mine or same_scales
