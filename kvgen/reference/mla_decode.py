"""mla_decode: attention over latent rows in float64, of a request's tokens or of a list of physical rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.attention import RowPosition
from kvgen.reference.decode import Decoded, VisibleKeys, decode, products, weighted
from kvgen.reference.faults import FaultLog
from kvgen.reference.pool import Rows
from kvgen.reference.tables import TableView, index
from kvgen.runtime.faults import Fault


def mla_decode(
    table: TableView,
    rows_of_k: Rows,
    q: NDArray[Any],
    *,
    scale: float,
    rows: int = 1,
    row_offsets: NDArray[Any] | None = None,
    sinks: NDArray[Any] | None = None,
    sinks_in_lse: bool = True,
    lse_base: str = "e",
    lse_empty: str | float = "-inf",
) -> Decoded:
    """Attend with q `[T, q_heads, latent_dim + rope_dim]` to each request's latent rows; V is their first `latent_dim` dims.

    As `decode` in everything else: which rows are whose, what they see, what faults do.
    """
    return decode(
        table,
        [rows_of_k],
        q,
        scale=scale,
        rows=rows,
        row_offsets=row_offsets,
        sinks=sinks,
        sinks_in_lse=sinks_in_lse,
        lse_base=lse_base,
        lse_empty=lse_empty,
    )


@dataclass(frozen=True)
class Listed:
    """Rows of a cache, `pages` pages of `tokens` tokens, and the lists `indices` `[T, K]` of some of them: page * tokens +
    offset. -1 is skipped, and so is what comes after the first `counts[t]` entries (None: all K count)."""

    rows: Rows
    pages: int
    tokens: int
    indices: NDArray[Any]
    counts: NDArray[Any] | None = None

    def count(self, row: int) -> int | None:
        """How many entries of list `row` count; None for more than it has, and for less than none."""
        entries = self.indices.shape[1]
        count = entries if self.counts is None else index(self.counts[row])
        return count if count is not None and count <= entries else None

    def named(self, row: int) -> list[NDArray[Any]] | None:
        """The rows that list `row` names, each `[1, dim]`; None where it names one that there is not."""
        found = [int(n) for n in self.indices[row][: self.count(row)] if n != -1]
        if any(not 0 <= n < self.pages * self.tokens for n in found):
            return None
        return [self.rows.numbers(n // self.tokens, n % self.tokens) for n in found]


def mla_decode_sparse(
    lists: Sequence[Listed],
    q: NDArray[Any],
    *,
    v_dim: int,
    scale: float,
    sinks: NDArray[Any] | None = None,
    sinks_in_lse: bool = True,
    lse_base: str = "e",
    lse_empty: str | float = "-inf",
) -> Decoded:
    """Attend with every row of q to the rows that its lists name, in one cache or several, under one softmax; V is their first
    `v_dim` dims. Sinks as in `decode`.

    A row without entries gives 0 and `lse_empty`. Its out and log-sum-exp are NaN where one of its lists is wrong: lists are
    read where the counts of all of them are right.
    """
    faults, total, heads = FaultLog(), len(q), q.shape[1]
    out, lse = np.zeros((total, heads, v_dim)), np.full((total, heads), float(lse_empty))
    seen: list[VisibleKeys | None] = []
    for row in range(total):
        named = _named(lists, row, faults)
        if named is None:
            out[row], lse[row] = np.nan, np.nan
            seen.append(None)
            continue
        k = np.stack(named) if named else np.zeros((0, 1, q.shape[2]))
        at = RowPosition(row, row, np.array([0]), 1, len(named))
        seen.append(VisibleKeys(k, k[:, :, :v_dim], at, np.arange(len(named), dtype=np.int64)))
        if named:
            scores = products(q[row].astype(np.float64), k, scale)
            values = weighted(scores, k[:, :, :v_dim], sinks, sinks_in_lse=sinks_in_lse)
            out[row], lse[row] = values[0], values[1] / (math.log(2) if lse_base == "2" else 1)
    return Decoded(out, lse, faults.word, tuple(seen))


def _named(lists: Sequence[Listed], row: int, faults: FaultLog) -> list[NDArray[Any]] | None:
    """The rows of every list of a row of q, one list's behind the other's; None, and a report, where one is wrong: LENGTH at
    its count (2^32 - 1 for a negative one), SLOT at the row."""
    wrong = [each for each in lists if each.count(row) is None]
    for each in wrong:
        assert each.counts is not None
        count = index(each.counts[row])
        faults.add(Fault.LENGTH, row, 2**32 - 1 if count is None else count)
    if wrong:
        return None
    found = [each.named(row) for each in lists]
    if any(rows is None for rows in found):
        faults.add(Fault.SLOT, row, row)
        return None
    return [k for rows in found for k in rows or ()]
