"""remap_indices: where tokens that sparse attention picked are, counted through the whole pool."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from kvgen.reference.faults import FaultLog
from kvgen.reference.slots import slot_of
from kvgen.reference.tables import RowRange, TableView, bad_total, request_of_row
from kvgen.runtime.faults import Fault


def remap_indices(
    table: TableView,
    offsets: NDArray[Any],
    indices: NDArray[Any],
    out: NDArray[Any],
    *,
    counts: NDArray[Any] | None = None,
    drop_unseen: bool = False,
    candidates: NDArray[Any] | None = None,
    block: int = 1,
) -> int:
    """Fill `out` `[T, J]` with the places of tokens (entries) `indices` `[T, J]`, or negative numbers; returns the error word.

    `counts` `[T]` becomes the end of each row's last place, -1 where something of the row was reported. With `drop_unseen`
    tokens after the row's position, entries that it does not see, become -1. With `candidates` `[T, C]` indices count the
    tokens of these blocks of `block`, row by row.
    """
    faults, total = FaultLog(), len(indices)
    if (out.size or (counts is not None and total)) and bad_total(offsets, total):
        faults.add(Fault.ROW_OFFSETS, table.requests - 1, total)
    for row in range(total if out.size or counts is not None else 0):
        whose = request_of_row(offsets, row, total)
        seen = None
        if whose is not None and not whose.valid:
            faults.add(Fault.ROW_OFFSETS, whose.b, row)
        elif whose is not None and drop_unseen:
            seen = _seen(table, whose, row, faults)
        unknown = whose is not None and (not whose.valid or (drop_unseen and seen is None))
        count = -1 if unknown else 0
        given = indices[row].tolist()
        if candidates is not None:
            given = [_named(candidates[row], block, column) for column in given]
        for j, token in enumerate(given):
            if seen is not None and token >= seen:
                token = -1
            if token < 0 or whose is None or unknown:
                out[row, j] = min(token, -1)
                continue
            place = slot_of(table, whose.b, token, out.dtype)
            if isinstance(place, Fault):
                faults.add(place, whose.b, token)
                place, count = -1, -1
            elif count >= 0:
                count = j + 1
            out[row, j] = place
        if counts is not None:
            counts[row] = count
    return faults.word


def _named(blocks: NDArray[Any], block: int, column: int) -> int:
    """The token that a column of a list names; 2^31 - 1 past the list, and for those past it."""
    if column < 0:
        return column
    number, past = column // block, 2**31 - 1
    if number >= len(blocks):
        return past
    first = int(blocks[number]) * block
    return -1 if first < 0 else min(first + column % block, past)


def _seen(table: TableView, whose: RowRange, row: int, faults: FaultLog) -> int | None:
    """How many tokens, or entries, a row sees; None where its position is none."""
    count, t = whose.end - whose.begin, row - whose.begin
    after = table.after(whose.b, count)
    if after is None:
        faults.add(Fault.LENGTH, whose.b, t)
        return None
    return (after - count + t + 1) // table.cache.entry_tokens
