"""gather_rows: the tokens that a query row names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.comparison import Comparison
from kvgen.cases.contents import Call
from kvgen.cases.copied_rows import take_gathered
from kvgen.cases.named import selected, tokens_of_query
from kvgen.cases.scene import Scene
from kvgen.cases.token_rows import Rows, TokenCases
from kvgen.cases.touched_bytes import Marked, Token
from kvgen.ops import GatherRows
from kvgen.reference import gather_rows

Raw = NDArray[Any]


class GatherRowsCases(TokenCases[GatherRows]):
    """One query row a request."""

    def counts(self, scene: Scene) -> Sequence[int]:
        return (1,) * len(scene.workload.totals)

    def rows(self, scene: Scene) -> int:
        return len(scene.workload.totals) * selected(scene)

    def sizes(self, scene: Scene) -> dict[str, int]:
        return {"J": selected(scene)}

    def value(self, scene: Scene, name: str, like: Raw) -> Any:
        if name == "slots":
            return np.stack([tokens_of_query(scene, b, like.shape[1]) for b in range(len(like))])
        return super().value(scene, name, like)

    def mark(self, call: Call, marked: Marked, rows: Rows) -> None:
        for token in self.tokens(call):
            marked.token(token, roles=self.op.roles)
        if self.asks_lengths(call):
            marked.lengths()

    def tokens(self, call: Call) -> Iterator[Token]:
        for b, total in enumerate(call.scene.workload.totals):
            for position in tokens_of_query(call.scene, b, selected(call.scene)).tolist():
                yield Token(b, position, None, total)

    def compare(self, j: Comparison) -> int:
        names = [n for n in ("k_out", "v_out") if n in j.arrays]
        before = [j.wanted.arrays[n] for n in names]
        where = j.places("row_offsets", "slots")
        return take_gathered(j, names, gather_rows(j.view, j.wanted.rows(j.case.scene), before, **where))
