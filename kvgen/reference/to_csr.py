"""to_csr: the pages of every request as one list."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from kvgen.reference.faults import FaultLog
from kvgen.reference.lengths import largest
from kvgen.reference.page_lists import entry_of, null_entry, pages_of_tokens
from kvgen.reference.tables import TableView
from kvgen.runtime.faults import Fault


def to_csr(
    table: TableView,
    indices: NDArray[Any],
    indptr: NDArray[Any],
    last_page_len: NDArray[Any] | None = None,
    *,
    fill: int | None = None,
    row_offsets: NDArray[Any] | None = None,
) -> int:
    """Fill `indices` `[I]`, `indptr` `[B + 1]` and `last_page_len` `[B]`; returns the error word."""
    faults, end, most = FaultLog(), 0, largest(indptr.dtype)
    indptr[0] = 0
    for b in range(table.requests):
        found = pages_of_tokens(table, row_offsets, b)
        pages, last = (0, 0) if isinstance(found, Fault) else found
        if isinstance(found, Fault):
            faults.add(found, b, 0)
        for i in range(pages):
            if end + i < len(indices):
                entry = entry_of(table, b, i, faults)
                indices[end + i] = null_entry(table, fill) if entry is None else entry
        end += pages
        indptr[b + 1] = min(end, most)
        if last_page_len is not None:
            last_page_len[b] = last
        if pages and end > min(most, len(indices)):
            faults.add(Fault.TABLE, b, 0)
    return faults.word
