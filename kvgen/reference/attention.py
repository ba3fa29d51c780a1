"""Which tokens a query row sees, and what becomes of a score: masks and score modifications in float64.

Rows and tokens stand on one line: token j of a request, and a row at the position of the token whose key it came with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.tables import index

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class RowPosition:
    """Positions of some rows of a request: rows `places` of its `rows`, which begin at row `begin` of q; it has `tokens`
    tokens, those of its rows included, and a key for each `rate` of them that are all there."""

    b: int
    begin: int
    places: Integers
    rows: int
    tokens: int
    rate: int = 1

    @property
    def positions(self) -> Integers:
        """The rows' own tokens; below 0 where a request has fewer tokens than rows."""
        return self.tokens - self.rows + self.places

    @property
    def of_q(self) -> Integers:
        """The rows' numbers in q."""
        return self.begin + self.places

    def one(self, i: int) -> RowPosition:
        """Row i alone."""
        return replace(self, places=np.array([i], np.int64))


@dataclass(frozen=True)
class Arguments:
    """The arrays and numbers that a mask and a score take, by name; and how many heads there are."""

    given: Mapping[str, Any]
    q_heads: int
    kv_heads: int

    def __getitem__(self, name: str) -> Any:
        return self.given[name]


def exact(x: Floats) -> Floats:
    """No rounding."""
    return x


def _valid(mask: Any, at: RowPosition, arguments: Arguments) -> int | None:
    """Tokens of the request that are no padding; None where the entry can be no number of tokens."""
    if not mask.padding:
        return at.tokens
    found = index(arguments["valid_tokens"][at.b])
    return None if found is None else min(found, at.tokens)


def span(mask: Any, at: RowPosition, arguments: Arguments) -> tuple[int, int] | None:
    """[first, end) of the tokens that the rows may see by causality, window, chunk and padding, from the first of any row
    to the last of any; None where padding's argument is no number of tokens. `mask` None: causal."""
    low, high = int(at.positions.min()), int(at.positions.max())
    if at.rate > 1:
        return 0, max(0, (high + 1) // at.rate)
    if mask is None:
        return 0, high + 1
    first, end = 0, _valid(mask, at, arguments)
    if end is None:
        return None
    if mask.causal and mask.tree != "packed":
        end = min(end, high + 1)
    if mask.ahead is not None:
        end = min(end, high + mask.ahead + 1) if high >= 0 else 0
    if mask.window is not None:
        first = max(first, low - mask.window + 1)
    if mask.chunk is not None:
        first = max(first, low // mask.chunk * mask.chunk)
        end = min(end, (high // mask.chunk + 1) * mask.chunk)
    if mask.block is not None:
        end = min(end, (high // mask.block + 1) * mask.block)
    return first, max(first, end)


def visible(mask: Any, at: RowPosition, tokens: Integers, arguments: Arguments) -> NDArray[np.bool_]:
    """Which row sees which of the tokens, `[rows, tokens]`; `mask` None: causal."""
    positions, token = at.positions[:, None], tokens[None]
    if at.rate > 1:  # entry j is there once its last token, j * rate + rate - 1, is
        past: NDArray[np.bool_] = (token + 1) * at.rate - 1 <= positions
        return past
    seen: NDArray[np.bool_] = np.tile(token < at.tokens, (len(at.places), 1))
    if mask is None:
        return seen & (token <= positions)
    seen &= token < (_valid(mask, at, arguments) or 0)
    if mask.ahead is not None:
        seen &= (positions >= 0) & (token <= positions + mask.ahead)
    if mask.window is not None:
        seen &= token > positions - mask.window
    if mask.chunk is not None:
        seen &= token // mask.chunk == positions // mask.chunk
    if mask.block is not None:
        seen &= token // mask.block <= positions // mask.block
    if mask.tree == "packed":  # stands in for causality
        new = token - (at.tokens - at.rows)
        words = np.asarray(arguments["tree_mask"])[at.of_q].astype(np.int64)[:, None]
        seen &= (new < 0) | ((words >> np.clip(new, 0, 31)) & 1 == 1)
    elif mask.causal:
        seen &= token <= positions
    if mask.tree == "mask":
        given = np.asarray(arguments["mask"])[at.of_q]
        seen &= _columns(given, tokens, 0) != 0
    return seen


def _columns(given: NDArray[Any], tokens: Integers, beyond: float) -> NDArray[Any]:
    """Columns `tokens` of an array `[rows, K]`, `beyond` from column K on."""
    padded = np.pad(given, ((0, 0), (0, 1)), constant_values=beyond)
    found: NDArray[Any] = padded[:, np.minimum(tokens, given.shape[1])]
    return found


def modified(
    score: Any,
    at: RowPosition,
    tokens: Integers,
    s: Floats,
    arguments: Arguments,
    rounded: Callable[[Floats], Floats] = exact,
) -> Floats:
    """Scores `s` `[rows, q_heads, tokens]` with a score's changes applied, each scale * (q . k); `score` None: nothing.

    `rounded` is applied after every step, for those who want to know what low precision makes of it.
    """
    if score is None:
        return s
    before = (at.positions[:, None] - tokens[None])[:, None]  # the tokens' distance from their row
    if score.softcap is not None:
        s = rounded(score.softcap * np.tanh(rounded(s / score.softcap)))
    if score.alibi:
        slopes = np.asarray(arguments["alibi_slopes"]).astype(np.float64)
        s = rounded(s - rounded(slopes[:, None] * before))
    if score.relative is not None:
        near = (before >= 0) & (before < score.relative)
        given = np.asarray(arguments["relative_bias"])[at.of_q].astype(np.float64)
        added = np.take_along_axis(given, np.where(near, before, 0) + np.zeros(s.shape, np.int64), axis=2)
        s = rounded(s + np.where(near, added, 0))
    if score.bias:
        given = np.asarray(arguments["bias"])[at.of_q].astype(np.float64)
        added = _columns(given, tokens, -np.inf)[:, None]
        s = np.where(np.isneginf(added), added, rounded(s + added))
    if score.function is not None:
        taken: dict[str, Any] = {name: _Elements(np.asarray(arguments[name])) for name in score.tensors}
        taken |= {name: arguments[name] for name in score.scalars}
        result = score.function.call(s, _place(at, tokens, arguments), **taken)
        s = rounded(np.asarray(result, np.float64) + np.zeros(s.shape))
    return s


def _place(at: RowPosition, tokens: Integers, arguments: Arguments) -> SimpleNamespace:
    """`at` of a score function, for scores `[rows, q_heads, tokens]`."""
    heads, group = np.arange(arguments.q_heads), arguments.q_heads // arguments.kv_heads
    return SimpleNamespace(
        b=np.int64(at.b),
        q_head=heads[:, None],
        kv_head=(heads // group)[:, None],
        row=at.of_q[:, None, None],
        i=at.places[:, None, None],
        position=at.positions[:, None, None],
        token=tokens,
        tokens=np.int64(at.tokens),
    )


@dataclass(frozen=True)
class _Elements:
    """A tensor of a score function: its elements, and 0 outside of them."""

    array: NDArray[Any]

    def __getitem__(self, at: Any) -> NDArray[Any]:
        places = np.broadcast_arrays(*(at if isinstance(at, tuple) else (at,)))
        inside = np.ones(places[0].shape, bool)
        for place, extent in zip(places, self.array.shape, strict=True):
            inside &= (place >= 0) & (place < extent)
        kind = np.int64 if self.array.dtype.kind in "iu" else np.float64
        if not self.array.size:
            return np.zeros(inside.shape, kind)
        found = self.array[tuple(np.where(inside, place, 0) for place in places)].astype(kind)
        return np.where(inside, found, kind(0))
