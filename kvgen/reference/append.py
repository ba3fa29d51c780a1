"""append: where every new row goes, and what becomes of it before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.faults import FaultLog
from kvgen.reference.hadamard import hadamard
from kvgen.reference.norm import layer_norm, layer_norm_error, norm_gain, rms_norm, rms_norm_error
from kvgen.reference.pool import Rows
from kvgen.reference.rope import Table, rotate, rotate_error
from kvgen.reference.rounding import ulp
from kvgen.reference.tables import Place, TableView, bad_total, index, request_of_row
from kvgen.runtime.faults import Fault
from kvgen.schema.model import Rope
from kvgen.schema.norm import LayerNorm, Norm
from kvgen.schema.position_scale import PositionScale

Raw = NDArray[Any]
Floats = NDArray[np.float64]
Unfit = Callable[[int, int | None], bool]


@dataclass(frozen=True)
class NewRow:
    """One of a step's rows: nobody's ("padding"), of a place that cannot be known ("unknown"), or of `position` of request
    `b`, which has `after` tokens with this step's. `places` are those of K and V, None where it is not stored; `token` is the
    place in the page."""

    state: Literal["padding", "unknown", "known"]
    b: int = 0
    position: int | None = None
    after: int = 0
    places: tuple[Place, Place] | None = None
    token: int = 0


def locate(
    table: TableView,
    total: int,
    *,
    row_offsets: Raw | None = None,
    slots: Raw | None = None,
    valid_lengths: Raw | None = None,
    position_out_of_range: Unfit = lambda row, position: False,
    stored: bool = True,
) -> tuple[list[NewRow], int]:
    """Every row of a step, and the error word. Without `stored` no row has a place, and no page is looked up.

    With `row_offsets[B + 1]`, row t of request b goes to position length + t (lengths "before") or length - rows + t
    ("after"). With `valid_lengths[B]`, `total` rows are B equal runs, and the first so many of a request's are new. With
    `slots[T]`, a row goes to page slot // page_size, token slot % page_size, whatever the page table says; -1 skips it. A row
    whose place cannot be had, of its values or of its scales, is reported and not stored; in a ring neither is a row whose page
    a later row of the same step takes over. `position_out_of_range(row, position)` says that a row has no RoPE; its position
    is then unknown. Where an entry of the cache stands for r tokens, the row of its last token is the entry's, of position j * r,
    and the other rows are padding.
    """
    faults = FaultLog()
    if slots is not None:
        return [_slot(table, faults, row, int(slots[row]), position_out_of_range) for row in range(total)], faults.word
    found = []
    if row_offsets is not None and total and bad_total(row_offsets, total):
        faults.add(Fault.ROW_OFFSETS, table.requests - 1, total)
    for row in range(total):
        whose = _run(valid_lengths, row, total) if valid_lengths is not None else _ragged(row_offsets, row, total)
        if isinstance(whose, NewRow):
            if whose.state == "unknown":
                faults.add(Fault.ROW_OFFSETS, whose.b, row)
            found.append(whose)
        else:
            found.append(_positioned(table, faults, row, *whose, position_out_of_range, stored=stored))
    return found, faults.word


def _run(valid_lengths: Raw, row: int, total: int) -> NewRow | tuple[int, int, int]:
    """(request, place among its new rows, how many) of a row of equal runs."""
    run = total // len(valid_lengths)
    b, t = divmod(row, run)
    count = index(valid_lengths[b])
    if count is None or count > run:
        return NewRow("unknown", b)
    return (b, t, count) if t < count else NewRow("padding")


def _ragged(row_offsets: Raw | None, row: int, total: int) -> NewRow | tuple[int, int, int]:
    assert row_offsets is not None
    whose = request_of_row(row_offsets, row, total)
    if whose is None:
        return NewRow("padding")
    return (whose.b, row - whose.begin, whose.end - whose.begin) if whose.valid else NewRow("unknown", whose.b)


def _positioned(
    table: TableView, faults: FaultLog, row: int, b: int, t: int, count: int, unfit: Unfit, *, stored: bool
) -> NewRow:
    after = table.after(b, count)
    if after is None:
        faults.add(Fault.LENGTH, b, t)
        return NewRow("unknown")
    position = after - count + t
    rate = table.cache.entry_tokens if stored else 1
    if (position + 1) % rate:
        return NewRow("padding")
    entry, position = position // rate, position // rate * rate
    if unfit(row, position):
        faults.add(Fault.POSITION, b, position)
        return NewRow("unknown")
    if not stored:
        return NewRow("known", b, position, after)
    page = entry // table.tokens
    places = None if table.overtaken(page, after) else table.places(b, page)
    if isinstance(places, Fault):
        faults.add(places, b, position)
        places = None
    return NewRow("known", b, position, after, places, entry % table.tokens)


def _slot(table: TableView, faults: FaultLog, row: int, slot: int, position_out_of_range: Unfit) -> NewRow:
    if position_out_of_range(row, None):
        if slot != -1:
            faults.add(Fault.POSITION, row, row)
        return NewRow("unknown")
    page, token = divmod(slot, table.tokens)
    if slot != -1 and (slot < 0 or page >= table.pages):
        faults.add(Fault.SLOT, row, row)
    elif slot != -1:
        return NewRow("known", places=(Place(page, page),) * 2, token=token)
    return NewRow("known")


def append(
    table: TableView,
    pools: Sequence[Rows],
    new: Sequence[Raw],
    *,
    row_offsets: Raw | None = None,
    slots: Raw | None = None,
    valid_lengths: Raw | None = None,
) -> int:
    """Store `new` (K's rows, V's rows), each `[T, kv_heads, dim]` of the cache's dtype, in `pools`, where `locate` says.

    Returns the error word. Quantized roles choose the scales of every token as they store it. In a residual cache rows past
    the last full group of R go to the tail; rows of groups that the step completes are what `seal` has stored before.
    """
    if slots is not None and (table.own_table or any(pool.residual for pool in pools)):
        raise ValueError("slots: got them for a cache with a scales_page_table or a tail; both need a row's request")
    found, word = locate(table, len(new[0]), row_offsets=row_offsets, slots=slots, valid_lengths=valid_lengths)
    for row, at in enumerate(found):
        for pool, rows, place in zip(pools, new, at.places or (), strict=False):
            if at.position is None:
                pool.write(place.page, at.token, rows[row])
            else:
                pool.put(at.b, at.position // table.cache.entry_tokens, place, rows[row], at.after)
    return word


@dataclass(frozen=True)
class Changed:
    """Rows `[T, heads, dim]` as they are to be stored, not rounded, and how far a kernel's f32 may be from them."""

    rows: Floats
    lost: Floats


@dataclass(frozen=True)
class Change:
    """Steps done to a role's rows: its bias `[heads, dim]`, its norm with the weights and, of a LayerNorm, their bias, or the
    mean squares `[T]` that the call brings; its RoPE
    at `positions`, `[T]` or `[sections, T]`, by the rope's own frequencies or a `table`; a factor of positions `[T]`. In latent
    rows the first `latent` dims are normalised, or with `whole` all of a row, and the others rotate. `norm_order` "after": RoPE
    comes before the norm. `hadamard`: all of a head is transformed at last."""

    bias: Raw | None = None
    norm: Norm | None = None
    weight: Raw | None = None
    norm_bias: Raw | None = None
    mean_square: Raw | None = None
    norm_order: Literal["before", "after"] = "before"
    rope: Rope | None = None
    positions: Raw | None = None
    table: Table | None = None
    sections: tuple[int, ...] = ()
    sections_order: Literal["runs", "interleaved"] = "runs"
    local: bool = False
    latent: int = 0
    whole: bool = False
    position_scale: PositionScale | None = None
    hadamard: bool = False


def position_factor(position: int, scale: PositionScale) -> float:
    """Factor of q at a position."""
    return 1.0 + scale.scale * log(1 + (position + scale.offset) // scale.period)


def changed(array: Raw, do: Change, kind: np.dtype[Any] | None = None) -> Changed:
    """Changes of append to rows `[T, heads, dim]` of the cache's dtype (or of `kind`): bias, norm and RoPE in their order, the
    factor, in float64."""
    x = array.astype(np.float64)
    found = Changed(x, np.zeros(x.shape))
    if do.bias is not None:
        x = x + do.bias.astype(np.float64)
        found = Changed(x, 2.0**-23 * np.abs(x))
    found = changed_again(found, do, kind or array.dtype)
    if do.position_scale is not None:
        assert do.positions is not None
        factors = np.array([position_factor(int(p), do.position_scale) for p in do.positions])[:, None, None]
        rows = found.rows * factors
        found = Changed(rows, found.lost * factors + 2.0**-20 * np.abs(rows))
    return Changed(*hadamard(found.rows, found.lost)) if do.hadamard else found


def changed_again(given: Changed, do: Change, kind: np.dtype[Any]) -> Changed:
    """Norm and RoPE, in their order, of rows that something was lost of."""
    steps = (_normalised, _rotated) if do.norm_order == "before" else (_rotated, _normalised)
    for step in steps:
        given = step(given, do, kind)
    return given


def _normalised(given: Changed, do: Change, kind: np.dtype[Any]) -> Changed:
    if do.norm is None:
        return given
    x, lost = given.rows, given.lost
    end = None if do.whole else do.latent or None
    part, before = x[..., :end], lost[..., :end]
    if isinstance(do.norm, LayerNorm):
        assert do.weight is not None
        normal = layer_norm(part, do.weight, do.norm_bias, do.norm)
        allowed = layer_norm_error(part, do.weight, do.norm_bias, do.norm)
    else:
        normal = rms_norm(part, do.weight, do.norm, kind, do.mean_square)
        allowed = rms_norm_error(part, do.weight, do.norm, kind, do.mean_square) - ulp(normal, kind) * (normal != part)
    # What was lost before grows with the element, and through the mean with its head: as a share of the largest element.
    gain = norm_gain(part, do.weight, do.norm, do.mean_square)
    again = 2 * before * gain
    if before.any():
        share = before.max(initial=0) / max(np.abs(part).max(initial=0), 1e-30)
        again = again + 4 * share * (np.abs(normal) + gain * np.abs(part).max(axis=2, keepdims=True))
    there = np.maximum(allowed, 0) + again
    return Changed(
        np.concatenate([normal, x[..., part.shape[2] :]], axis=2),
        np.concatenate([there, lost[..., part.shape[2] :]], axis=2),
    )


def _rotated(given: Changed, do: Change, kind: np.dtype[Any]) -> Changed:
    if do.rope is None or do.positions is None:
        return given
    x = given.rows
    more: dict[str, Any] = {"dims": x.shape[2] - do.latent, "part": "last"} if do.latent else {}
    order: dict[str, Any] = {"sections": do.sections or None, "sections_order": do.sections_order}
    rotated = rotate(x, do.positions, do.rope, cos_sin=do.table, local=do.local, **order, **more)
    both = rotate_error(x, do.rope, np.dtype(np.float32), **more)
    return Changed(rotated, _spread(given.lost, both) + both)


def _spread(lost: Floats, rotated: Floats) -> Floats:
    """An element that rotates has what its pair lost; at most that of the whole head."""
    return np.where(rotated > 0, 2 * lost.max(axis=2, keepdims=True), lost)
