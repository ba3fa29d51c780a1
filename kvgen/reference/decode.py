"""decode: softmax attention of one query row per request, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.faults import FaultLog
from kvgen.reference.pool import Rows
from kvgen.reference.tables import LIMIT, TableView, bad_total, request_of_row
from kvgen.runtime.faults import Fault
from kvgen.spec.cache import Latent

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Seen:
    """What one query row attends to: K `[n, kv_heads, head_dim]` and V `[n, kv_heads, v_dim]`, float64."""

    k: Floats
    v: Floats


@dataclass(frozen=True)
class Decoded:
    """`out` float64 `[T, q_heads, v_dim]`, `lse` float64 `[T, q_heads]`, the error word, and what each row attended to
    (None for rows that became NaN)."""

    out: Floats
    lse: Floats
    errors: int
    seen: tuple[Seen | None, ...]


def attend(q: Floats, k: Floats, v: Floats, scale: float) -> tuple[Floats, Floats]:
    """Softmax attention of one row: q `[q_heads, head_dim]`, k and v `[n, kv_heads, dim]` -> out `[q_heads, v_dim]` and
    the natural log-sum-exp `[q_heads]`. Query head h uses kv head h // (q_heads / kv_heads). No tokens: 0 and -inf.
    """
    group = len(q) // k.shape[1]
    if not len(k):
        return np.zeros((len(q), v.shape[2])), np.full(len(q), -np.inf)
    heads = np.arange(len(q)) // group
    scores = scale * np.einsum("hd,nhd->hn", q, k[:, heads])
    top = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=1)
    return np.einsum("hn,nhd->hd", weights, v[:, heads]) / total[:, None], top[:, 0] + np.log(total)


def decode(
    table: TableView,
    pools: Sequence[Rows],
    q: NDArray[Any],
    *,
    scale: float | None = None,
    row_offsets: NDArray[Any] | None = None,
) -> Decoded:
    """Attend with q `[T, q_heads, head_dim]` to all of a request's living tokens, this step's included.

    Row t is request t's, or with `row_offsets[B + 1]` its whose one row it is. `scale` defaults to 1 / sqrt(head_dim).
    Quantized K and V are taken as dequantized, not rounded to the cache's dtype. With one pool, of latent rows, V is the
    first `latent_dim` dims of K.

    Rows of no request and requests without tokens give 0 and -inf. A request gives NaN in out and log-sum-exp if its
    length is invalid or more than its table can hold (LENGTH, at the number of tokens, 2^32 - 1 for no number), if one
    of its tokens' pages is invalid (at that token), or if its offsets contradict each other or give it several rows
    (ROW_OFFSETS, at the row). Where the last offset is wrong, rows of no request are NaN too.
    """
    faults, total = FaultLog(), len(q)
    scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    out, lse = np.zeros((total, q.shape[1], _v_dim(table, pools))), np.full((total, q.shape[1]), -np.inf)
    seen: list[Seen | None] = []
    if row_offsets is not None and total and bad_total(row_offsets, total):
        faults.add(Fault.ROW_OFFSETS, table.requests - 1, total)
    for row in range(total):
        found = _see(table, pools, row, total, row_offsets, faults)
        seen.append(found)
        if found is None:
            out[row], lse[row] = np.nan, np.nan
        else:
            out[row], lse[row] = attend(q[row].astype(np.float64), found.k, found.v, scale)
    return Decoded(out, lse, faults.word, tuple(seen))


def _v_dim(table: TableView, pools: Sequence[Rows]) -> int:
    if len(pools) > 1:
        return pools[1].dim
    return table.cache.latent_dim if isinstance(table.cache, Latent) else pools[0].dim


def _see(
    table: TableView, pools: Sequence[Rows], row: int, rows: int, row_offsets: NDArray[Any] | None, faults: FaultLog
) -> Seen | None:
    """The tokens of one row; reports and returns None where they cannot be had."""
    heads, v_dim = pools[0].heads, _v_dim(table, pools)
    nothing = Seen(np.zeros((0, heads, pools[0].dim)), np.zeros((0, heads, v_dim)))
    b = row
    if row_offsets is not None:
        whose = request_of_row(row_offsets, row, rows)
        if whose is None:
            return None if bad_total(row_offsets, rows) else nothing
        b = whose.b
        if not whose.valid or whose.end - whose.begin != 1:
            faults.add(Fault.ROW_OFFSETS, b, row)
            return None
    elif row >= table.requests:
        return nothing
    length = table.length(b)
    tokens = LIMIT if length is None else length + (table.cache.lengths == "before")
    if length is None or not table.holds(b, tokens):
        faults.add(Fault.LENGTH, b, tokens)
        return None
    keys, values, whole = [], [], True
    for token in range(table.first_token(tokens), tokens):
        places = table.places(b, token // table.tokens)
        if isinstance(places, Fault):
            faults.add(places, b, token)
            whole = False
            continue
        keys.append(pools[0].token_numbers(b, token, places[0]))
        values.append(pools[1].token_numbers(b, token, places[1]) if len(pools) > 1 else keys[-1][:, :v_dim])
    if not whole:
        return None
    return Seen(np.stack(keys), np.stack(values)) if keys else nothing
