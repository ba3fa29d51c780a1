"""move_tokens: tokens onto other slots of the pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.faults import FaultLog
from kvgen.reference.gather import put_stored, stored
from kvgen.reference.pool import Rows
from kvgen.reference.tables import LIMIT, Place, TableView, index
from kvgen.runtime.faults import Fault

Raw = NDArray[Any]


def move_tokens(table: TableView, layers: Sequence[Sequence[Rows]], src: Raw, dst: Raw, *, row_offsets: Raw) -> int:
    """Copy what the token in slot src[i] stores to slot dst[i], in K and V of every layer; returns the error word.

    Pairs of request b are row_offsets[b] to row_offsets[b + 1]. All are read before one is written. -1 in either list is no
    pair; a pair with a slot outside the pool is reported by its number, and skipped; so are all of a request
    around which the offsets decrease, or that passes the pairs.
    """
    faults, taken = FaultLog(), []
    for b in range(len(row_offsets) - 1):
        around = [LIMIT if index(x) is None else int(x) for x in row_offsets[max(b - 1, 0) : b + 3]]
        begin, end = around[min(b, 1)], around[min(b, 1) + 1]
        if begin != end and (around != sorted(around) or end > len(src)):
            faults.add(Fault.ROW_OFFSETS, b, min(begin, len(src)))
            continue
        for i in range(begin, end):
            slots = int(src[i]), int(dst[i])
            if -1 in slots:
                continue
            if any(not 0 <= slot < table.pages * table.tokens for slot in slots):
                faults.add(Fault.SLOT, b, i)
            else:
                taken.append(slots)
    for roles in layers:
        for rows in roles:
            read = [(to, stored(rows, "k", source % table.tokens, _place(table, source))) for source, to in taken]
            for to, what in read:
                put_stored(rows, "k", to % table.tokens, _place(table, to), {n: np.array(x) for n, x in what.items()})
    return faults.word


def _place(table: TableView, slot: int) -> Place:
    page = slot // table.tokens
    return Place(page, page)
