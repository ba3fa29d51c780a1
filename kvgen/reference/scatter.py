"""scatter: which cached token every row becomes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from kvgen.reference.faults import FaultLog
from kvgen.reference.gather import positions, put_stored, slotted
from kvgen.reference.pool import Rows
from kvgen.reference.tables import Place, TableView
from kvgen.runtime.faults import Fault


def scatter(
    table: TableView,
    pools: Sequence[Rows],
    new: Sequence[NDArray[Any]],
    *,
    row_offsets: NDArray[Any] | None = None,
    starts: NDArray[Any] | None = None,
    slots: NDArray[Any] | None = None,
) -> int:
    """Row t of request b, counted from row_offsets[b], becomes the token starts[b] + t (no starts: t); with `slots` row t
    becomes the token in slots[t], whatever the table says, and -1 skips it. Returns the error word.

    A row whose token has no valid page is reported and skipped. In a ring, rows of tokens that are too old are skipped
    without a word, rows of tokens that its length does not count are reported.
    """
    faults = FaultLog()
    for row, position, places in _targets(table, len(new[0]), row_offsets, starts, slots, faults):
        for pool, rows, place in zip(pools, new, places, strict=False):
            pool.write(place.page, position % table.tokens, rows[row], place.scales)
    return faults.word


def scatter_raw(
    table: TableView,
    pools: Sequence[Rows],
    given: Mapping[str, NDArray[Any]],
    *,
    row_offsets: NDArray[Any] | None = None,
    starts: NDArray[Any] | None = None,
    slots: NDArray[Any] | None = None,
) -> int:
    """The same of what `gather_raw` gives, by its names."""
    faults = FaultLog()
    total = len(next(iter(given.values())))
    for row, position, places in _targets(table, total, row_offsets, starts, slots, faults):
        for pool, role, place in zip(pools, "kv", places, strict=False):
            mine = {name: array[row] for name, array in given.items()}
            put_stored(pool, role, position % table.tokens, place, mine)
    return faults.word


def _targets(
    table: TableView,
    total: int,
    row_offsets: NDArray[Any] | None,
    starts: NDArray[Any] | None,
    slots: NDArray[Any] | None,
    faults: FaultLog,
) -> Iterator[tuple[int, int, tuple[Place, Place]]]:
    """(row, position, where it goes) of every row that is stored; a slot's is a position in its page."""
    if slots is not None:
        found = slotted(table, slots, faults)
        yield from ((row, token, places) for row, token, places in found if places is not None)
        return
    assert row_offsets is not None
    for row, b, position in positions(table, total, row_offsets, starts, faults):
        if position is None:
            continue
        if not table.stored(b, position):
            n = table.length(b)
            if n is None or position >= n:
                faults.add(Fault.POSITION, b, position)
            continue
        places = table.places(b, position // table.tokens)
        if isinstance(places, Fault):
            faults.add(places, b, position)
        else:
            yield row, position, places
