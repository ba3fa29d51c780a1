"""Where the step's new rows are in the cache, and sums in f32 that are rounded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.append import NewRow, locate
from kvgen.reference.faults import FaultLog
from kvgen.reference.pool import Rows
from kvgen.reference.tables import Place, RowRange, TableView
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


def stored_rows(
    table: TableView, pool: Rows, role: int, rows: int, row_offsets: Raw, limit: int | None = None
) -> tuple[list[NewRow], Raw, int]:
    """(where each new row is, its numbers `[rows, heads, dim]` in float64 as K (role 0) or V has them, error word).

    A row that is nowhere has zeros, and NaN is what the cache holds: tokens that a ring has dropped. Positions at or past `limit`
    have no angle, so that their rows are unknown; None: rows do not rotate."""
    found, word = locate(
        table,
        rows,
        row_offsets=row_offsets,
        position_out_of_range=lambda _, position: limit is not None and position is not None and position >= limit,
    )
    values = np.zeros((rows, pool.heads, pool.dim))
    for row, at in enumerate(found):
        if at.places is not None:
            values[row] = pool.numbers(at.places[role].page, at.token, at.places[role].scales)
    return found, values, word
