"""rows_add: rows of K's and V's half, added to new tokens."""

from __future__ import annotations

from collections.abc import Sequence

from kvgen.reference.faults import FaultLog
from kvgen.reference.new_rows import Raw, add_to, new_places
from kvgen.reference.pool import Rows
from kvgen.reference.tables import LIMIT, RowRange, TableView, bad_total, index, request_of_row
from kvgen.runtime.faults import Fault


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
