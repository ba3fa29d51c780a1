"""gather_rows: the cached tokens that query rows name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.faults import FaultLog
from kvgen.reference.gather import Gathered
from kvgen.reference.pool import Rows
from kvgen.reference.tables import LIMIT, TableView, bad_total, request_of_row
from kvgen.runtime.faults import Fault


def gather_rows(
    table: TableView,
    pools: Sequence[Rows],
    before: Sequence[NDArray[Any]],
    *,
    row_offsets: NDArray[Any],
    slots: NDArray[Any],
) -> Gathered:
    """Output row (r, j) is token slots[r, j] of the request that owns query row r; `failed` is `[T, J]`.

    A negative slot gives zeros. A token without a valid page, or one that a ring does not hold, gives NaN. Query rows of
    no request, and rows whose offsets contradict each other, keep their bytes.
    """
    faults = FaultLog()
    outputs, failed = tuple(b.copy() for b in before), np.zeros(slots.shape, bool)
    total, count = slots.shape
    if total and count and bad_total(row_offsets, total):
        faults.add(Fault.ROW_OFFSETS, table.requests - 1, total)
    for row in range(total if count else 0):
        whose = request_of_row(row_offsets, row, total)
        if whose is None:
            continue
        if not whose.valid:
            faults.add(Fault.ROW_OFFSETS, whose.b, row)
            continue
        for j, slot in enumerate(int(s) for s in slots[row]):
            if slot < 0:
                for out in outputs:
                    out[row, j] = 0
                continue
            position = min(slot, LIMIT)
            alive = position < LIMIT and table.stored(whose.b, position)
            places = table.places(whose.b, position // table.tokens) if alive else Fault.POSITION
            if isinstance(places, Fault):
                faults.add(places, whose.b, position)
                failed[row, j] = True
            for k, (pool, out) in enumerate(zip(pools, outputs, strict=False)):
                out[row, j] = np.nan if isinstance(places, Fault) else pool.token(whose.b, position, places[k])
    return Gathered(outputs, failed, faults.word)
