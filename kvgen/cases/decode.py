"""decode: attention of the newest rows of every request, to all its tokens or to pages that lists name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen.cases import attention
from kvgen.cases.attention import RowsAttentionCases, first_seen
from kvgen.cases.closeness import numerics
from kvgen.cases.comparison import Comparison
from kvgen.cases.contents import Call
from kvgen.cases.scene import Lengths, Scene
from kvgen.cases.token_rows import Rows
from kvgen.cases.touched_bytes import Marked, Token
from kvgen.ops import Decode
from kvgen.reference import decode, decode_per_head

Raw = NDArray[Any]
SELECTED_PAGES: Final = 16  # pages that a kv head's list names, at most: MiniMax-M3's


class DecodeCases(RowsAttentionCases[Decode]):
    """`rows` query rows a request."""

    def __init__(self, op: Decode) -> None:
        super().__init__(op)
        self.rows_each = op.rows
        self.served = "" if op.pages == "all" else "pages of lists"
        # Rows that are no tokens come over tokens that have been stored.
        self.lengths: Lengths = "all" if op.cross else "rows"

    def sizes(self, scene: Scene) -> dict[str, int]:
        return super().sizes(scene) | ({"P": _selected_pages(scene)} if self.op.pages == "per_head" else {})

    def value(self, scene: Scene, name: str, like: Raw) -> Any:
        match name:
            case "page_lists":
                batch, heads, count = like.shape
                return [[_pages_of_head(scene, b, head, count) for head in range(heads)] for b in range(batch)]
            case "page_counts":
                return _selected_pages(scene)
        return super().value(scene, name, like)

    def mark(self, call: Call, marked: Marked, rows: Rows) -> None:
        if self.op.pages == "all":
            super().mark(call, marked, rows)
            return
        scene = call.scene
        for head, b in np.ndindex(scene.kv.kv_heads, len(scene.workload.totals)):
            for token in self._listed(scene, b, head):
                marked.token(token, heads=slice(head, head + 1))
        if self.asks_lengths(call):
            marked.lengths()

    def span(self, call: Call, b: int) -> tuple[int, int]:
        first, last = super().span(call, b)
        return max(first, first_seen(self.op.mask, call.scene.workload.totals[b], self.rows_each)), last

    def _listed(self, scene: Scene, b: int, head: int) -> Iterator[Token]:
        """The tokens that a kv head's list of request b's only row shows it: those of pages that are alive."""
        total = scene.workload.totals[b]
        first = max(total - scene.alive(b), first_seen(self.op.mask, total, 1))
        for page in _pages_of_head(scene, b, head, _selected_pages(scene)).tolist():
            for position in range(max(first, page * scene.tokens), min(total, (page + 1) * scene.tokens)):
                yield Token(b, position, None, total)

    def compare(self, j: Comparison) -> int:
        given = numerics(j.case.scene.kernels, self.op, {**j.arrays, **j.case.numbers})
        q, rows = j.arrays["q"], j.wanted.rows(j.case.scene)
        how: dict[str, Any] = {"row_offsets": j.arrays.get("row_offsets"), **given.oracle()}
        if self.op.pages == "all":
            return attention.take_attended(j, decode(j.view, rows, q, **how), given)
        how |= {"page_lists": j.arrays["page_lists"], "page_counts": j.arrays.get("page_counts")}
        heads = np.arange(q.shape[1]) // j.case.scene.kernels.group
        wanted = decode_per_head(j.view, rows, q, **how)
        return max(attention.take_attended(j, its, given, heads == head) for head, its in enumerate(wanted))


def _selected_pages(scene: Scene) -> int:
    """Pages that a list names for a kv head."""
    return min(SELECTED_PAGES, *(-(-scene.alive(b) // scene.tokens) for b in range(len(scene.workload.totals))))


def _pages_of_head(scene: Scene, b: int, head: int, count: int) -> NDArray[np.int64]:
    """The pages of request b, its newest one first, that a kv head's list names."""
    last = (scene.workload.totals[b] - 1) // scene.tokens
    first = (scene.workload.totals[b] - scene.alive(b)) // scene.tokens
    older = np.random.default_rng((b, head)).permutation(np.arange(first, last))
    return np.array([last, *older[: count - 1]])
