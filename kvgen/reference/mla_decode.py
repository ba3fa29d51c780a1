"""mla_decode: attention over latent rows in float64, of a request's tokens or of a list of physical rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.attention import Standing
from kvgen.reference.decode import Decoded, Seen, attend, decode
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
        lse_base=lse_base,
        lse_empty=lse_empty,
    )


def mla_decode_sparse(
    table: TableView,
    rows_of_k: Rows,
    q: NDArray[Any],
    indices: NDArray[Any],
    topk_lengths: NDArray[Any] | None = None,
    *,
    scale: float,
    lse_base: str = "e",
    lse_empty: str | float = "-inf",
) -> Decoded:
    """Attend with every row of q to the physical rows that `indices` `[T, K]` names: page * tokens of a page + offset.

    -1 is skipped, and so is what comes after the first `topk_lengths[t]` entries. A row without entries gives 0 and
    `lse_empty`. Its out and log-sum-exp are NaN where an entry names no row of the pool (SLOT, at the row), or its length is
    none, or more than K (LENGTH, at that number, 2^32 - 1 for none).
    """
    latent, faults = table.kv.latent_part, FaultLog()
    total, heads = len(q), q.shape[1]
    out, lse = np.zeros((total, heads, latent)), np.full((total, heads), float(lse_empty))
    seen: list[Seen | None] = []
    for row in range(total):
        listed = _listed(table, row, indices[row], topk_lengths, faults)
        if listed is None:
            out[row], lse[row] = np.nan, np.nan
            seen.append(None)
            continue
        found = [rows_of_k.numbers(n // table.tokens, n % table.tokens) for n in listed]
        k = np.stack(found) if found else np.zeros((0, 1, q.shape[2]))
        at = Standing(row, row, np.array([0]), 1, len(found))
        seen.append(Seen(k, k[:, :, :latent], at, np.arange(len(found), dtype=np.int64)))
        if found:
            values = attend(q[row].astype(np.float64), k, k[:, :, :latent], scale)
            out[row], lse[row] = values[0], values[1] / (math.log(2) if lse_base == "2" else 1)
    return Decoded(out, lse, faults.word, tuple(seen))


def _listed(
    table: TableView, row: int, entries: NDArray[Any], lengths: NDArray[Any] | None, faults: FaultLog
) -> list[int] | None:
    """The physical rows that a list names; reports and returns None where it names what there is not."""
    count = len(entries) if lengths is None else index(lengths[row])
    if count is None or count > len(entries):
        faults.add(Fault.LENGTH, row, 2**32 - 1 if count is None else count)
        return None
    listed = [int(n) for n in entries[:count] if n != -1]
    if any(not 0 <= n < table.pages * table.tokens for n in listed):
        faults.add(Fault.SLOT, row, row)
        return None
    return listed
