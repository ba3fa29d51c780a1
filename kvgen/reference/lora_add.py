"""lora_add: rows of the 2m layout, added to K and V of the step's first tokens."""

from __future__ import annotations

from collections.abc import Sequence

from kvgen.reference.faults import FaultLog
from kvgen.reference.new_rows import Raw, add_to, new_places
from kvgen.reference.pool import Rows
from kvgen.reference.tables import LIMIT, TableView, index, request_of_row
from kvgen.runtime.faults import Fault


def lora_add(table: TableView, pools: Sequence[Rows], kv: Raw, *, row_offsets: Raw, lora_end_idx: int) -> int:
    """Add rows of the 2m layout: kv `[R, heads * dim]`, row r < m to K of token r, row m + r to V of token r.

    Tokens count through `row_offsets`. A step without rows does nothing; an m that is negative or past R / 2 adds nothing
    and is reported at the first token without rows (0 for a negative one). Tokens past the last offset are reported and
    skipped, tokens without a place as append does it; row offsets are held to themselves alone, R bounds none.
    Returns the error word.
    """
    faults, m = FaultLog(), lora_end_idx
    if not len(kv):
        return faults.word
    if not 0 <= 2 * m <= len(kv):
        token = 0 if m < 0 else len(kv) // 2
        faults.add(Fault.LORA_END, _halved(row_offsets, token), token)
        return faults.word
    batch = len(row_offsets) - 1
    for token in range(m):
        whose = request_of_row(row_offsets, token, LIMIT - 1)
        if whose is None:
            last = index(row_offsets[batch])
            if batch == 0 or (last is not None and token >= last):
                faults.add(Fault.LORA_END, max(batch, 1) - 1, token)
            continue
        if not whose.valid:
            faults.add(Fault.ROW_OFFSETS, whose.b, token)
            continue
        found = new_places(table, whose, token, faults)
        if found is None:
            continue
        for pool, place, row in zip(pools, found[1], (kv[token], kv[m + token]), strict=False):
            add_to(pool, place, found[0] % table.tokens, row.reshape(pool.heads, pool.dim))
    return faults.word


def _halved(row_offsets: Raw, token: int) -> int:
    """The request that halving finds for a token, whatever the offsets hold; the last one past them all."""
    values = [LIMIT if index(x) is None else int(x) for x in row_offsets]
    low, high = 0, len(row_offsets) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if values[middle] <= token else (low, middle)
    return low
