"""indexer_scores: scores of an indexer's keys, of all tokens or of blocks that lists name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.attention import RowsAttentionCases
from kvgen.cases.comparison import Comparison
from kvgen.cases.contents import Call
from kvgen.cases.scene import Scene
from kvgen.cases.tolerance import Distance
from kvgen.cases.touched_bytes import Token
from kvgen.ops import IndexerScores
from kvgen.reference import Scored, candidate_scores, indexer_scores

Raw = NDArray[Any]
CANDIDATES: Final = 2048  # blocks that a list names, at most: DeepSeek V4.1's


class IndexerScoresCases(RowsAttentionCases[IndexerScores]):
    """`rows` query rows a request."""

    served = "keys of an indexer"

    def __init__(self, op: IndexerScores) -> None:
        super().__init__(op)
        self.rows_each = op.rows

    def sizes(self, scene: Scene) -> dict[str, int]:
        blocks = [len(self._blocks(scene, b)) for b in range(len(scene.workload.totals))]
        maxima = -(-max(scene.workload.totals) // (self.op.block_max or 1))
        return super().sizes(scene) | {"C": max(blocks), "NB": maxima}

    def value(self, scene: Scene, name: str, like: Raw) -> Any:
        if name != "candidates":
            return super().value(scene, name, like)
        found = np.full_like(like, -1)
        for row, list_ in enumerate(found):
            blocks = self._blocks(scene, row // self.rows_each)
            list_[: len(blocks)] = blocks
        return found

    def _blocks(self, scene: Scene, b: int) -> NDArray[np.int64]:
        """The blocks that a list names for request b: the newest one, others in no order, sorted."""
        size, alive = self.op.candidates, scene.alive(b)
        if size is None or not alive:
            return np.zeros(0, np.int64)
        older = np.random.default_rng(b).permutation((alive - 1) // size)[: CANDIDATES - 1]
        return np.sort(np.append(older, (alive - 1) // size))

    def tokens(self, call: Call) -> Iterator[Token]:
        size, scene = self.op.candidates, call.scene
        if size is None:
            yield from super().tokens(call)
            return
        for b, total in enumerate(scene.workload.totals):
            for block in self._blocks(scene, b).tolist():
                for position in range(block * size, min((block + 1) * size, scene.entries(total))):
                    yield Token(b, position, None, total)

    def compare(self, j: Comparison) -> int:
        """Scores within the roundings of their sums."""
        op, given, wanted = self.op, j.arrays, j.wanted.arrays
        (keys,) = j.wanted.rows(j.case.scene)
        how: dict[str, Any] = {
            "rows": op.rows,
            "row_offsets": given.get("row_offsets"),
            "q_scales": given.get("q_scales"),
        }
        if op.candidates is not None:
            lists = given["candidates"]
            found = candidate_scores(j.view, keys, given["q"], given["weights"], lists, op.candidates, **how)
            return take_scores(j, "logits", found, fill=op.fill)
        block = op.block_max or 1
        rooms = {
            name: wanted[name].shape[1] * (block if name == "block_max" else 1)
            for name in ("logits", "block_max")
            if name in wanted
        }
        found = indexer_scores(j.view, keys, given["q"], given["weights"], min(rooms.values()), **how)
        if op.logits:
            take_scores(j, "logits", found.first(rooms["logits"]), fill=op.fill)
        if op.block_max is not None:
            maxima = found.first(rooms["block_max"]).block_max(block, pin_newest=op.pin_newest)
            take_scores(j, "block_max", maxima, fill=op.fill)
        return found.errors


def indexer_slack(wanted: Scored, dims: int, *, codes: bool) -> NDArray[np.float64]:
    """How far scores of `dims` products a head may be off.

    `codes`: products of e4m3 by Hopper's tensor cores, which add 32 of them to a sum at a time: all are cut to 13 bits behind the
    largest one's first. So each product and each sum loses at most 2^-13 of `largest`.
    """
    cut: NDArray[np.float64] = 2.0**-20 * wanted.terms + 1e-30
    return cut + (dims + -(-dims // 32)) * 2.0**-13 * wanted.largest if codes else cut


def take_scores(j: Comparison, name: str, wanted: Scored, *, fill: bool) -> int:
    """One array of scores held to the oracle's; `fill`: what no row sees is written too."""
    got, to = j.got.arrays[name], j.wanted.arrays[name]
    to[wanted.seen | fill] = wanted.logits[wanted.seen | fill]
    known, far, q = np.isfinite(wanted.logits), Distance(), j.arrays["q"]
    allowed = indexer_slack(wanted, q.shape[2] * (2 if q.dtype == np.uint8 else 1), codes=q.dtype.itemsize == 1)
    far.record(np.abs(got[known] - wanted.logits[known]), allowed[known])
    j.record(name, far)
    taken = known | np.isnan(wanted.logits) & np.isnan(got)
    to[taken] = got[taken]
    return wanted.errors
