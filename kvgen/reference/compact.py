"""compact: used pages moved to the beginning of the pool."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvgen.reference.copy_pages import copy_pages
from kvgen.reference.faults import FaultLog
from kvgen.reference.pages import (
    Arrays,
    Raw,
    living_pages,
    possible_count,
)
from kvgen.reference.tables import LIMIT, TableView, index
from kvgen.runtime.faults import Fault


def compact_plan(table: TableView, new_ids: Raw, moves: Raw, kept: Raw | None = None) -> tuple[int, int, int]:
    """Plan the moves: fills new_ids `[P]` and moves `[Q, 2]`; returns (number of moves, used pages, error word).

    Used are the pages of the requests' tokens and the `kept` ones, of which -1 is none, U of them; the r-th used one from
    U on moves to the r-th free one below U.
    """
    faults, multiplier = FaultLog(), table.cache.page_table.id_multiplier
    used: set[int] = set()
    for b in range(table.requests):
        living = living_pages(table, b)
        if living is None:
            length = table.length(b)
            faults.add(Fault.LENGTH, b, LIMIT if length is None else length)
            continue
        for i in living[1]:
            for name, at in table.entry_places(b, i):
                if name == "scales_page_table":
                    continue
                entry = index(table.arrays[name][at])
                if entry is None or entry >= len(new_ids) or entry * multiplier >= table.pages:
                    faults.add(Fault.PAGE_ID, b, i * table.tokens)
                else:
                    used.add(entry)
    for k, entry in enumerate(() if kept is None else kept):
        number = index(entry)
        if number is not None and number < len(new_ids) and number * multiplier < table.pages:
            used.add(number)
        elif int(entry) != -1:
            faults.add(Fault.PAIR, k, k)
    count = len(used)
    free = [i for i in range(count) if i not in used]
    above = sorted(i for i in used if i >= count)
    done = list(zip(above, free, strict=True))[: len(moves)]
    new_ids[...] = np.asarray(-1).astype(new_ids.dtype)
    for i in used:
        new_ids[i] = i
    moves[...] = -1
    for r, (old, new) in enumerate(done):
        moves[r] = old, new
        new_ids[old] = new
    return len(done), count, faults.word


def compact(
    table: TableView, arrays: Arrays, moves: Raw, new_ids: Raw, new: Mapping[str, Raw], num_moves: int | None = None
) -> int:
    """Make the moves (copy_pages) and write the entries of the requests' tokens, where they are afterwards, to `new`.

    With a `num_moves` that cannot be, nothing moves and entries are as they were. Of states every request's entry is
    written, that of none too.
    """
    replaced = []
    for b in range(table.requests):
        living = living_pages(table, b)
        for i in range(1) if table.cache.states else living[1] if living is not None else ():
            for name, at in table.entry_places(b, i):
                entry = table.arrays[name][at]
                number = index(entry)
                known = (
                    number is not None
                    and possible_count(num_moves)
                    and number < len(new_ids)
                    and int(new_ids[number]) != int(np.asarray(-1).astype(new_ids.dtype))
                )
                if name != "scales_page_table":
                    replaced.append((name, at, new_ids[number] if known and number is not None else entry))
    for name, at, entry in replaced:
        new[name][at] = entry
    return copy_pages(table.cache, arrays, moves, num_pairs=num_moves)
