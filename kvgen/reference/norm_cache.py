"""norm_cache: the norm of the step's rows of K or V as the cache holds them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.append import Change, Changed, NewRow, changed
from kvgen.reference.new_rows import stored_rows
from kvgen.reference.pool import Rows
from kvgen.reference.tables import TableView
from kvgen.schema.norm import Norm

Raw = NDArray[Any]


def norm_cache(
    table: TableView,
    pool: Rows,
    role: int,
    rows: int,
    *,
    row_offsets: Raw,
    norm: Norm,
    weight: Raw | None,
    norm_bias: Raw | None = None,
    kind: np.dtype[Any],
    latent: int = 0,
) -> tuple[list[NewRow], Changed, int]:
    """(where each of the `rows` new rows is, what it becomes, error word) in K, role 0, or V, role 1, whose rows are `pool`.

    Rows count as dequantized, not rounded; a norm that casts before its weights casts to `kind`, the cache's dtype. In latent
    rows only the first `latent` elements are normalised. Of a row that the cache does not hold anything may become.
    """
    found, values, word = stored_rows(table, pool, role, rows, row_offsets)
    unknown = ~np.isfinite(values).all(axis=(1, 2))
    values[unknown] = 0
    change = changed(values, Change(norm=norm, weight=weight, norm_bias=norm_bias, latent=latent), kind=kind)
    change.lost[unknown] = np.inf
    return found, change, word
