"""lora_add, rows_add, sliced_add: sums in f32, rounded once, where the cache or an array has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.faults import FaultLog
from kvgen.reference.pool import Rows
from kvgen.reference.tables import LIMIT, Place, RowRange, TableView, bad_total, index, request_of_row
from kvgen.runtime.faults import Fault

Raw = NDArray[Any]


def new_places(table: TableView, whose: RowRange, row: int, faults: FaultLog) -> tuple[int, Sequence[Place]] | None:
    """The position of row `row` of this step, and where its page of K and V is: as append finds it. None: nowhere."""
    count, t = whose.end - whose.begin, row - whose.begin
    after = table.after(whose.b, count)
    if after is None:
        faults.add(Fault.LENGTH, whose.b, t)
        return None
    position = after - count + t
    if table.overtaken(position // table.tokens, after):
        return None
    places = table.places(whose.b, position // table.tokens)
    if isinstance(places, Fault):
        faults.add(places, whose.b, position)
        return None
    return position, places


def add_to(pool: Rows, place: Place, token: int, more: Raw) -> None:
    """A token's row, `[heads, dim]`, becomes itself + more: dequantized, added in f32, quantized again."""
    old, begin = pool.numbers(place.page, token, place.scales), 0
    with np.errstate(all="ignore"):
        total = old.astype(np.float32) + more.astype(np.float32)
        for part in pool.parts:
            part.write(place, token, total[None, :, begin : begin + part.dim])
            begin += part.dim


def lora_add(table: TableView, pools: Sequence[Rows], kv: Raw, *, row_offsets: Raw, lora_end_idx: int) -> int:
    """Add rows of the 2m layout: kv `[R, heads * dim]`, row r < m to K of token r, row m + r to V of token r.

    Tokens count through `row_offsets`. A step without rows does nothing; an m that is negative or past R / 2 adds nothing
    and is reported at the first token without rows (0 for a negative one). Tokens past the last offset are reported and
    skipped, tokens without a place as append does it; row offsets are held to themselves alone, R bounds none.
    Returns the error word.
    """
    faults, m = FaultLog(), lora_end_idx
    if not len(kv):
        return faults.word
    if not 0 <= 2 * m <= len(kv):
        token = 0 if m < 0 else len(kv) // 2
        faults.add(Fault.LORA_END, _halved(row_offsets, token), token)
        return faults.word
    batch = len(row_offsets) - 1
    for token in range(m):
        whose = request_of_row(row_offsets, token, LIMIT - 1)
        if whose is None:
            last = index(row_offsets[batch])
            if batch == 0 or (last is not None and token >= last):
                faults.add(Fault.LORA_END, max(batch, 1) - 1, token)
            continue
        if not whose.valid:
            faults.add(Fault.ROW_OFFSETS, whose.b, token)
            continue
        found = new_places(table, whose, token, faults)
        if found is None:
            continue
        for pool, place, row in zip(pools, found[1], (kv[token], kv[m + token]), strict=False):
            add_to(pool, place, found[0] % table.tokens, row.reshape(pool.heads, pool.dim))
    return faults.word


def _halved(row_offsets: Raw, token: int) -> int:
    """The request that halving finds for a token, whatever the offsets hold; the last one past them all."""
    values = [LIMIT if index(x) is None else int(x) for x in row_offsets]
    low, high = 0, len(row_offsets) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if values[middle] <= token else (low, middle)
    return low


def rows_add(table: TableView, pools: Sequence[Rows], a: Raw, *, row_offsets: Raw, batch_offset: int) -> int:
    """Add rows `[T, heads * (dim + v_dim)]`, K's half and V's half, to new tokens; returns the error word.

    `row_offsets` are those of requests `batch_offset` on, and count from the batch's first row: row t is token
    t + row_offsets[0]. Faults name the cache's request and the batch's token.
    """
    faults, first, total = FaultLog(), index(row_offsets[0]), len(a)
    if not total:
        return faults.word
    if first is None or first + total >= LIMIT:
        faults.add(Fault.ROW_OFFSETS, batch_offset, 0)
        return faults.word
    if bad_total(row_offsets, first + total):
        faults.add(Fault.ROW_OFFSETS, min(batch_offset + len(row_offsets) - 2, LIMIT), first + total)
    for row in range(first, first + total):
        whose = request_of_row(row_offsets, row, first + total)
        if whose is None:
            continue
        whose = RowRange(min(whose.b + batch_offset, LIMIT), whose.begin, whose.end, whose.valid)
        if whose.b >= table.requests:
            faults.add(Fault.TABLE, whose.b, row)
        elif not whose.valid:
            faults.add(Fault.ROW_OFFSETS, whose.b, row)
        else:
            found = new_places(table, whose, row, faults)
            begin = 0
            for pool, place in zip(pools, found[1] if found else (), strict=False):
                width = pool.heads * pool.dim
                more = a[row - first, begin : begin + width].reshape(pool.heads, pool.dim)
                assert found is not None
                add_to(pool, place, found[0] % table.tokens, more)
                begin += width
    return faults.word


def sliced_add(a: Raw, b: Raw, *, lora_end_idx: int) -> tuple[Raw, int]:
    """(c, error word): c[r] = a[r] + b[r] for r < m, else a[r]; an m below 0 or past the rows of a or b adds nothing."""
    faults, rows, c = FaultLog(), min(len(a), len(b)), a.copy()
    if not len(a):
        return c, faults.word
    if not 0 <= lora_end_idx <= rows:
        faults.add(Fault.LORA_END, 0, 0 if lora_end_idx < 0 else rows)
        return c, faults.word
    m = lora_end_idx
    with np.errstate(all="ignore"):
        c[:m] = (a[:m].astype(np.float32) + b[:m].astype(np.float32)).astype(a.dtype)
    return c, faults.word
