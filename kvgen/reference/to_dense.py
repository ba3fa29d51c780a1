"""to_dense: the pages of every request as rows of a table."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from kvgen.layout.dtypes import dtype
from kvgen.reference.faults import FaultLog
from kvgen.reference.lengths import largest
from kvgen.reference.page_lists import entry_of, null_entry, pages_of_tokens
from kvgen.reference.tables import LIMIT, TableView
from kvgen.runtime.faults import Fault


def to_dense(
    table: TableView,
    out: NDArray[Any],
    *,
    fill: int | None = None,
    row_offsets: NDArray[Any] | None = None,
    lengths: NDArray[Any] | None = None,
    page_tokens: int = 1,
) -> int:
    """Fill `out` `[B, C]` with the entries of every request's pages, and `lengths` `[B]`; returns the error word.

    With `page_tokens` n entries are slots of tokens, and pages n slots from a multiple of n on.
    """
    if page_tokens > 1:
        return _grouped(table, out, fill, row_offsets, page_tokens)
    faults = FaultLog()
    for b in range(table.requests):
        counted = table.form.counted_pages(b)
        found = pages_of_tokens(table, row_offsets, b) if counted is None else counted
        pages = 0 if isinstance(found, Fault) else found if isinstance(found, int) else found[0]
        if isinstance(found, Fault):
            faults.add(found, b, 0)
        if pages > out.shape[1]:
            faults.add(Fault.POSITION, b, min(out.shape[1] * table.tokens, LIMIT))
        for i in range(out.shape[1]):
            entry = entry_of(table, b, i, faults) if i < pages else None
            out[b, i] = null_entry(table, fill) if entry is None else entry
        if table.cache.page_table.counts_tokens:
            length = table.length(b)
            fits = length is not None and length <= largest(dtype(table.kv.lengths_dtype).numpy())
            if not fits and not isinstance(found, Fault):
                faults.add(Fault.LENGTH, b, 0)
            if lengths is not None:
                lengths[b] = length if fits else 0
    return faults.word


def _grouped(table: TableView, out: NDArray[Any], fill: int | None, row_offsets: NDArray[Any] | None, each: int) -> int:
    """Slots of tokens as pages of `each`."""
    faults = FaultLog()
    for b in range(table.requests):
        found = pages_of_tokens(table, row_offsets, b)
        tokens = 0 if isinstance(found, Fault) else found[0]
        if isinstance(found, Fault):
            faults.add(found, b, 0)
        out[b] = -(-table.pages // each) if fill is None else fill
        if tokens > out.shape[1] * each:
            faults.add(Fault.POSITION, b, min(out.shape[1] * each, LIMIT))
        for i, token in enumerate(range(0, min(tokens, out.shape[1] * each), each)):
            slot = entry_of(table, b, token, faults)
            if slot is not None and slot % each:
                faults.add(Fault.SLOT, b, token)
            elif slot is not None:
                out[b, i] = slot // each
    return faults.word
