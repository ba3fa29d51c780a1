"""scatter_states: rows of bytes to states by id."""

from __future__ import annotations

from kvgen.reference.faults import FaultLog
from kvgen.reference.pages import Raw, counted_pairs, page_id, possible_count
from kvgen.runtime.faults import Fault


def scatter_states(pool: Raw, ids: Raw, rows: Raw, *, num_ids: int | None = None) -> int:
    """Make state ids[i] of `pool [pages, bytes]`, a layer's, row i of `rows [N, bytes]`; returns the error word.

    -1 skips; an id outside the pool is reported (PAIR, at i) and skipped; counts are as in gather_states. Rows of one id are
    stored one after the other.
    """
    faults = FaultLog()
    if len(ids) and not possible_count(num_ids):
        faults.add(Fault.PAIR, 0, 0)
    for i, entry in enumerate(ids[: counted_pairs(num_ids, len(ids))]):
        page = page_id(entry, 1, len(pool))
        if page is not None:
            pool[page] = rows[i]
        elif int(entry) != -1:
            faults.add(Fault.PAIR, i, i)
    return faults.word
