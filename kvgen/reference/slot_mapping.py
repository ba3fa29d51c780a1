"""slot_mapping: where new rows go, counted through the whole pool."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from kvgen.reference.faults import FaultLog
from kvgen.reference.slots import slot_of
from kvgen.reference.tables import TableView, bad_total, request_of_row
from kvgen.runtime.faults import Fault
from kvgen.schema.interleave import Interleave


def slot_mapping(
    table: TableView,
    offsets: NDArray[Any],
    slots: NDArray[Any],
    *,
    interleave: Interleave | None = None,
    rank: int = 0,
    local_lengths: NDArray[Any] | None = None,
) -> int:
    """Fill `slots` `[T]` with the place of each new row, or -1; returns the error word.

    With `interleave` the table has the tokens of `rank` alone, and `local_lengths` `[T]` become their number up to each row's.
    """
    faults, total = FaultLog(), len(slots)
    if total and bad_total(offsets, total):
        faults.add(Fault.ROW_OFFSETS, table.requests - 1, total)
    for row in range(total):
        slots[row] = -1
        if local_lengths is not None:
            local_lengths[row] = 0
        whose = request_of_row(offsets, row, total)
        if whose is None:
            continue
        if not whose.valid:
            faults.add(Fault.ROW_OFFSETS, whose.b, row)
            continue
        count, t = whose.end - whose.begin, row - whose.begin
        after = table.after(whose.b, count)
        if after is None:
            faults.add(Fault.LENGTH, whose.b, t)
            continue
        position = after - count + t
        rate = table.cache.entry_tokens
        if interleave is not None:
            mine = tokens_of_rank(position + 1, interleave, rank)
            assert local_lengths is not None
            local_lengths[row] = mine
            if position // interleave.size % interleave.ranks != rank:
                continue
            place = slot_of(table, whose.b, mine - 1, slots.dtype)
            if isinstance(place, Fault):
                faults.add(place, whose.b, position)
            else:
                slots[row] = place
            continue
        if table.overtaken(position // table.tokens, after) or (position + 1) % rate:
            continue
        place = slot_of(table, whose.b, position // rate, slots.dtype)
        if isinstance(place, Fault):
            faults.add(place, whose.b, position // rate * rate)
        else:
            slots[row] = place
    return faults.word


def tokens_of_rank(n: int, interleave: Interleave, rank: int) -> int:
    """How many of a request's first `n` tokens lie on `rank`: those i with i // size % ranks == rank."""
    size = interleave.size
    rounds, rest = divmod(n, size * interleave.ranks)
    return rounds * size + min(max(rest - rank * size, 0), size)
