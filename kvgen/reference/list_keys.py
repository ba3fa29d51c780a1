"""list_keys: the keys that each row sees, counted through the whole pool."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from kvgen.reference.append import locate
from kvgen.reference.faults import FaultLog
from kvgen.reference.slots import slot_of
from kvgen.reference.tables import TableView
from kvgen.runtime.faults import Fault


def list_keys(
    table: TableView, offsets: NDArray[Any], keys: NDArray[Any], counts: NDArray[Any], window: int | None = None
) -> int:
    """Fill `keys` `[T, K]` and `counts` `[T]` for every row; returns the error word.

    A row at position p sees entries j < (p + 1) // rate, the newest `window` of them. -1 in keys: no key; in counts: the list is
    unknown.
    """
    found, word = locate(table, len(keys), row_offsets=offsets, stored=False)
    faults = FaultLog()
    for row, at in enumerate(found):
        keys[row], counts[row] = -1, 0 if at.state == "padding" else -1
        if at.state != "known" or at.position is None:
            continue
        end = (at.position + 1) // table.cache.entry_tokens
        seen = range(0 if window is None else max(0, end - window), end)
        if len(seen) > keys.shape[1]:
            faults.add(Fault.LENGTH, at.b, len(seen))
            continue
        places = [_place(table, at.b, j, at.after, keys) for j in seen]
        for column, (j, place) in enumerate(zip(seen, places, strict=True)):
            if isinstance(place, Fault):
                faults.add(place, at.b, j)
            else:
                keys[row, column] = place
        counts[row] = -1 if any(isinstance(place, Fault) for place in places) else len(seen)
    return max(word, faults.word)  # of two words the one with the smaller fault


def _place(table: TableView, b: int, j: int, after: int, keys: NDArray[Any]) -> int | Fault:
    """Where entry j is; tokens whose page a ring has given to newer ones are nowhere."""
    if table.overtaken(j // table.tokens, after):
        return Fault.POSITION
    return slot_of(table, b, j, keys.dtype)
