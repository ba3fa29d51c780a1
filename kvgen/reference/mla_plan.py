"""mla_plan: the keys of a batch, chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.faults import FaultLog
from kvgen.reference.lengths import largest, tokens_of
from kvgen.reference.tables import TableView
from kvgen.runtime.faults import Fault


@dataclass(frozen=True)
class Chunked:
    """`buffer_row_offsets` `[C, B + 1]`, `cache_offsets` `[C, B]`, `buffer_lengths` `[C]`, and the error word."""

    buffer_row_offsets: NDArray[Any]
    cache_offsets: NDArray[Any]
    buffer_lengths: NDArray[Any]
    errors: int


def mla_plan(
    table: TableView,
    chunks: int,
    buffer_token_size: int,
    alignment: int,
    kind: np.dtype[Any],
    row_offsets: NDArray[Any] | None = None,
) -> Chunked:
    """Fill so many buffers with the requests' keys, request by request, each padded to `alignment`.

    Row by row, as a consumer reads the answer: request b's rows of a chunk begin at its buffer_row_offsets and go on to
    the next request's. One that has none there lies at the chunk's end if it comes later, at its beginning if it was
    earlier. Keys that find no chunk are dropped and reported, as requests whose keys cannot be counted or had.
    """
    faults, padded = FaultLog(), []
    for b in range(table.requests):
        found = tokens_of(table, row_offsets, b)
        if not isinstance(found, Fault):
            rows = -(-found // alignment) * alignment
            found = rows if table.holds(b, found) and rows <= largest(kind) else Fault.LENGTH
        if isinstance(found, Fault):
            faults.add(found, b, 0)
            found = 0
        padded.append(found)
    offsets = np.zeros((chunks, len(padded) + 1), np.int64)
    consumed = np.zeros((chunks, len(padded)), np.int64)
    lengths = np.full(chunks, -1 if padded else 0, np.int64)
    left = list(padded)
    for c in range(chunks):
        at = 0
        for b in range(len(padded)):
            taken = min(left[b], buffer_token_size - at)
            offsets[c, b], consumed[c, b] = at, padded[b] - left[b]
            left[b] -= taken
            at += taken
        offsets[c, -1] = at
        if at:
            lengths[c] = at
    for b, rest in enumerate(left):
        if rest:
            faults.add(Fault.POSITION, b, padded[b] - rest)
    return Chunked(offsets.astype(kind), consumed.astype(kind), lengths.astype(np.int32), faults.word)
