"""slot_mapping and remap_indices: where tokens are, counted through the whole pool."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.faults import FaultLog
from kvgen.reference.tables import TableView, bad_total, request_of_row
from kvgen.runtime.faults import Fault


def slot_mapping(table: TableView, offsets: NDArray[Any], slots: NDArray[Any]) -> int:
    """Fill `slots` `[T]` with the place of each new row, or -1; returns the error word."""
    faults, total = FaultLog(), len(slots)
    if total and bad_total(offsets, total):
        faults.add(Fault.ROW_OFFSETS, table.requests - 1, total)
    for row in range(total):
        slots[row] = -1
        whose = request_of_row(offsets, row, total)
        if whose is None:
            continue
        if not whose.valid:
            faults.add(Fault.ROW_OFFSETS, whose.b, row)
            continue
        count, t = whose.end - whose.begin, row - whose.begin
        after = table.after(whose.b, count)
        if after is None:
            faults.add(Fault.LENGTH, whose.b, t)
            continue
        position = after - count + t
        if table.overtaken(position // table.tokens, after):
            continue
        place = _place(table, whose.b, position, slots.dtype)
        if isinstance(place, Fault):
            faults.add(place, whose.b, position)
        else:
            slots[row] = place
    return faults.word


def remap_indices(table: TableView, offsets: NDArray[Any], indices: NDArray[Any], out: NDArray[Any]) -> int:
    """Fill `out` `[T, J]` with the places of tokens `indices` `[T, J]`, or negative numbers; returns the error word."""
    faults, total = FaultLog(), len(indices)
    if out.size and bad_total(offsets, total):
        faults.add(Fault.ROW_OFFSETS, table.requests - 1, total)
    for row in range(total if out.size else 0):
        whose = request_of_row(offsets, row, total)
        if whose is not None and not whose.valid:
            faults.add(Fault.ROW_OFFSETS, whose.b, row)
        for j, token in enumerate(indices[row].tolist()):
            if token < 0 or whose is None or not whose.valid:
                out[row, j] = min(token, -1)
                continue
            place = _place(table, whose.b, token, out.dtype)
            if isinstance(place, Fault):
                faults.add(place, whose.b, token)
                place = -1
            out[row, j] = place
    return faults.word


def _place(table: TableView, b: int, token: int, kind: np.dtype[Any]) -> int | Fault:
    """The page of a token times a page's tokens, and its place in the page."""
    found = table.page(b, token // table.tokens)
    if isinstance(found, Fault):
        return found
    place = found[0] * table.tokens + token % table.tokens
    return place if place <= np.iinfo(kind).max else Fault.SLOT
