"""gather: which cached token every output row is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.faults import FaultLog
from kvgen.reference.pool import Rows
from kvgen.reference.segments import Plain
from kvgen.reference.tables import LIMIT, Place, RowRange, TableView, bad_total, index, request_of_row
from kvgen.runtime.faults import Fault


@dataclass(frozen=True)
class Gathered:
    """`outputs`: K's and V's rows `[T, kv_heads, dim]`; `failed[T]`: rows that became NaN; `errors`: the error word."""

    outputs: tuple[NDArray[Any], ...]
    failed: NDArray[np.bool_]
    errors: int


@dataclass(frozen=True)
class Runs:
    """Rows of requests that begin anywhere: those of request b are the `counts[b]` from `begins[b]` on."""

    begins: NDArray[Any]
    counts: NDArray[Any]

    def _run(self, b: int) -> tuple[int, int]:
        begin, count = (LIMIT if index(x[b]) is None else int(x[b]) for x in (self.begins, self.counts))
        return begin, begin + count

    def past(self, rows: int) -> bool:
        """Whether the last run passes the rows."""
        return len(self.begins) > 0 and self._run(len(self.begins) - 1)[1] > rows

    def of_row(self, row: int, rows: int) -> RowRange | None:
        """The request of a row, found by halving, which with ascending begins gives the last that begins at or before it; None
        behind its run. It is valid where its run ends before the next one and the rows do, and that before it has ended."""
        low, high = 0, len(self.begins)
        if not high or row < self._run(0)[0]:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._run(middle)[0] <= row else (low, middle)
        begin, end = self._run(low)
        before = self._run(low - 1)[1] if low else 0
        after = min(rows, self._run(low + 1)[0]) if low + 1 < len(self.begins) else rows
        valid = before <= begin and end <= after
        return None if valid and row >= end else RowRange(low, begin, end, valid)


def positions(
    table: TableView,
    total: int,
    row_offsets: NDArray[Any] | Runs,
    starts: NDArray[Any] | None,
    faults: FaultLog,
) -> Iterator[tuple[int, int, int | None]]:
    """(row, request, position) of every row that belongs to a request; the position is None where it can be none.

    Row t of request b, counted from row_offsets[b] or the begin of its run, is token starts[b] + t (no starts: t).
    """
    if total and (row_offsets.past(total) if isinstance(row_offsets, Runs) else bad_total(row_offsets, total)):
        faults.add(Fault.ROW_OFFSETS, table.requests - 1, total)
    for row in range(total):
        whose = (
            row_offsets.of_row(row, total) if isinstance(row_offsets, Runs) else request_of_row(row_offsets, row, total)
        )
        if whose is None:
            continue
        if not whose.valid:
            faults.add(Fault.ROW_OFFSETS, whose.b, row)
            continue
        t = row - whose.begin
        start = 0 if starts is None else index(starts[whose.b])
        if start is None or start + whose.end - whose.begin >= LIMIT:
            faults.add(Fault.LENGTH, whose.b, t)
            yield row, whose.b, None
        else:
            yield row, whose.b, start + t


def _found(table: TableView, b: int, position: int | None, faults: FaultLog) -> tuple[Place, Place] | None:
    """Where a cached token is; None, and a fault, where nowhere."""
    if position is None:
        return None
    alive = table.stored(b, position)
    places = table.places(b, position // table.tokens) if alive else Fault.POSITION
    if isinstance(places, Fault):
        faults.add(places, b, position)
        return None
    return places


def slotted(
    table: TableView, slots: NDArray[Any], faults: FaultLog
) -> Iterator[tuple[int, int, tuple[Place, Place] | None]]:
    """(row, token of its page, where that is) of every row with a slot: page * tokens of a page + token. -1 is none; a slot
    past the pool is reported and lies nowhere."""
    for row, slot in enumerate(slots.astype(np.int64).tolist()):
        page, token = divmod(slot, table.tokens)
        if slot == -1:
            continue
        if 0 <= page < table.pages:
            yield row, token, (Place(page, page),) * 2
        else:
            faults.add(Fault.SLOT, row, row)
            yield row, 0, None


def _sources(
    table: TableView,
    total: int,
    row_offsets: NDArray[Any] | Runs | None,
    starts: NDArray[Any] | None,
    slots: NDArray[Any] | None,
    faults: FaultLog,
) -> Iterator[tuple[int, int, int, tuple[Place, Place] | None]]:
    """(row, request, position, where the token is) of every row that is written; a slot's is a position in its page."""
    if slots is not None:
        for row, token, places in slotted(table, slots, faults):
            yield row, 0, token, places
        return
    assert row_offsets is not None
    for row, b, position in positions(table, total, row_offsets, starts, faults):
        yield row, b, position or 0, _found(table, b, position, faults)


def gather(
    table: TableView,
    pools: Sequence[Rows],
    before: Sequence[NDArray[Any]],
    *,
    row_offsets: NDArray[Any] | Runs | None = None,
    starts: NDArray[Any] | None = None,
    slots: NDArray[Any] | None = None,
) -> Gathered:
    """Row t of request b, counted from row_offsets[b] or the begin of its run, is the cached token starts[b] + t (no starts:
    t); with `slots` row t is the token in slots[t], whatever the table says, and -1 leaves it as it was.

    `before` are the output arrays as they were; rows of no request, and rows whose offsets contradict each other, keep
    their bytes. A row whose token has no valid page, or is no longer or not yet in
    a ring, is NaN. Quantized tokens are dequantized and rounded to the cache's dtype once; plain parts of a row are copied
    bit for bit. In a residual cache, tokens that are not sealed come from the tail.
    """
    faults, total = FaultLog(), len(before[0])
    outputs, failed = tuple(b.copy() for b in before), np.zeros(total, bool)
    for row, b, position, places in _sources(table, total, row_offsets, starts, slots, faults):
        failed[row] = places is None
        for pool, out, place in zip(pools, outputs, places or (None, None), strict=False):
            out[row] = np.nan if place is None else pool.token(b, position, place)
    return Gathered(outputs, failed, faults.word)


def stored(rows: Rows, role: str, token: int, place: Place) -> dict[str, NDArray[Any]]:
    """What memory holds of a token, by name: codes (bytes, packed ones as memory has them), scales, and plain values.

    `role` is "k" or "v"; a plain part is called after it, with `_rope` behind it where it is not the row's first.
    """
    found: dict[str, NDArray[Any]] = {}
    for part in rows.parts:
        if isinstance(part, Plain):
            found[_name(role, part, rows)] = part.elements.read(place.page, token)
            continue
        found[f"{role}_codes"] = part.codes.as_stored(part.codes.read(place.page, token))
        if part.scales is not None:
            found[f"{role}_scales"] = part.scales.read(place.scales, token)
    return found


def put_stored(rows: Rows, role: str, token: int, place: Place, given: Mapping[str, NDArray[Any]]) -> None:
    """The inverse of `stored`."""
    for part in rows.parts:
        if isinstance(part, Plain):
            part.elements.write(place.page, token, given[_name(role, part, rows)])
            continue
        part.codes.write(place.page, token, part.codes.unpacked(given[f"{role}_codes"]))
        if part.scales is not None:
            part.scales.write(place.scales, token, given[f"{role}_scales"])


def _name(role: str, part: Plain, rows: Rows) -> str:
    return role if part is rows.parts[0] else f"{role}_rope"


def gather_raw(
    table: TableView,
    pools: Sequence[Rows],
    before: Mapping[str, NDArray[Any]],
    *,
    row_offsets: NDArray[Any] | Runs | None = None,
    starts: NDArray[Any] | None = None,
    slots: NDArray[Any] | None = None,
) -> tuple[dict[str, NDArray[Any]], NDArray[np.bool_], int]:
    """gather of what is stored: (arrays by their names as in `before`, failed rows, the error word).

    Of failed rows scales and plain values are NaN and codes 0xff.
    """
    faults, total = FaultLog(), len(next(iter(before.values())))
    outputs, failed = {name: array.copy() for name, array in before.items()}, np.zeros(total, bool)
    for row, _, position, places in _sources(table, total, row_offsets, starts, slots, faults):
        if places is None:
            failed[row] = True
            for name, array in outputs.items():
                array[row] = 0xFF if name.endswith("_codes") else np.nan
            continue
        for rows, role, place in zip(pools, "kv", places, strict=False):
            for name, value in stored(rows, role, position % table.tokens, place).items():
                outputs[name][row] = value
    return outputs, failed, faults.word
