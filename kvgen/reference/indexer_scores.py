"""indexer_scores: scores of every key for each query row, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.attention import Arguments
from kvgen.reference.decode import Finder
from kvgen.reference.faults import FaultLog
from kvgen.reference.pool import Rows
from kvgen.reference.quant import unpack_nibbles, values
from kvgen.reference.tables import LIMIT, RowRange, TableView, bad_total, request_of_row
from kvgen.runtime.faults import Fault

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Scored:
    """`logits` float64 `[T, N]`: NaN where a key or a row has none, -inf for keys that a row does not see; `seen` bool `[T, N]`:
    those that it sees, or that are NaN; `terms` float64 `[T, N]`: the sum of magnitudes behind each score; the error word."""

    logits: Floats
    seen: NDArray[np.bool_]
    terms: Floats
    errors: int


def indexer_scores(
    table: TableView,
    keys: Rows,
    q: NDArray[Any],
    weights: NDArray[Any],
    room: int,
    *,
    rows: int = 1,
    row_offsets: NDArray[Any] | None = None,
    q_scales: NDArray[Any] | None = None,
) -> Scored:
    """Scores of q `[T, q_heads, head_dim]` with `weights[T, q_heads]` for the first `room` keys of each row's request.

    logits[t, j] = sum over h of weights[t, h] * max(q[t, h] . k[j], 0), with k as it is stored, dequantized. With `q_scales` i32
    `[T, q_heads]` q is pairs of e2m1 codes, u8 `[T, q_heads, head_dim / 2]`, and each byte of a word the scale of 32 dims.

    Request b's rows are `rows` from b * rows on, or with `row_offsets[B + 1]` its own. Of n tokens row i of r sees the keys up
    to n - r + i, or, where keys stand for several tokens, those whose last token is among them.

    A key in an invalid page is NaN (reported at its token), as is a whole row whose request has a length that is invalid or
    above `room` (LENGTH, at the number of tokens), whose offsets contradict each other, or of which the call lacks rows
    (ROW_OFFSETS, at the row). Where the last offset is wrong, rows of no request are NaN too.
    """
    faults, total = FaultLog(), len(q)
    numbers = q.astype(np.float64) if q_scales is None else unpacked(q, q_scales)
    logits, seen, terms = np.full((total, room), -np.inf), np.zeros((total, room), np.bool_), np.zeros((total, room))
    wrong = row_offsets is not None and bool(total) and bad_total(row_offsets, total)
    if wrong:
        faults.add(Fault.ROW_OFFSETS, table.requests - 1, total)
    finder = Finder(table, [keys], None, Arguments({}, q.shape[1], 1), faults, partly=True)
    requests: dict[RowRange, Any] = {}
    for row in range(total):
        whose = _whose(table, row, total, rows, row_offsets)
        if whose is None:
            if wrong:
                logits[row], seen[row] = np.nan, True
            continue
        if not whose.valid:
            faults.add(Fault.ROW_OFFSETS, whose.b, row)
        elif whose not in requests:
            requests[whose] = _request(table, finder, whose, room)
        found = requests.get(whose)
        if found is None:
            logits[row], seen[row] = np.nan, True
            continue
        visible = np.flatnonzero(found.visible[row - whose.begin])
        at, w = found.tokens[visible], weights[row].astype(np.float64)
        k, x = found.k[visible, 0], numbers[row]
        with np.errstate(invalid="ignore"):
            products = x @ k.T
            logits[row, at] = w @ np.maximum(products, 0)
            terms[row, at] = np.abs(w) @ (np.abs(x) @ np.abs(k.T))
        logits[row, at[found.lost[visible]]] = np.nan
        seen[row, at] = True
    return Scored(logits, seen, terms, faults.word)


def unpacked(q: NDArray[Any], q_scales: NDArray[Any]) -> Floats:
    """The numbers `[T, heads, dim]` of e2m1 codes with an e8m0 scale for 32 dims, of which four are a word."""
    codes = values(unpack_nibbles(q), "e2m1") if q.size else np.zeros((*q.shape[:2], 2 * q.shape[2]))
    numbers: Floats = codes * np.repeat(e8m0_scales(q_scales), 32, axis=-1)
    return numbers


def e8m0_scales(words: NDArray[Any]) -> Floats:
    """The powers of two `[..., 4]` whose exponents + 127 are the bytes of words; 255 is NaN."""
    exponents = words.astype(np.int64)[..., None] >> np.array([0, 8, 16, 24]) & 255
    scales: Floats = np.where(exponents == 255, np.nan, np.ldexp(1.0, exponents - 127))
    return scales


def _whose(table: TableView, row: int, total: int, rows: int, row_offsets: NDArray[Any] | None) -> RowRange | None:
    """Whose row it is, by the offsets around it; None: nobody's."""
    if row_offsets is not None:
        return request_of_row(row_offsets, row, total)
    b = row // rows
    return RowRange(b, b * rows, (b + 1) * rows, (b + 1) * rows <= total) if b < table.requests else None


def _request(table: TableView, finder: Finder, whose: RowRange, room: int) -> Any:
    """What the rows of a request see; None where its length is wrong, which is reported."""
    length, rows = table.length(whose.b), whose.end - whose.begin
    tokens = None if length is None else length + (rows if table.kv.lengths == "before" else 0)
    if tokens is not None and tokens < LIMIT and tokens // table.cache.entry_tokens > room:
        finder.faults.add(Fault.LENGTH, whose.b, tokens)
        return None
    return finder.request(whose)
