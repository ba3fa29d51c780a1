"""gather_states: states by id to rows of bytes."""

from __future__ import annotations

from kvgen.reference.faults import FaultLog
from kvgen.reference.pages import Raw, counted_pairs, page_id, possible_count
from kvgen.runtime.faults import Fault


def gather_states(pool: Raw, ids: Raw, rows: Raw, *, num_ids: int | None = None) -> int:
    """Make row i of `rows [N, bytes]` state ids[i] of `pool [pages, bytes]`, a layer's; returns the error word.

    -1 makes it zeros; an id outside the pool is reported (PAIR, at i) and makes it 0xff. Only the first `num_ids` count; a
    count below 0 or past every index is reported (PAIR, at 0), and no row is written.
    """
    faults = FaultLog()
    if len(ids) and not possible_count(num_ids):
        faults.add(Fault.PAIR, 0, 0)
    for i, entry in enumerate(ids[: counted_pairs(num_ids, len(ids))]):
        page = page_id(entry, 1, len(pool))
        if page is not None:
            rows[i] = pool[page]
        elif int(entry) == -1:
            rows[i] = 0
        else:
            rows[i] = 0xFF
            faults.add(Fault.PAIR, i, i)
    return faults.word
