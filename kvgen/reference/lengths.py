"""row_offsets and advance: the tokens of every request, and where they begin behind each other."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.faults import FaultLog
from kvgen.reference.tables import LIMIT, TableView, index
from kvgen.runtime.faults import Fault


def largest(kind: np.dtype[Any]) -> int:
    """The largest index that an array of this type holds."""
    return min(int(np.iinfo(kind).max), LIMIT - 1)


def new_rows(offsets: NDArray[Any] | None, b: int) -> int | Fault:
    """New rows of request b; none without offsets. Those from offsets[b - 1] to offsets[b + 2] must not decrease."""
    if offsets is None:
        return 0
    around = [index(x) for x in offsets[max(b - 1, 0) : b + 3]]
    # What is no index is larger than all that are.
    values = [LIMIT if x is None else x for x in around]
    begin, end = (LIMIT if x is None else x for x in (index(offsets[b]), index(offsets[b + 1])))
    return end - begin if values == sorted(values) and end < LIMIT else Fault.ROW_OFFSETS


def tokens_of(table: TableView, offsets: NDArray[Any] | None, b: int) -> int | Fault:
    """Tokens of request b, cached and new."""
    new = new_rows(offsets, b)
    if isinstance(new, Fault):
        return new
    total = table.after(b, new)
    return Fault.LENGTH if total is None else total


def row_offsets(table: TableView, kind: np.dtype[Any], offsets: NDArray[Any] | None = None) -> tuple[NDArray[Any], int]:
    """(out `[B + 1]` of type `kind`, error word): sums of the tokens of the requests before each.

    A request whose tokens cannot be counted has none and is reported, and so is the first by whom the sum passes what
    `kind` holds; it then stops there.
    """
    faults, sums = FaultLog(), [0]
    for b in range(table.requests):
        tokens = tokens_of(table, offsets, b)
        if isinstance(tokens, Fault):
            faults.add(tokens, b, 0)
            tokens = 0
        sums.append(sums[-1] + tokens)
        if tokens and sums[-1] > largest(kind):
            faults.add(Fault.LENGTH, b, 0)
    return np.array([min(s, largest(kind)) for s in sums]).astype(kind), faults.word


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
