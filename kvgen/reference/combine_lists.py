"""combine_lists: the entries and the newest tokens that each row attends to, counted through a buffer."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from kvgen.reference.append import locate
from kvgen.reference.faults import FaultLog
from kvgen.reference.tables import LIMIT, TableView
from kvgen.runtime.faults import Fault

Raw = NDArray[Any]


def combine_lists(
    table: TableView,
    offsets: Raw,
    entries_begin: Raw,
    tokens_begin: Raw,
    buffer_rows: int,
    keys: Raw,
    counts: Raw,
    *,
    window: int,
    indices: Raw | None = None,
) -> int:
    """Fill `keys` `[T, K]` and `counts` `[T]` for every row; returns the error word.

    A row at position p attends to entries j < e = (p + 1) // rate, all of them or what the first min(e, J) columns of `indices`
    name, and behind them to tokens max(0, p - window + 1) to p. -1 in keys: no key; in counts: the list is unknown.
    """
    found, word = locate(table, len(keys), row_offsets=offsets, stored=False)
    faults = FaultLog()
    for row, at in enumerate(found):
        keys[row], counts[row] = -1, 0 if at.state == "padding" else -1
        if at.state != "known" or at.position is None:
            continue
        seen = (at.position + 1) // table.cache.entry_tokens
        first = max(0, at.position + 1 - window)
        count = (seen if indices is None else min(seen, indices.shape[1])) + at.position + 1 - first
        if count > keys.shape[1]:
            faults.add(Fault.LENGTH, at.b, min(count, LIMIT))
            continue
        picks = range(seen) if indices is None else indices[row, :seen].tolist()
        listed = [("entry", j) if 0 <= j < seen else ("none", -1) for j in picks]
        listed += [("token", i) for i in range(first, at.position + 1)]
        begins, lost = {"entry": int(entries_begin[at.b]), "token": int(tokens_begin[at.b])}, False
        for column, (what, number) in enumerate(listed):
            if what == "none":
                continue
            place = begins[what] + number
            if 0 <= place < min(buffer_rows, 2**31):
                keys[row, column] = place
                continue
            faults.add(Fault.SLOT, at.b, number)
            lost = True
        counts[row] = -1 if lost else len(listed)
    return max(word, faults.word)  # of two words the one with the smaller fault
