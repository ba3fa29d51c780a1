"""Whose rows they are: requests found by the offsets of their rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.tables.base import LIMIT, index


@dataclass(frozen=True)
class RowRange:
    """Whose row it is: request `b` has rows [begin, end); `valid` is False where the offsets around it contradict."""

    b: int
    begin: int
    end: int
    valid: bool


def request_of_row(offsets: NDArray[Any], row: int, rows: int) -> RowRange | None:
    """The request of one of `rows` rows, by `offsets[B + 1]`; None for a row of no request: before offsets[0], or
    padding at and past offsets[B].

    The request is found by halving, which with sorted offsets gives the b with offsets[b] <= row < offsets[b + 1]. A
    row is valid only if the offsets around it, offsets[b - 1] to offsets[b + 2], do not decrease and its request's own
    do not pass `rows`.
    """
    batch = len(offsets) - 1

    def value(i: int) -> int:
        found = index(offsets[i])
        return LIMIT if found is None else found

    if batch == 0 or row >= value(batch):
        return None
    low, high = 0, batch
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if value(middle) <= row else (low, middle)
    begin, end = value(low), value(low + 1)
    around = [value(i) for i in range(max(low - 1, 0), min(low + 3, batch + 1))]
    if low == 0 and row < begin <= end:
        return None
    return RowRange(low, begin, end, bool(np.all(np.diff(around) >= 0)) and begin <= row < end <= rows)


def bad_total(offsets: NDArray[Any], rows: int) -> bool:
    """Whether offsets[B] passes the rows or lies before offsets[B - 1]."""
    values = [LIMIT if index(x) is None else int(x) for x in offsets[-2:]]
    return len(offsets) > 1 and (values[1] > rows or values[1] < values[0])
