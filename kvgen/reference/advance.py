"""advance: the lengths after the step."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from kvgen.reference.faults import FaultLog
from kvgen.reference.lengths import largest, new_rows
from kvgen.reference.tables import TableView, index
from kvgen.runtime.faults import Fault


def advance(
    table: TableView, *, row_offsets: NDArray[Any] | None = None, new_tokens: NDArray[Any] | None = None
) -> tuple[NDArray[Any], int]:
    """(new lengths `[B]`, error word); without offsets and counts every request has one new token."""
    lengths, faults = table.arrays["lengths"], FaultLog()
    out = lengths.copy()
    for b in range(len(lengths)):
        if new_tokens is not None:
            count = index(new_tokens[b])
            new = Fault.LENGTH if count is None else count
        else:
            new = 1 if row_offsets is None else new_rows(row_offsets, b)
        length = table.length(b)
        if not isinstance(new, Fault) and (length is None or length + new > largest(lengths.dtype)):
            new = Fault.LENGTH
        if isinstance(new, Fault):
            faults.add(new, b, 0)
        else:
            assert length is not None
            out[b] = length + new
    return out, faults.word
