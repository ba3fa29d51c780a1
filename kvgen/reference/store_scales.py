"""store_scales: where the scales of every new row go."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from kvgen.reference.elements import Elements
from kvgen.reference.faults import FaultLog
from kvgen.reference.new_rows import new_places
from kvgen.reference.pool import Rows
from kvgen.reference.segments import Coded
from kvgen.reference.tables import TableView, bad_total, request_of_row
from kvgen.runtime.faults import Fault


def store_scales(
    table: TableView, pools: tuple[Rows, ...], scales: NDArray[Any], *, row_offsets: NDArray[Any], role: int
) -> int:
    """Store `scales` `[T, blocks of heads, places]` as those of the step's tokens of K (role 0) or V (1).

    Rows go where append puts them; codes stay. Returns the error word.
    """
    faults, total = FaultLog(), len(scales)
    part = pools[role].parts[0]
    assert isinstance(part, Coded) and isinstance(part.scales, Elements)
    if total and bad_total(row_offsets, total):
        faults.add(Fault.ROW_OFFSETS, table.requests - 1, total)
    for row in range(total):
        whose = request_of_row(row_offsets, row, total)
        if whose is None:
            continue
        if not whose.valid:
            faults.add(Fault.ROW_OFFSETS, whose.b, row)
            continue
        found = new_places(table, whose, row, faults)
        if found is not None:
            part.scales.write(found[1][role].scales, found[0] % table.tokens, scales[row])
    return faults.word
