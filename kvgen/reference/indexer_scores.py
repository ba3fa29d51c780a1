"""indexer_scores: scores of every key for each query row, in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    those that it sees, or that are NaN; `terms` float64 `[T, N]`: the sum of magnitudes behind each score, and `largest` that of
    each head's largest product or sum of the first 32, 64, ... products; `failed` bool `[T]`: rows that are NaN throughout; the
    error word. Of lists, N is C and the keys of a block."""

    logits: Floats
    seen: NDArray[np.bool_]
    terms: Floats
    largest: Floats
    failed: NDArray[np.bool_]
    errors: int

    def first(self, columns: int) -> Scored:
        """The first `columns` of each row, of which none sees more keys than there are here."""
        more = columns - self.logits.shape[1]
        if more <= 0:
            of = {name: getattr(self, name)[:, :columns] for name in ("logits", "seen", "terms", "largest")}
            return replace(self, **of)
        lost = np.repeat(self.failed[:, None], more, axis=1)
        logits, none = np.where(lost, np.nan, -np.inf), np.zeros(lost.shape)
        pairs = ((self.logits, logits), (self.seen, lost), (self.terms, none), (self.largest, none))
        wide = [np.concatenate(pair, axis=1) for pair in pairs]
        return Scored(wide[0], wide[1], wide[2], wide[3], self.failed, self.errors)

    def block_max(self, block: int, *, pin_newest: bool = False) -> Scored:
        """The largest score of each `block` keys, NaN where one is; with `pin_newest` +inf in the block of the newest key that a
        row sees, unless one of its scores is NaN. `terms` and `largest` are the largest ones."""
        blocks = -(-self.logits.shape[1] // block)
        whole = self.first(blocks * block)
        maxima, seen, terms, largest = (
            x.reshape(len(x), blocks, block).max(axis=2) for x in (whole.logits, whole.seen, whole.terms, whole.largest)
        )
        for row in np.flatnonzero(~self.failed & self.seen.any(axis=1)) if pin_newest else ():
            newest = np.flatnonzero(self.seen[row])[-1] // block
            maxima[row, newest] = np.maximum(maxima[row, newest], np.inf)
        return Scored(maxima, seen, terms, largest, self.failed, self.errors)


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
    logits, seen = np.full((total, room), -np.inf), np.zeros((total, room), np.bool_)
    terms, largest, failed = np.zeros((total, room)), np.zeros((total, room)), np.zeros(total, np.bool_)
    wrong = row_offsets is not None and bool(total) and bad_total(row_offsets, total)
    if wrong:
        faults.add(Fault.ROW_OFFSETS, table.requests - 1, total)
    finder = Finder(table, [keys], None, Arguments({}, q.shape[1], 1), faults, partly=True)
    requests: dict[RowRange, Any] = {}
    for row in range(total):
        whose = _whose(table, row, total, rows, row_offsets)
        if whose is None:
            failed[row] = wrong
            continue
        if not whose.valid:
            faults.add(Fault.ROW_OFFSETS, whose.b, row)
        elif whose not in requests:
            requests[whose] = _request(table, finder, whose, room)
        found = requests.get(whose)
        failed[row] = found is None
        if found is None:
            continue
        visible = np.flatnonzero(found.visible[row - whose.begin])
        at = found.tokens[visible]
        logits[row, at], terms[row, at], largest[row, at] = key_scores(numbers[row], weights[row], found.k[visible, 0])
        logits[row, at[found.lost[visible]]] = np.nan
        seen[row, at] = True
    logits[failed], seen[failed] = np.nan, True
    return Scored(logits, seen, terms, largest, failed, faults.word)


def candidate_scores(
    table: TableView,
    keys: Rows,
    q: NDArray[Any],
    weights: NDArray[Any],
    candidates: NDArray[Any],
    block: int,
    *,
    rows: int = 1,
    row_offsets: NDArray[Any] | None = None,
    q_scales: NDArray[Any] | None = None,
) -> Scored:
    """The same scores of the keys of listed blocks: logits[t, c, j] is that of key candidates[t, c] * block + j, -inf where the
    row does not see it, or there is none of such a number.

    What is wrong with rows is as above, without a room. Of pages those of listed keys that a row sees are reported.
    """
    faults, (total, count) = FaultLog(), candidates.shape
    numbers = q.astype(np.float64) if q_scales is None else unpacked(q, q_scales)
    logits, seen = np.full((total, count, block), -np.inf), np.zeros((total, count, block), np.bool_)
    terms, largest, failed = np.zeros(seen.shape), np.zeros(seen.shape), np.zeros(total, np.bool_)
    wrong = row_offsets is not None and bool(candidates.size) and bad_total(row_offsets, total)
    if wrong:
        faults.add(Fault.ROW_OFFSETS, table.requests - 1, total)
    for row in range(total if count else 0):
        whose = _whose(table, row, total, rows, row_offsets)
        if whose is None:
            failed[row] = wrong
            continue
        if not whose.valid:
            faults.add(Fault.ROW_OFFSETS, whose.b, row)
        tokens = _tokens(table, whose, faults) if whose.valid else None
        failed[row] = tokens is None
        if tokens is None:
            continue
        sees = max(tokens - (whose.end - row) + 1, 0) // table.cache.entry_tokens
        for c, number in enumerate(candidates[row].tolist()):
            for j, key in enumerate(range(number * block, (number + 1) * block)):
                if not 0 <= key < sees:
                    continue
                seen[row, c, j] = True
                places = table.places(whose.b, key // table.tokens)
                if isinstance(places, Fault):
                    faults.add(places, whose.b, key)
                    logits[row, c, j] = np.nan
                    continue
                k = keys.token_numbers(whose.b, key, places[0])
                logits[row, c, j], terms[row, c, j], largest[row, c, j] = key_scores(numbers[row], weights[row], k[0])
    logits[failed], seen[failed] = np.nan, True
    return Scored(logits, seen, terms, largest, failed, faults.word)


def key_scores(q: Floats, weights: NDArray[Any], k: Floats) -> tuple[Any, Any, Any]:
    """Scores of keys `[n, head_dim]`, and `terms` and `largest` of Scored."""
    w, together = weights.astype(np.float64), np.zeros((len(q), *k.shape[:-1]))
    with np.errstate(invalid="ignore"):
        largest = np.abs(q).max(axis=1, initial=0).reshape(-1, *(1,) * (k.ndim - 1)) * np.abs(k).max(axis=-1, initial=0)
        for first in range(0, q.shape[1], 32):
            together = together + q[:, first : first + 32] @ k[..., first : first + 32].T
            largest = np.maximum(largest, np.abs(together))
        return w @ np.maximum(together, 0), np.abs(w) @ (np.abs(q) @ np.abs(k.T)), np.abs(w) @ largest


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
    tokens = _with_rows(table, whose)
    if tokens is not None and tokens < LIMIT and tokens // table.cache.entry_tokens > room:
        finder.faults.add(Fault.LENGTH, whose.b, tokens)
        return None
    return finder.request(whose)


def _with_rows(table: TableView, whose: RowRange) -> int | None:
    """The tokens of a request, its rows' included; None where its length is none."""
    length, rows = table.length(whose.b), whose.end - whose.begin
    return None if length is None else length + (rows if table.kv.lengths == "before" else 0)


def _tokens(table: TableView, whose: RowRange, faults: FaultLog) -> int | None:
    """The tokens of a request; None where they are none that it can have, which is reported."""
    tokens = _with_rows(table, whose)
    if tokens is None or tokens >= LIMIT or not table.holds(whose.b, tokens // table.cache.entry_tokens):
        faults.add(Fault.LENGTH, whose.b, LIMIT if tokens is None else min(tokens, LIMIT))
        return None
    return tokens
