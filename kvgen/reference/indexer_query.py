"""indexer_query: an indexer's query rows behind RoPE and Hadamard transform, in float64; a scale a head, and its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.append import Changed
from kvgen.reference.faults import FaultLog
from kvgen.reference.hadamard import hadamard as transformed
from kvgen.reference.quant import choose
from kvgen.reference.rope import Table, rotate, rotate_error
from kvgen.reference.tables import index
from kvgen.runtime.faults import Fault
from kvgen.schema.model import Rope

Raw = NDArray[Any]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Query:
    """Rows `[T, heads, dim]` before they are quantized, not rounded; which of them are `known`; and the error word."""

    change: Changed
    known: NDArray[np.bool_]
    word: int


def indexer_query(
    q: Raw,
    *,
    rope: Rope | None = None,
    local: bool = False,
    positions: Raw | None = None,
    table: Table | None = None,
    hadamard: bool = False,
    limit: int = 2**24,
) -> Query:
    """q `[T, heads, dim]`, rotated by its `positions[T]`, then transformed.

    A row whose position is negative, at or past `limit` or the table's rows, is unknown and reported.
    """
    x, faults = q.astype(np.float64), FaultLog()
    lost, known = np.zeros(x.shape), np.ones(len(x), np.bool_)
    if rope is not None:
        assert positions is not None
        most = limit if table is None else len(table.values)
        for row, given in enumerate(positions):
            position = index(given)
            known[row] = position is not None and position < most
            if not known[row]:
                faults.add(Fault.POSITION, row, row)
        at = np.where(known, positions.astype(np.int64), 0)
        lost = rotate_error(x, rope, np.dtype(np.float32), part=rope.part)
        x = rotate(x, at, rope, cos_sin=table, part=rope.part, local=local)
    if hadamard:
        x, lost = transformed(x, lost)
    return Query(Changed(x, lost), known, faults.word)


def head_scales(rows: Raw, recipe: str, amax_min: float) -> Floats:
    """The scale of each head of rows `[T, heads, dim]`, f32: of the largest magnitude, which is at least `amax_min`."""
    return _scales(rows, "e4m3", recipe, amax_min)


def block_scales(rows: Raw, amax_min: float) -> Floats:
    """Scales of e2m1 codes, `[T, heads, dim / 32]`: a power of two for 32 dims."""
    return _scales(rows.reshape(*rows.shape[:-1], rows.shape[-1] // 32, 32), "e2m1", "pow2", amax_min)


def _scales(rows: Raw, code: str, recipe: str, amax_min: float) -> Floats:
    amax = np.abs(rows.astype(np.float32)).max(axis=-1, keepdims=True)
    scales, _ = choose(np.maximum(amax, np.float32(amax_min)), code, "f32", recipe)
    return scales.astype(np.float64)


def words_of(scales: Floats) -> Raw:
    """Powers of two `[..., 4]` as i32 words of exponents + 127; NaN and infinity are 255."""
    finite = np.isfinite(scales)
    exponents = np.where(finite, np.frexp(np.where(finite, scales, 1))[1] + 126, 255).astype(np.int64)
    words: Raw = (exponents @ np.array([1, 1 << 8, 1 << 16, 1 << 24])).astype(np.uint32).view(np.int32)
    return words


def e2m1_half_step(rows: Floats, scales: Floats) -> Floats:
    """Half of what lies between the e2m1 codes around each number, in steps of its scale: 0.25 below 2, 0.5 below 4, else 1."""
    with np.errstate(all="ignore"):
        size = np.abs(rows) / scales
    half: Floats = np.where(size < 2, 0.25, np.where(size < 4, 0.5, 1.0)) * scales
    return half
