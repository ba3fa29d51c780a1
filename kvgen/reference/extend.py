"""extend: softmax attention of any number of new rows of every request, in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.attention import Arguments, modified
from kvgen.reference.decode import Decoded, Finder, VisibleKeys, _v_dim, products, weighted
from kvgen.reference.faults import FaultLog
from kvgen.reference.pool import Rows
from kvgen.reference.tables import LIMIT, RowRange, TableView, bad_total, index
from kvgen.runtime.faults import Fault


@dataclass(frozen=True)
class Extended(Decoded):
    """As Decoded; rows of `doubtful` may be NaN instead: another row of their request sees a page that is not to be had."""

    doubtful: NDArray[np.bool_]


def extend(
    table: TableView,
    pools: Sequence[Rows],
    q: NDArray[Any],
    *,
    scale: float | None = None,
    q_scale: float = 1.0,
    out_scale: float = 1.0,
    row_offsets: NDArray[Any] | None = None,
    most_rows: int = LIMIT,
    mask: Any = None,
    cross: bool = False,
    score: Any = None,
    sinks: NDArray[Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
    lse_base: str = "e",
    lse_empty: str | float = "-inf",
    sinks_in_lse: bool = True,
) -> Extended:
    """Attend with q `[T, q_heads, head_dim]` to a request's living tokens, this step's included: all is as in decode, but
    for whose rows are whose, and for what a page costs that is not to be had.

    With `row_offsets[B + 1]` let m[b] be the largest of the first b + 1 offsets, a number that is none larger than all: the
    rows [m[b], m[b + 1]) below T are request b's. They are NaN (ROW_OFFSETS, at the first) unless those are its offsets, no
    larger than T, and the rows `most_rows` at most. Without offsets every request has T // B rows. Other rows are nobody's.

    A row that sees a token of an invalid page is NaN (at the token); rows of its request may be.
    """
    faults, total = FaultLog(), len(q)
    scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    out, lse = np.zeros((total, q.shape[1], _v_dim(table, pools))), np.full((total, q.shape[1]), float(lse_empty))
    doubtful = np.zeros(total, np.bool_)
    orphans = row_offsets is not None and bool(total) and bad_total(row_offsets, total)
    if orphans:
        faults.add(Fault.ROW_OFFSETS, table.requests - 1, total)
    known = Arguments(arguments or {}, q.shape[1], pools[0].heads)
    finder = Finder(table, pools, mask, known, faults, partly=True, cross=cross)
    seen: list[VisibleKeys | None] = [None if orphans else finder.nothing(row) for row in range(total)]
    for whose in _ranges(table.requests, total, row_offsets, most_rows):
        if not whose.valid:
            faults.add(Fault.ROW_OFFSETS, whose.b, whose.begin)
        request = finder.request(whose) if whose.valid else None
        for row in range(whose.begin, whose.end):
            i = row - whose.begin
            seen[row] = None if request is None or (request.visible[i] & request.lost).any() else request.seen(i)
            doubtful[row] = request is not None and request.lost.any()
    for row, found in enumerate(seen):
        if found is None:
            out[row], lse[row] = np.nan, np.nan
        elif len(found.k):
            scores = products(q[row].astype(np.float64) * q_scale, found.k, scale)
            scores = modified(score, found.at, found.tokens, scores[None], known)[0]
            some = ~np.isneginf(scores).all(axis=1)
            values = weighted(
                scores, found.v, None if sinks is None else sinks.astype(float), sinks_in_lse=sinks_in_lse
            )
            out[row] = values[0] / out_scale
            lse[row] = np.where(some, values[1] / (math.log(2) if lse_base == "2" else 1), lse[row])
    return Extended(out, lse, faults.word, tuple(seen), doubtful)


def _ranges(requests: int, total: int, row_offsets: NDArray[Any] | None, most_rows: int) -> list[RowRange]:
    """The rows of every request that has some, and whether they are what the offsets say."""
    if row_offsets is None:
        each = total // requests if requests else 0
        return [RowRange(b, b * each, (b + 1) * each, each <= most_rows) for b in range(requests) if each]
    if not requests:
        return []
    given = [LIMIT if (x := index(offset)) is None else x for offset in row_offsets[: requests + 1]]
    high, found = given[0], []
    for b, (begin, end) in enumerate(pairwise(given)):
        after = max(high, end)
        valid = begin == high and end == after and end <= total and end - begin <= most_rows
        rows = RowRange(b, min(high, total), min(after, total), valid)
        if rows.begin < rows.end:
            found.append(rows)
        high = after
    return found
