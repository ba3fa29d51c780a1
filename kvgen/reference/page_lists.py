"""Entries of page tables, as they are copied from one form to another."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from kvgen.reference.faults import FaultLog
from kvgen.reference.lengths import tokens_of
from kvgen.reference.tables import LIMIT, TableView
from kvgen.runtime.faults import Fault


def null_entry(table: TableView, fill: int | None) -> int:
    """The entry of no page: `fill`, or the first whose page lies past the pool."""
    return -(-table.pages // table.cache.page_table.id_multiplier) if fill is None else fill


def entry_of(table: TableView, b: int, i: int, faults: FaultLog) -> int | None:
    """The table's entry for page i of request b; None where it names none."""
    found = table.page(b, i)
    if isinstance(found, Fault):
        faults.add(found, b, min(i * table.tokens, LIMIT))
        return None
    return found[0] // table.cache.page_table.id_multiplier


def pages_of_tokens(table: TableView, offsets: NDArray[Any] | None, b: int) -> tuple[int, int] | Fault:
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
