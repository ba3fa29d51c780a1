"""decode: softmax attention of the newest rows of every request, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.attention import Arguments, RowPosition, modified, span, visible
from kvgen.reference.faults import FaultLog
from kvgen.reference.pool import Rows
from kvgen.reference.tables import LIMIT, RowRange, TableView, bad_total, index, request_of_row
from kvgen.runtime.faults import Fault

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class VisibleKeys:
    """The n keys that one query row sees: K `[n, kv_heads, head_dim]` and V `[n, kv_heads, v_dim]`, float64, the row's position
    in its request, and the tokens' numbers `[n]`."""

    k: Floats
    v: Floats
    at: RowPosition
    tokens: NDArray[np.int64]


@dataclass(frozen=True)
class ListedPages:
    """Lists `[T, K]` of pages of each row's request, numbers in its page table, of which `counts[T]` entries count (None: all).
    -1 is skipped."""

    lists: NDArray[Any]
    counts: NDArray[Any] | None = None


@dataclass(frozen=True)
class Decoded:
    """`out` float64 `[T, q_heads, v_dim]`, `lse` float64 `[T, q_heads]`, the error word, and what each row attended to
    (None for rows that became NaN)."""

    out: Floats
    lse: Floats
    errors: int
    seen: tuple[VisibleKeys | None, ...]


def attend(q: Floats, k: Floats, v: Floats, scale: float) -> tuple[Floats, Floats]:
    """Softmax attention of one row: q `[q_heads, head_dim]`, k and v `[n, kv_heads, dim]` -> out `[q_heads, v_dim]` and
    the natural log-sum-exp `[q_heads]`. Query head h uses kv head h // (q_heads / kv_heads). No tokens: 0 and -inf.
    """
    return weighted(products(q, k, scale), v)


def products(q: Floats, k: Floats, scale: float) -> Floats:
    """Scores `[q_heads, n]` before any modification: scale * (q . k)."""
    groups = q.reshape(k.shape[1], -1, q.shape[1])
    found: Floats = scale * (groups @ k.transpose(1, 2, 0)).reshape(len(q), len(k))
    return found


def sums(weights: Floats, v: Floats) -> Floats:
    """V `[n, kv_heads, dim]` times `weights` `[q_heads, n]`, summed over the tokens: `[q_heads, dim]`. A token without weight
    adds nothing, whatever its value."""
    groups = weights.reshape(v.shape[1], -1, len(v))
    values = v.transpose(1, 0, 2)
    if np.isfinite(v).all():
        found: Floats = groups @ values
    else:  # which heads of a group share a token without weight differs
        found = np.einsum("gjnd,gjn->gjd", np.where(groups[..., None] != 0, values[:, None], 0), groups)
    return found.reshape(len(weights), v.shape[2])


def weighted(
    scores: Floats, v: Floats, sinks: Floats | None = None, *, sinks_in_lse: bool = True
) -> tuple[Floats, Floats]:
    """V `[n, kv_heads, v_dim]` by the softmax of `scores` `[q_heads, n]`, and the natural log-sum-exp `[q_heads]`.

    `sinks[q_heads]` are scores of a token that has no value: exp(sink) more in the denominator, and, if `sinks_in_lse`,
    in the log-sum-exp. A head whose scores are all -inf, or that has none, gives 0 and -inf whatever its sink.
    """
    q_heads, n = scores.shape
    out, lse = np.zeros((q_heads, v.shape[2])), np.full(q_heads, -np.inf)
    some = ~np.isneginf(scores).all(axis=1)
    if not n or not some.any():
        return out, lse
    top = np.where(some, scores.max(axis=1), 0)
    if sinks is not None:
        top = np.maximum(top, sinks)
    weights = np.exp(scores - top[:, None])
    total = weights.sum(axis=1)
    whole = total if sinks is None else total + np.exp(sinks - top)
    out[some] = sums(weights, v)[some] / whole[some, None]
    lse[some] = top[some] + np.log(whole if sinks_in_lse else total)[some]
    return out, lse


def decode(
    table: TableView,
    pools: Sequence[Rows],
    q: NDArray[Any],
    *,
    scale: float | None = None,
    q_scale: float = 1.0,
    out_scale: float = 1.0,
    rows: int = 1,
    row_offsets: NDArray[Any] | None = None,
    mask: Any = None,
    cross: bool = False,
    score: Any = None,
    sinks: NDArray[Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
    lse_base: str = "e",
    lse_empty: str | float = "-inf",
    sinks_in_lse: bool = True,
    pages: ListedPages | None = None,
) -> Decoded:
    """Attend with q `[T, q_heads, head_dim]` to a request's living tokens, this step's included.

    Request b's rows are `rows` from b * rows on, or with `row_offsets[B + 1]` its own, `rows` at most. Of n tokens
    (where lengths are those before the step, its rows count, but not if they are no tokens: `cross`) row i of r stands
    at n - r + i; one that stands before token 0 is as good as any other, it just has no past. `mask` and `score` are a
    kvgen.schema Mask and Score (None: causal, and none), `arguments` what they take by name; kvgen.reference.attention
    says what they mean. `sinks[q_heads]` add exp(sink) to every denominator. q is `q_scale` times what it holds, out
    the result divided by `out_scale`. `scale` defaults to 1 / sqrt(head_dim). The log-sum-exp is to base `lse_base`,
    "e" or "2".

    Quantized K and V are taken as dequantized, not rounded to the cache's dtype. With one pool, of latent rows, V is the
    first `latent_dim` dims of K. With `pages` rows attend only to those that are listed, in that order, all heads alike.

    Rows of no request and rows that see no token give 0 and `lse_empty`. All rows of a request give NaN in out and
    log-sum-exp

    - if its length is invalid or more than its table can hold (LENGTH, at the number of tokens, 2^32 - 1 for no number),
    - if `k_sealed` does not count the whole groups of its tokens (LENGTH, at their number),
    - if the page of a token between the first and the last one that a row may see is invalid (at that token),
    - if its offsets contradict each other or give it more than `rows`, or there are fewer rows than it has to have
      (ROW_OFFSETS, at the row),
    - if its list counts more entries than it has, or negative ones (LENGTH, at the count), or names a page that its tokens do
      not reach (POSITION, at that page's first token).

    Where the last offset is wrong, rows of no request are NaN too.
    """
    faults, total = FaultLog(), len(q)
    scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    out, lse = np.zeros((total, q.shape[1], _v_dim(table, pools))), np.full((total, q.shape[1]), float(lse_empty))
    seen: list[VisibleKeys | None] = []
    if row_offsets is not None and total and bad_total(row_offsets, total):
        faults.add(Fault.ROW_OFFSETS, table.requests - 1, total)
    finder = Finder(table, pools, mask, Arguments(arguments or {}, q.shape[1], pools[0].heads), faults, cross=cross)
    known: dict[tuple[int, int, int], RequestKeys | None] = {}
    for row in range(total):
        whose = _whose(table, row, total, rows, row_offsets)
        if whose is None:
            orphan = row_offsets is not None and bad_total(row_offsets, total)
            seen.append(None if orphan else finder.nothing(row))
        elif not whose.valid:
            faults.add(Fault.ROW_OFFSETS, whose.b, row)
            seen.append(None)
        else:
            key = (whose.b, whose.begin, whose.end)
            if key not in known:
                known[key] = finder.request(whose, pages)
            request = known[key]
            seen.append(None if request is None else request.seen(row - whose.begin))
        found = seen[-1]
        if found is None:
            out[row], lse[row] = np.nan, np.nan
        elif len(found.k):
            scores = products(q[row].astype(np.float64) * q_scale, found.k, scale)
            scores = modified(score, found.at, found.tokens, scores[None], finder.arguments)[0]
            some = ~np.isneginf(scores).all(axis=1)
            values = weighted(
                scores, found.v, None if sinks is None else sinks.astype(float), sinks_in_lse=sinks_in_lse
            )
            out[row] = values[0] / out_scale
            lse[row] = np.where(some, values[1] / (math.log(2) if lse_base == "2" else 1), lse[row])
    return Decoded(out, lse, faults.word, tuple(seen))


def decode_per_head(
    table: TableView,
    pools: Sequence[Rows],
    q: NDArray[Any],
    *,
    page_lists: NDArray[Any],
    page_counts: NDArray[Any] | None = None,
    **how: Any,
) -> tuple[Decoded, ...]:
    """decode where each kv head has pages of its own, `page_lists[T, kv_heads, P]`, and counts `[T, kv_heads]`: for each kv head
    what all query heads would give with its lists, of which those of that kv head count. The error word is the largest."""
    heads = range(page_lists.shape[1])
    lists = [ListedPages(page_lists[:, h], None if page_counts is None else page_counts[:, h]) for h in heads]
    return tuple(decode(table, pools, q, pages=each, **how) for each in lists)


def _v_dim(table: TableView, pools: Sequence[Rows]) -> int:
    if len(pools) > 1:
        return pools[1].dim
    return table.kv.latent_part or pools[0].dim


def _whose(table: TableView, row: int, total: int, rows: int, row_offsets: NDArray[Any] | None) -> RowRange | None:
    """Whose row it is; not valid unless the request is found from each of its rows, and those are `rows` at most."""
    if row_offsets is None:
        b = row // rows
        return RowRange(b, b * rows, (b + 1) * rows, (b + 1) * rows <= total) if b < table.requests else None
    found = request_of_row(row_offsets, row, total)
    if found is None or not found.valid or found.end - found.begin > rows:
        return found if found is None else replace(found, valid=False)
    all_rows = (request_of_row(row_offsets, other, total) for other in range(found.begin, found.end))
    return replace(found, valid=all(other is not None and other.b == found.b for other in all_rows))


@dataclass(frozen=True)
class RequestKeys:
    """The tokens [first, first + m) of a request that its rows look at, which row sees which of them `[r, m]`, and which could
    not be had: their K and V are 0."""

    at: RowPosition
    tokens: NDArray[np.int64]
    k: Floats
    v: Floats
    visible: NDArray[np.bool_]
    lost: NDArray[np.bool_]

    def seen(self, i: int) -> VisibleKeys:
        mine = np.flatnonzero(self.visible[i])
        run = len(mine) > 0 and mine[-1] - mine[0] == len(mine) - 1  # then no row has a copy of its own
        at = slice(mine[0], mine[-1] + 1) if run else mine
        return VisibleKeys(self.k[at], self.v[at], self.at.one(i), self.tokens[at])


@dataclass(frozen=True)
class Finder:
    """Finds what the rows of a request look at; reports what cannot be had. `partly`: the rest is found all the same.
    `cross`: rows are no tokens."""

    table: TableView
    pools: Sequence[Rows]
    mask: Any
    arguments: Arguments
    faults: FaultLog
    partly: bool = False
    cross: bool = False

    def _none(self) -> tuple[Floats, Floats]:
        heads = self.pools[0].heads
        return np.zeros((0, heads, self.pools[0].dim)), np.zeros((0, heads, _v_dim(self.table, self.pools)))

    def nothing(self, row: int) -> VisibleKeys:
        """Keys of a row of no request: none."""
        return VisibleKeys(*self._none(), RowPosition(-1, row, np.array([0]), 1, 0), np.zeros(0, np.int64))

    def request(self, whose: RowRange, pages: ListedPages | None = None) -> RequestKeys | None:
        """K and V of everything that one of its rows may see, of all pages or the listed ones; None if that is not to be had."""
        table, b, rows = self.table, whose.b, whose.end - whose.begin
        length = table.length(b)
        tokens = LIMIT if length is None else length + (rows if table.kv.lengths == "before" and not self.cross else 0)
        rate = table.cache.entry_tokens
        if length is None or tokens >= LIMIT or not table.holds(b, tokens // rate):
            self.faults.add(Fault.LENGTH, b, min(tokens, LIMIT))
            return None
        if any(pool.miscounted(b, tokens) for pool in self.pools):
            self.faults.add(Fault.LENGTH, b, tokens)
            return None
        at = RowPosition(b, whose.begin, np.arange(rows), rows, tokens, rate)
        around = span(self.mask, at, self.arguments)
        if around is None:
            self.faults.add(Fault.LENGTH, b, tokens)
            return None
        first = max(around[0], table.first_token(tokens))
        numbers = np.arange(first, max(first, around[1]), dtype=np.int64)
        parts, good = [part.tolist() for part in self._by_page(numbers)], True
        if pages is not None:
            named = self._named(b, pages, whose.begin, tokens)
            if named is None:
                return None
            good = all(part is not None for part in named)
            inside = [
                [t for t in part or () if numbers[0] <= t <= numbers[-1]] if len(numbers) else [] for part in named
            ]
            parts = [part for part in inside if part]
            numbers = np.array([t for part in parts for t in part], np.int64)
        runs = list(self._runs(b, parts))
        pairs = [pair for _, pair in runs if pair is not None]
        if (len(pairs) < len(runs) or not good) and not self.partly:
            return None
        lost = np.concatenate([np.full(n, pair is None) for n, pair in runs]) if runs else np.zeros(0, np.bool_)
        nothing = self._none()
        no_k, no_v = (np.zeros((1, *x.shape[1:])) for x in nothing)
        pairs = [pair or (no_k.repeat(n, axis=0), no_v.repeat(n, axis=0)) for n, pair in runs]
        k, v = (np.concatenate(part) for part in zip(*pairs, strict=True)) if pairs else nothing
        return RequestKeys(at, numbers, k, v, visible(self.mask, at, numbers, self.arguments), lost)

    def _by_page(self, numbers: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Neighbouring tokens, those of each page."""
        return np.split(numbers, np.flatnonzero(np.diff(numbers // self.table.tokens)) + 1) if len(numbers) else []

    def _named(self, b: int, pages: ListedPages, row: int, tokens: int) -> list[range | None] | None:
        """The tokens of each page that a row's list names, None for one that the request's `tokens` do not reach; None where
        its entries cannot be counted. What is wrong is reported."""
        width, size = pages.lists.shape[1], self.table.tokens
        count = width if pages.counts is None else index(pages.counts[row])
        if count is None or count > width:
            self.faults.add(Fault.LENGTH, b, LIMIT if count is None else count)
            return None
        found: list[range | None] = []
        for page in pages.lists[row, :count].tolist():
            if page == -1:
                continue
            there = 0 <= page < -(-tokens // size)
            if not there:  # an error word has the page as 32 bits without a sign
                self.faults.add(Fault.POSITION, b, min(page % 2**32 * size, LIMIT))
            found.append(range(page * size, min((page + 1) * size, tokens)) if there else None)
        return found

    def _runs(self, b: int, parts: Sequence[Sequence[int]]) -> Iterator[tuple[int, tuple[Floats, Floats] | None]]:
        """How many tokens, K and V of these neighbouring tokens of a page each; None for a page that is not to be had."""
        for tokens in parts:
            first, *rest = tokens
            places = self.table.places(b, first // self.table.tokens)
            if isinstance(places, Fault):
                for token in (first, *rest):
                    self.faults.add(places, b, token)
                yield 1 + len(rest), None
                continue
            key = self.pools[0].run_numbers(b, first, 1 + len(rest), places[0])
            if len(self.pools) > 1:
                yield len(key), (key, self.pools[1].run_numbers(b, first, 1 + len(rest), places[1]))
            else:
                yield len(key), (key, key[:, :, : _v_dim(self.table, self.pools)])
