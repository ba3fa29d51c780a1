"""mla_decompress: the latent rows of one chunk of keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.faults import FaultLog
from kvgen.reference.gather import Gathered
from kvgen.reference.lengths import tokens_of
from kvgen.reference.pool import Rows
from kvgen.reference.tables import LIMIT, TableView, bad_total, index, request_of_row
from kvgen.runtime.faults import Fault


def mla_decompress(
    table: TableView,
    pools: Sequence[Rows],
    before: NDArray[Any],
    alignment: int,
    *,
    buffer_row_offsets: NDArray[Any],
    cache_offsets: NDArray[Any],
    row_offsets: NDArray[Any] | None = None,
) -> Gathered:
    """Row g of `before` `[T, dims]` is, of request b that owns it, key g - buffer_row_offsets[b] + cache_offsets[b].

    Its first `dims` dims, dequantized and rounded once. Past the request's keys rows are 0 up to a multiple of
    `alignment`; what lies further, and a key without a valid page, is NaN. Rows of no request keep their bytes.
    """
    faults, total, dims = FaultLog(), len(before), before.shape[1]
    out, failed = before.copy(), np.zeros(total, bool)
    if total and bad_total(buffer_row_offsets, total):
        faults.add(Fault.ROW_OFFSETS, table.requests - 1, total)
    for row in range(total):
        whose = request_of_row(buffer_row_offsets, row, total)
        if whose is None:
            continue
        if not whose.valid:
            faults.add(Fault.ROW_OFFSETS, whose.b, row)
            continue
        t, start, keys = row - whose.begin, index(cache_offsets[whose.b]), tokens_of(table, row_offsets, whose.b)
        failed[row], out[row] = True, np.nan
        if isinstance(keys, Fault):
            faults.add(keys, whose.b, t)
        elif start is None or start + whose.end - whose.begin >= LIMIT:
            faults.add(Fault.LENGTH, whose.b, t)
        elif start + t >= keys:
            failed[row] = start + t >= -(-keys // alignment) * alignment
            if failed[row]:
                faults.add(Fault.POSITION, whose.b, start + t)
            else:
                out[row] = 0
        else:
            places = table.places(whose.b, (start + t) // table.tokens)
            if isinstance(places, Fault):
                faults.add(places, whose.b, start + t)
            else:
                failed[row], out[row] = False, pools[0].token(whose.b, start + t, places[0])[0, :dims]
    return Gathered((out,), failed, faults.word)
