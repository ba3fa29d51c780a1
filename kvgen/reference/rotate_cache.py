"""rotate_cache: RoPE of the step's rows of K as the cache holds them, and of q."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.append import Change, Changed, NewRow, changed
from kvgen.reference.new_rows import stored_rows
from kvgen.reference.pool import Rows
from kvgen.reference.tables import TableView
from kvgen.schema.model import Rope

Raw = NDArray[Any]


def rotate_cache(
    table: TableView,
    pool: Rows,
    rows: int,
    q: Raw | None,
    *,
    row_offsets: Raw,
    rope: Rope,
    latent: int = 0,
    limit: int = 2**24,
) -> tuple[list[NewRow], Changed, Changed | None, int]:
    """(where each of the `rows` new rows of K is, what it becomes, what q `[rows, q_heads, q_dim]` becomes, error word).

    A row rotates by its position in its request, of which K's and q's rows know nothing but what lengths and offsets say. Rows
    count as dequantized, not rounded; in latent rows the elements behind the first `latent` rotate. Of a row that the cache does
    not hold anything may become. Positions at or past `limit` have no angle.
    """
    found, values, word = stored_rows(table, pool, 0, rows, row_offsets, limit)
    unknown = ~np.isfinite(values).all(axis=(1, 2))
    values[unknown] = 0
    positions = np.array([at.position or 0 for at in found], np.int64)
    change = changed(values, Change(rope=rope, positions=positions, latent=latent))
    change.lost[unknown] = np.inf
    return found, change, None if q is None else changed(q, Change(rope=rope, positions=positions)), word
