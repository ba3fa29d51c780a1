"""to_dense: the pages of every request as rows of a table."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from kvgen.layout.dtypes import dtype
from kvgen.reference.faults import FaultLog
from kvgen.reference.lengths import largest
from kvgen.reference.page_lists import entry_of, null_entry, pages_of_tokens
from kvgen.reference.tables import LIMIT, TableView, index
from kvgen.runtime.faults import Fault
from kvgen.spec.tables import CSR


def _slice(table: TableView, b: int) -> int | Fault:
    """Pages of request b in CSR's lists."""
    begin, end = (index(x) for x in table.arrays["page_indptr"][b : b + 2])
    if begin is None or end is None or not begin <= end <= len(table.arrays["page_indices"]):
        return Fault.TABLE
    return end - begin


def to_dense(
    table: TableView,
    out: NDArray[Any],
    *,
    fill: int | None = None,
    row_offsets: NDArray[Any] | None = None,
    lengths: NDArray[Any] | None = None,
) -> int:
    """Fill `out` `[B, C]` with the entries of every request's pages, and `lengths` `[B]`; returns the error word."""
    faults, sliced = FaultLog(), isinstance(table.cache.page_table, CSR)
    for b in range(table.requests):
        found = _slice(table, b) if sliced else pages_of_tokens(table, row_offsets, b)
        pages = 0 if isinstance(found, Fault) else found if isinstance(found, int) else found[0]
        if isinstance(found, Fault):
            faults.add(found, b, 0)
        if pages > out.shape[1]:
            faults.add(Fault.POSITION, b, min(out.shape[1] * table.tokens, LIMIT))
        for i in range(out.shape[1]):
            entry = entry_of(table, b, i, faults) if i < pages else None
            out[b, i] = null_entry(table, fill) if entry is None else entry
        if "last_page_len" in table.arrays:
            length = table.length(b)
            fits = length is not None and length <= largest(dtype(table.cache.lengths_dtype).numpy())
            if not fits and not isinstance(found, Fault):
                faults.add(Fault.LENGTH, b, 0)
            if lengths is not None:
                lengths[b] = length if fits else 0
    return faults.word
