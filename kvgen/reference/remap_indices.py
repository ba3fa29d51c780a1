"""remap_indices: where tokens that sparse attention picked are, counted through the whole pool."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from kvgen.reference.faults import FaultLog
from kvgen.reference.slots import slot_of
from kvgen.reference.tables import TableView, bad_total, request_of_row
from kvgen.runtime.faults import Fault


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
            place = slot_of(table, whose.b, token, out.dtype)
            if isinstance(place, Fault):
                faults.add(place, whose.b, token)
                place = -1
            out[row, j] = place
    return faults.word
