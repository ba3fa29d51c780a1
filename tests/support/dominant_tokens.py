"""Dominant tokens: where losing one, or seeing one too many, would hardly show, they are made to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvgen.layout.dtypes import dtype
from kvgen.reference.attention import Arguments, RowPosition, visible
from tests.support.memory import Raw
from tests.support.scenes import Scene
from tests.support.tolerance import Numerics

# Just below 4, where 16 bits round a score by little, and still some fifty times as heavy as most tokens.
DOMINANT = 3.9
TILES = (16, 64)
MOST = 6  # boundaries of pages and tiles that are dominant at once in a request: the more there are, the less each one weighs


@dataclass(frozen=True)
class DominantToken:
    """Row `row` of q gives this token of request `b` a high score in head `q_head`, if it is visible to it."""

    b: int
    token: int
    row: int
    q_head: int
    visible: bool


def raise_edges(
    scene: Scene,
    q: Raw,
    counts: Sequence[int],
    *,
    rows: Sequence[tuple[int, int]] | None = None,
    given: Numerics | None = None,
) -> list[DominantToken]:
    """Make tokens dominant, to one query head of each kv head: a high score, large values of random sign.

    They are, for every row, the first and the last token that it sees and their neighbours that it does not, some others
    that it does not see, and for some row tokens around the boundaries of pages and tiles. Whoever loses one of them, or
    takes a masked one, is off by much more than rounding. Request b has rows `rows[b]`, [begin, end), of q; by default b.
    """
    found: list[DominantToken] = []
    for b, count in enumerate(counts):
        begin, end = (b, b + 1) if rows is None else rows[b]
        if begin < min(end, len(q)) and count:
            found += _Request(scene, q, b, count, begin, end - begin, given).raise_all()
    return found


class _Request:
    def __init__(self, scene: Scene, q: Raw, b: int, count: int, begin: int, rows: int, given: Numerics | None) -> None:
        self.scene, self.q, self.b, self.begin = scene, q.astype(np.float64), b, begin
        self.q *= 1.0 if given is None else given.q_scale
        self.kind = dtype(scene.cache.dtype).numpy()
        self.scale = scene.scale if given is None else given.scale
        self.alive = np.arange(scene.view.first_token(count), count, dtype=np.int64)
        at = RowPosition(b, begin, np.arange(rows), rows, count)
        mask, arguments = (None, {}) if given is None else (given.mask, given.arguments or {})
        self.seen = visible(mask, at, self.alive, Arguments(arguments, q.shape[1], scene.cache.kv_heads))

    def raise_all(self) -> list[DominantToken]:
        dominant: dict[int, set[int]] = {}
        for i, mine in enumerate(self.seen):
            for place in self._of_row(mine):
                dominant.setdefault(place, set()).add(i)
        for place in self._boundaries():
            dominant.setdefault(place, set()).add(int(self.scene.rng.integers(len(self.seen))))
        return [one for place in sorted(dominant) for one in self._raise(place, sorted(dominant[place]))]

    def _of_row(self, mine: Raw) -> set[int]:
        """The ends of what a row sees, their hidden neighbours, and one more hidden token."""
        some, hidden = np.flatnonzero(mine), np.flatnonzero(~mine)
        places = set() if not len(some) else {int(some[0]), int(some[-1]), int(some[0]) - 1, int(some[-1]) + 1}
        if len(hidden):
            places.add(int(self.scene.rng.choice(hidden)))
        return {place for place in places if 0 <= place < len(mine)}

    def _boundaries(self) -> list[int]:
        sizes = np.array([self.scene.tokens, *TILES])
        at = self.alive[:, None] % sizes
        places = np.flatnonzero(((at == 0) | (at == sizes - 1)).any(axis=1))
        return [int(p) for p in self.scene.rng.permutation(places)[:MOST]]

    def _raise(self, place: int, rows: list[int]) -> list[DominantToken]:
        """Give a token keys whose scores are DOMINANT for one head a kv head and each of these rows."""
        scene, (keys, values), found = self.scene, self.scene.rows(), list[DominantToken]()
        token, group = int(self.alive[place]), scene.kernels.group
        key = np.zeros((keys.heads, keys.dim))
        for head in range(keys.heads):
            q_heads = head * group + scene.rng.integers(group, size=len(rows))
            towards = self.q[[self.begin + i for i in rows], q_heads]
            key[head] = np.linalg.lstsq(towards, np.full(len(rows), DOMINANT / self.scale), rcond=1e-3)[0]
            key[head] *= min(1.0, 8 * keys.dim**0.5 / (float(np.linalg.norm(key[head])) + 1e-9))
            found += [
                DominantToken(self.b, token, self.begin + i, int(h), bool(self.seen[i, place]))
                for i, h in zip(rows, q_heads, strict=True)
            ]
        value = 8 * np.sign(scene.rng.standard_normal((values.heads, values.dim))) * (1 + scene.rng.random())
        scene.write(self.b, token, [key.astype(self.kind), value.astype(self.kind)])
        return found
