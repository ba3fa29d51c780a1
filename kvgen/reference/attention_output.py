"""attention_output: what attention gave, V's transforms undone, in float64; and the blocks of a quantized row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.append import Changed
from kvgen.reference.faults import FaultLog
from kvgen.reference.hadamard import hadamard as transformed
from kvgen.reference.quant import cast, choose, values
from kvgen.reference.rope import Table, rotate, rotate_error
from kvgen.reference.tables import index
from kvgen.runtime.faults import Fault
from kvgen.schema.model import Rope

Raw = NDArray[Any]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Output:
    """Rows `[T, heads, dim]` of the output, not rounded; which of them are `known`; and the error word."""

    change: Changed
    known: NDArray[np.bool_]
    word: int


def attention_output(
    o: Raw,
    *,
    hadamard: bool = False,
    rope: Rope | None = None,
    local: bool = False,
    positions: Raw | None = None,
    table: Table | None = None,
    dims: int | None = None,
    part: Literal["first", "last"] | None = None,
    limit: int = 2**24,
) -> Output:
    """o `[T, heads, dim]`, its Hadamard transform and then its RoPE at `positions[T]` undone.

    RoPE rotates by minus the angle: cosines stay, sines change their sign. A row whose position is negative, at or past `limit`
    or the table's rows, is unknown and reported.
    """
    x, faults = o.astype(np.float64), FaultLog()
    lost, known = np.zeros(x.shape), np.ones(len(x), np.bool_)
    if hadamard:
        x, lost = transformed(x, lost)
    if rope is None:
        return Output(Changed(x, lost), known, faults.word)
    assert positions is not None
    most = limit if table is None else len(table.values)
    for row, given in enumerate(positions):
        position = index(given)
        known[row] = position is not None and position < most
        if not known[row]:
            faults.add(Fault.POSITION, row, row)
    at = np.where(known, positions.astype(np.int64), 0)
    where: dict[str, Any] = {"dims": dims, "part": part}
    rotated = rotate(x, at if table is not None else -at, rope, cos_sin=_backwards(table), local=local, **where)
    both = rotate_error(x, rope, np.dtype(np.float32), **where)
    spread = np.where(both > 0, 2 * lost.max(axis=2, keepdims=True), lost)
    return Output(Changed(rotated, spread + both), known, faults.word)


def _backwards(table: Table | None) -> Table | None:
    """The table with the other sign of every sine."""
    if table is None:
        return None
    found = table.values.astype(np.float64)
    half = found.shape[1] // 2
    found[:, slice(half, None) if table.form == "halves" else slice(1, None, 2)] *= -1
    return Table(found, table.form)


def blocks_of(rows: Raw, block: int, recipe: str, amax_min: float) -> tuple[Floats, Raw]:
    """(scales `[T, heads, dim / block]`, e4m3 codes `[T, heads, dim]`) of rows in f32."""
    x = rows.astype(np.float32)
    parts = x.reshape(*x.shape[:-1], -1, block)
    amax = np.abs(parts).max(axis=-1, keepdims=True)
    scales, _ = choose(np.maximum(amax, np.float32(amax_min)), "e4m3", "f32", recipe)
    with np.errstate(all="ignore"):
        codes = cast(np.where(scales[..., None] == 0, np.float32(0), parts / scales[..., None]), "e4m3")
    return scales.astype(np.float64), codes.reshape(x.shape)


def read_blocks(codes: Raw, scales: Raw) -> Floats:
    """The numbers that codes `[T, heads, dim]` stand for with scales `[T, heads, dim / block]`."""
    numbers = values(codes.view(np.uint8), "e4m3")
    return numbers * np.repeat(scales.astype(np.float64), codes.shape[-1] // scales.shape[-1], axis=-1)


def scales_of(given: Raw, heads: int) -> Floats:
    """Scales as `[T, heads, blocks]`: f32 `[groups, N, T]`, or i32 `[groups, N / 4, T]` of four exponents + 127 a word."""
    if given.dtype.kind == "i":
        words = given.astype(np.int64) & 0xFFFFFFFF
        exponents = np.stack([words >> shift & 0xFF for shift in (0, 8, 16, 24)], axis=2)
        exponents = exponents.reshape(given.shape[0], -1, given.shape[2])
        given = np.where(exponents == 255, np.nan, np.ldexp(1.0, exponents - 127))
    rows = given.shape[2]
    return np.moveaxis(given.astype(np.float64), 2, 0).reshape(rows, heads, -1)
