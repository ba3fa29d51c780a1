"""append: where every new row goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from kvgen.reference.faults import FaultLog
from kvgen.reference.pool import Rows
from kvgen.reference.tables import LIMIT, TableView, bad_total, request_of_row
from kvgen.runtime.faults import Fault


def append(
    table: TableView,
    pools: Sequence[Rows],
    new: Sequence[NDArray[Any]],
    *,
    row_offsets: NDArray[Any] | None = None,
    slots: NDArray[Any] | None = None,
) -> int:
    """Store `new` (K's rows, V's rows), each `[T, kv_heads, dim]` of the cache's dtype, in `pools`.

    Returns the error word. With `row_offsets[B + 1]`, row t of request b goes to position length + t (lengths "before")
    or length - rows + t ("after"). With `slots[T]`, a row goes to page slot // page_size, token slot % page_size,
    whatever the page table says; -1 skips it. A row whose place cannot be had, of its values or of its scales, is reported
    and skipped. In a ring, a row whose page a later row of the same step takes over is not stored.

    Quantized roles choose the scales of every token as they store it. In a residual cache rows past the last full group of
    R go to the tail; rows of groups that the step completes are what `seal` has stored before.
    """
    faults, total = FaultLog(), len(new[0])
    if slots is not None:
        if table.own_table or any(pool.residual for pool in pools):
            raise ValueError(
                "slots: got them for a cache with a scales_page_table or a tail; both need a row's request"
            )
        for row in range(total):
            slot = int(slots[row])
            if slot == -1:
                continue
            if slot < 0 or slot // table.tokens >= table.pages:
                faults.add(Fault.SLOT, row, row)
                continue
            for pool, rows in zip(pools, new, strict=True):
                pool.write(*divmod(slot, table.tokens), rows[row])
        return faults.word
    assert row_offsets is not None
    if total and bad_total(row_offsets, total):
        faults.add(Fault.ROW_OFFSETS, table.requests - 1, total)
    for row in range(total):
        whose = request_of_row(row_offsets, row, total)
        if whose is None:
            continue
        if not whose.valid:
            faults.add(Fault.ROW_OFFSETS, whose.b, row)
            continue
        count, t = whose.end - whose.begin, row - whose.begin
        length = table.length(whose.b)
        after = length if length is None or table.cache.lengths == "after" else length + count
        if after is None or not count <= after <= LIMIT:
            faults.add(Fault.LENGTH, whose.b, t)
            continue
        position = after - count + t
        page = position // table.tokens
        if table.overtaken(page, after):
            continue
        places = table.places(whose.b, page)
        if isinstance(places, Fault):
            faults.add(places, whose.b, position)
            continue
        for pool, rows, place in zip(pools, new, places, strict=False):
            pool.put(whose.b, position, place, rows[row], after)
    return faults.word
