"""seal: which groups of tokens a step completes, quantized as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.faults import FaultLog
from kvgen.reference.pool import Rows
from kvgen.reference.tables import RowRange, TableView, bad_total, request_of_row
from kvgen.runtime.faults import Fault


def seal(table: TableView, pools: Sequence[Rows], new: Sequence[NDArray[Any]], *, row_offsets: NDArray[Any]) -> int:
    """Before the append of the same rows: quantize every group of R tokens that this step completes.

    A request with rows in this step has floor(length / R) full groups before and after it; the ones between are stored in
    their pages, tokens that were there before from the tail, the step's from `new`, and `sealed[b]` becomes what is
    full afterwards. Roles without a tail are left alone. Requests whose length or offsets are wrong are left alone and
    reported as `append` does; a group without a valid page is reported at its first token, and lost. In a ring, a group
    whose page a later row of the same step takes over is not stored. Returns the error word.
    """
    faults, total = FaultLog(), len(new[0])
    if total and bad_total(row_offsets, total):
        faults.add(Fault.ROW_OFFSETS, table.requests - 1, total)
    for row in range(total):
        whose = request_of_row(row_offsets, row, total)
        if whose is None:
            continue
        if not whose.valid:
            faults.add(Fault.ROW_OFFSETS, whose.b, row)
            continue
        after = table.after(whose.b, whose.end - whose.begin)
        if after is None:
            faults.add(Fault.LENGTH, whose.b, row - whose.begin)
            continue
        for role, (pool, rows) in enumerate(zip(pools, new, strict=False)):
            if pool.residual:
                _seal(table, pool, role, whose, rows, row, after, faults)
    return faults.word


def _seal(
    table: TableView,
    pool: Rows,
    role: int,
    whose: RowRange,
    new: NDArray[Any],
    row: int,
    after: int,
    faults: FaultLog,
) -> None:
    """The group that one row of a request completes, if it completes one; its last row counts what is full afterwards."""
    assert pool.sealed is not None
    size, before = pool.residual, after - (whose.end - whose.begin)
    if row == whose.end - 1:
        # Where the length passes the type's largest number, the count wraps as the kernel's does.
        pool.sealed[whose.b] = np.array(after // size * size, np.int64).astype(pool.sealed.dtype)
    first = before + row - whose.begin + 1 - size
    if first % size or table.overtaken(first // table.tokens, after):
        return
    places = table.places(whose.b, first // table.tokens)
    if isinstance(places, Fault):
        faults.add(places, whose.b, first)
    else:
        pool.seal(whose.b, first, places[role], new[whose.begin : whose.end], before)
