"""Tokens of every request, cached and new."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

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
