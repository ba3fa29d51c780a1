"""pool_tokens: tokens pooled into entries by a softmax over channels, and the rows that wait for the rest of their entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.append import Change, Changed, NewRow, changed_again
from kvgen.reference.faults import FaultLog
from kvgen.reference.hadamard import hadamard
from kvgen.reference.rounding import ulp
from kvgen.reference.tables import RowRange, TableView, bad_total, index, request_of_row
from kvgen.runtime.faults import Fault
from kvgen.schema.model import Rope
from kvgen.schema.norm import RmsNorm

Raw = NDArray[Any]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Pooling:
    """Making of an entry: `rate` tokens, with `overlap` those of the entry before as well; what rows are rounded to on the way
    to the cache; `drafts` tokens of a step may be taken back."""

    rate: int
    overlap: bool = False
    drafts: int = 0
    norm: RmsNorm | None = None
    rope: Rope | None = None
    local: bool = False
    pooled_dtype: Literal["f32", "same"] = "f32"
    normed_dtype: Literal["f32", "same", "same_unrotated"] = "f32"
    rotated_dtype: Literal["f32", "same"] = "f32"
    hadamard: bool = False

    def first_token(self, entry: int) -> int:
        """The first token that an entry is pooled from."""
        return max(entry - self.overlap, 0) * self.rate

    def kept_from(self, end: int) -> int:
        """The first token whose row a later step may need, where a request has `end` tokens."""
        return self.first_token(max(end - self.drafts, 0) // self.rate)


@dataclass(frozen=True)
class PoolState:
    """Rows of earlier tokens: `kv` and `score` `[N, tokens, columns]` f32, and which of the N each request has: `ids[B]`, whose
    row of token p is p % tokens, or `table[B, C]`, whose column p // tokens has it."""

    kv: Raw
    score: Raw
    ids: Raw | None = None
    table: Raw | None = None

    def place(self, b: int, token: int) -> tuple[int, int] | Fault:
        """(which of the N, row) of a token, or what is wrong."""
        tokens = self.kv.shape[1]
        if self.ids is not None:
            entry = self.ids[b]
        else:
            assert self.table is not None
            if token // tokens >= self.table.shape[1]:
                return Fault.POSITION
            entry = self.table[b, token // tokens]
        found = index(entry)
        return Fault.PAGE_ID if found is None or found >= len(self.kv) else (found, token % tokens)


@dataclass(frozen=True)
class PooledStep:
    """The results of a step: where each row's entry goes (padding: the row emits none), the entries `[T, 1, d]` before RoPE and
    as they are stored, the rows of entries that are not known, and the error word."""

    found: list[NewRow]
    latent: Changed
    stored: Changed
    unknown: tuple[int, ...]
    word: int


def softmax_pool(kv: Raw, score: Raw, rate: int, *, overlap: bool = False) -> Floats:
    """Entries `[S // rate, d]` of a whole sequence, kv and score `[S, c * d]`: per channel, softmax(score) * kv summed over the
    tokens of each entry, with `overlap` (c = 2) those of the entry before as well, whose first d columns count."""
    dim = kv.shape[1] // (1 + overlap)
    found = [_entry(kv, score, j, rate, overlap)[0] for j in range(len(kv) // rate)]
    return np.array(found).reshape(-1, dim)


def _entry(kv: Raw, score: Raw, entry: int, rate: int, overlap: bool) -> tuple[Floats, Floats]:
    """Entry `entry` of rows by token, and how far f32 may be from it."""
    own = slice(entry * rate, (entry + 1) * rate)
    if overlap:
        dim, before = kv.shape[1] // 2, slice(max(entry - 1, 0) * rate, entry * rate)
        values, scores = (np.concatenate([a[before, :dim], a[own, dim:]]) for a in (kv, score))
    else:
        values, scores = kv[own], score[own]
    values, scores = values.astype(np.float64), scores.astype(np.float64)
    with np.errstate(invalid="ignore"):
        away = scores - scores.max(axis=0)
        weights = np.exp(away)
        weights /= weights.sum(axis=0)
        size = weights * np.abs(values)
        far = np.where(weights > 0, -away, 0)
        lost = (size * (2.0**-20 + far * 2.0**-21 + len(values) * 2.0**-23)).sum(axis=0)
        return (weights * values).sum(axis=0), lost


def rounded(given: Changed, kind: np.dtype[Any], dims: int | None = None) -> Changed:
    """The first `dims` channels (None: all) rounded to `kind`: what f32 has lost may take a number to the next one."""
    rows, lost = given.rows.copy(), given.lost.copy()
    part = (..., slice(0, dims))
    rows[part] = given.rows[part].astype(kind).astype(np.float64)
    exact, off = given.rows[part], given.lost[part]
    near = [np.abs((exact + by).astype(kind).astype(np.float64) - rows[part]) for by in (-off, off)]
    lost[part] = np.maximum(*near)
    return Changed(rows, lost)


class _Step:
    """One call: the rows of its tokens, the state before it, and what it finds."""

    def __init__(self, table: TableView, kv: Raw, score: Raw, state: PoolState | None, do: Pooling) -> None:
        self.table, self.kv, self.score, self.do, self.state = table, kv, score, do, state
        self.faults = FaultLog()
        self.before = None if state is None else (state.kv.copy(), state.score.copy())
        self.dim = kv.shape[1] // (1 + do.overlap)
        self.means = np.zeros((len(kv), 1, self.dim))
        self.lost = np.zeros((len(kv), 1, self.dim))

    def keep(self, b: int, token: int, end: int, row: int) -> None:
        """Store a token's row where a later step may need it."""
        if self.state is None or token < self.do.kept_from(end):
            return
        place = self.state.place(b, token)
        if isinstance(place, Fault):
            self.faults.add(place, b, token)
            return
        self.state.kv[place], self.state.score[place] = self.kv[row], self.score[row]

    def pool(self, b: int, token: int, begin: int, row: int) -> bool:
        """Make the entry that a token of row `row` emits, `begin` being the step's first one; whether all tokens are known."""
        entry = token // self.do.rate
        first = self.do.first_token(entry)
        if self.do.rate == 1:
            self.means[row, 0] = self.kv[row]
            return True
        rows, known = [], True
        for t in range(first, token + 1):
            if t >= begin:
                rows.append((self.kv[row - (token - t)], self.score[row - (token - t)]))
                continue
            assert self.state is not None and self.before is not None
            place = self.state.place(b, t)
            if isinstance(place, Fault):
                self.faults.add(place, b, token)
                known = False
            else:
                rows.append((self.before[0][place], self.before[1][place]))
        if known:
            kv, score = (np.stack([r[i] for r in rows]) for i in (0, 1))
            own = min(entry, 1) if self.do.overlap else 0
            self.means[row, 0], self.lost[row, 0] = _entry(kv, score, own, self.do.rate, self.do.overlap)
        return known

    def place(self, b: int, token: int, limit: int) -> NewRow:
        """Where the entry that a token emits goes."""
        entry = token // self.do.rate
        first = entry * self.do.rate
        if self.do.rope is not None and first >= limit:
            self.faults.add(Fault.POSITION, b, first)
            return NewRow("unknown", b)
        places = self.table.places(b, entry // self.table.tokens)
        if isinstance(places, Fault):
            self.faults.add(places, b, first)
            return NewRow("known", b, first)
        return NewRow("known", b, first, token + 1, places, entry % self.table.tokens)


def pool_tokens(
    table: TableView,
    kv: Raw,
    gate: Raw | None,
    do: Pooling,
    *,
    row_offsets: Raw,
    state: PoolState | None = None,
    ape: Raw | None = None,
    weight: Raw | None = None,
    kind: np.dtype[Any],
    latent: int = 0,
    angles: Any = None,
    limit: int = 2**24,
) -> PooledStep:
    """The results of a step of rows `[T, columns]`; `state` becomes what it leaves for the next one.

    `table` counts entries in pages, lengths in tokens. `kind` is the cache's dtype, `latent` the part of a latent row that does
    not rotate; positions at or past `limit` have no angle; `angles` is a table of them.
    """
    rows = len(kv)
    x = kv.astype(np.float32)
    score = np.zeros_like(x) if gate is None else gate.astype(np.float32)
    step = _Step(table, x, score, state, do)
    found: list[NewRow] = []
    unknown: list[int] = []
    if rows and bad_total(row_offsets, rows):
        step.faults.add(Fault.ROW_OFFSETS, table.requests - 1, rows)
    whose = [request_of_row(row_offsets, row, rows) for row in range(rows)]
    tokens = [_token(table, step.faults, w, row) for row, w in enumerate(whose)]
    for row, at in enumerate(tokens):  # a row's score has what its position adds before anybody reads it
        if at is not None and ape is not None:
            with np.errstate(invalid="ignore", over="ignore"):
                score[row] = score[row] + ape[at[1] % do.rate]
    for row, at in enumerate(tokens):
        found.append(NewRow("padding"))
        if at is None:
            continue
        b, token, begin, end = at
        step.keep(b, token, end, row)
        if (token + 1) % do.rate:
            continue
        place, known = step.place(b, token, limit), step.pool(b, token, begin, row)
        found[row] = place if known else NewRow("unknown", b)
        if not known:
            unknown.append(row)
    latents, entries = _finished(Changed(step.means, step.lost), do, found, kind, weight, latent, angles)
    return PooledStep(found, latents, entries, tuple(unknown), step.faults.word)


def _token(table: TableView, faults: FaultLog, whose: RowRange | None, row: int) -> tuple[int, int, int, int] | None:
    """(request, token, the step's first token, the first one after it) of a row; None where it has none."""
    if whose is None:
        return None
    if not whose.valid:
        faults.add(Fault.ROW_OFFSETS, whose.b, row)
        return None
    count = whose.end - whose.begin
    after = table.after(whose.b, count)
    if after is None:
        faults.add(Fault.LENGTH, whose.b, row - whose.begin)
        return None
    return whose.b, after - count + row - whose.begin, after - count, after


def _finished(
    means: Changed, do: Pooling, found: list[NewRow], kind: np.dtype[Any], weight: Raw | None, latent: int, angles: Any
) -> tuple[Changed, Changed]:
    """Pooled rows after roundings and norm, and, rotated, as they are stored. Of one that is no number nothing is said."""
    unknown = ~np.isfinite(means.rows).all(axis=(1, 2))
    means.rows[unknown], means.lost[unknown] = 0, 0
    if do.pooled_dtype == "same":
        means = rounded(means, kind)
    if do.norm is not None:
        means = changed_again(means, Change(norm=do.norm, weight=weight), kind)
    rotary_dim = 0
    if do.rope is not None:
        dim = means.rows.shape[2]
        rotary_dim = do.rope.dim or (dim - latent if latent else dim)
    if do.normed_dtype != "f32":
        last = means.rows.shape[2] - rotary_dim if do.normed_dtype == "same_unrotated" else None
        means = rounded(means, kind, last)
    positions = np.array([at.position or 0 for at in found], np.int64)
    rotated = changed_again(
        means, Change(rope=do.rope, positions=positions, table=angles, local=do.local, latent=latent), kind
    )
    if do.rotated_dtype == "same":
        rotated = rounded(rotated, kind)
    if do.hadamard:
        rotated = Changed(*hadamard(rotated.rows, rotated.lost))
    if do.hadamard and do.rotated_dtype == "same":
        rotated = rounded(rotated, kind)
    means.lost[unknown], rotated.lost[unknown] = np.inf, np.inf
    return means, rotated


def latent_error(latent: Changed, kind: np.dtype[Any]) -> Floats:
    """How far an entry in latent_out, of dtype `kind`, may be from `latent`."""
    found: Floats = latent.lost + ulp(latent.rows, kind) / 2
    return found
