"""to_dense and to_csr: the pages of every request, as rows and as one list."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from kvgen.layout.dtypes import dtype
from kvgen.reference.faults import FaultLog
from kvgen.reference.lengths import largest, tokens_of
from kvgen.reference.tables import LIMIT, TableView, index
from kvgen.runtime.faults import Fault
from kvgen.spec.table import CSR


def _null(table: TableView, fill: int | None) -> int:
    """The entry of no page: `fill`, or the first whose page lies past the pool."""
    return -(-table.pages // table.cache.page_table.id_multiplier) if fill is None else fill


def _entry(table: TableView, b: int, i: int, faults: FaultLog) -> int | None:
    """The table's entry for page i of request b; None where it names none."""
    found = table.page(b, i)
    if isinstance(found, Fault):
        faults.add(found, b, min(i * table.tokens, LIMIT))
        return None
    return found[0] // table.cache.page_table.id_multiplier


def _pages_of_tokens(table: TableView, offsets: NDArray[Any] | None, b: int) -> tuple[int, int] | Fault:
    """Pages of request b's tokens, cached and new, and the tokens of the last one."""
    tokens = tokens_of(table, offsets, b)
    if isinstance(tokens, Fault):
        return tokens
    if not tokens:
        return 0, 0
    if not table.holds(b, tokens):
        return Fault.LENGTH
    pages = -(-tokens // table.tokens)
    return pages, tokens - (pages - 1) * table.tokens


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
        found = _slice(table, b) if sliced else _pages_of_tokens(table, row_offsets, b)
        pages = 0 if isinstance(found, Fault) else found if isinstance(found, int) else found[0]
        if isinstance(found, Fault):
            faults.add(found, b, 0)
        if pages > out.shape[1]:
            faults.add(Fault.POSITION, b, min(out.shape[1] * table.tokens, LIMIT))
        for i in range(out.shape[1]):
            entry = _entry(table, b, i, faults) if i < pages else None
            out[b, i] = _null(table, fill) if entry is None else entry
        if "last_page_len" in table.arrays:
            length = table.length(b)
            fits = length is not None and length <= largest(dtype(table.cache.lengths_dtype).numpy())
            if not fits and not isinstance(found, Fault):
                faults.add(Fault.LENGTH, b, 0)
            if lengths is not None:
                lengths[b] = length if fits else 0
    return faults.word


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
        found = _pages_of_tokens(table, row_offsets, b)
        pages, last = (0, 0) if isinstance(found, Fault) else found
        if isinstance(found, Fault):
            faults.add(found, b, 0)
        for i in range(pages):
            if end + i < len(indices):
                entry = _entry(table, b, i, faults)
                indices[end + i] = _null(table, fill) if entry is None else entry
        end += pages
        indptr[b + 1] = min(end, most)
        if last_page_len is not None:
            last_page_len[b] = last
        if pages and end > min(most, len(indices)):
            faults.add(Fault.TABLE, b, 0)
    return faults.word
