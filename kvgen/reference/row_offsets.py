"""row_offsets: where the tokens of every request begin behind each other."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.faults import FaultLog
from kvgen.reference.lengths import largest, tokens_of
from kvgen.reference.tables import TableView
from kvgen.runtime.faults import Fault


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
