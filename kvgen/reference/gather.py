"""gather: which cached token every output row is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.faults import FaultLog
from kvgen.reference.pool import Rows
from kvgen.reference.tables import LIMIT, TableView, bad_total, index, request_of_row
from kvgen.runtime.faults import Fault


@dataclass(frozen=True)
class Gathered:
    """`outputs`: K's and V's rows `[T, kv_heads, dim]`; `failed[T]`: rows that became NaN; `errors`: the error word."""

    outputs: tuple[NDArray[Any], ...]
    failed: NDArray[np.bool_]
    errors: int


def gather(
    table: TableView,
    pools: Sequence[Rows],
    before: Sequence[NDArray[Any]],
    *,
    row_offsets: NDArray[Any],
    starts: NDArray[Any] | None = None,
) -> Gathered:
    """Row t of request b, counted from row_offsets[b], is the cached token starts[b] + t (no starts: t).

    `before` are the output arrays as they were; rows of no request, and rows whose offsets contradict each other, keep
    their bytes. A row whose token has no valid page, or is no longer or not yet in
    a ring, is NaN. Quantized tokens are dequantized and rounded to the cache's dtype once; plain parts of a row are copied
    bit for bit. In a residual cache, tokens that are not sealed come from the tail.
    """
    faults, total = FaultLog(), len(before[0])
    outputs, failed = tuple(b.copy() for b in before), np.zeros(total, bool)
    if total and bad_total(row_offsets, total):
        faults.add(Fault.ROW_OFFSETS, table.requests - 1, total)
    for row in range(total):
        whose = request_of_row(row_offsets, row, total)
        if whose is None:
            continue
        if not whose.valid:
            faults.add(Fault.ROW_OFFSETS, whose.b, row)
            continue
        t = row - whose.begin
        start = 0 if starts is None else index(starts[whose.b])
        if start is None or start + whose.end - whose.begin > LIMIT:
            faults.add(Fault.LENGTH, whose.b, t)
            failed[row] = True
        else:
            position = start + t
            alive = table.stored(whose.b, position)
            places = table.places(whose.b, position // table.tokens) if alive else Fault.POSITION
            if isinstance(places, Fault):
                faults.add(places, whose.b, position)
                failed[row] = True
            else:
                for pool, out, place in zip(pools, outputs, places, strict=False):
                    out[row] = pool.token(whose.b, position, place)
        if failed[row]:
            for out in outputs:
                out[row] = np.nan
    return Gathered(outputs, failed, faults.word)
