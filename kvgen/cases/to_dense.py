"""to_dense: a page table as a row of pages a request."""

from __future__ import annotations

from kvgen.cases.comparison import Comparison
from kvgen.cases.operation import Cases
from kvgen.cases.scene import Scene
from kvgen.ops import ToDense
from kvgen.reference import to_dense


class ToDenseCases(Cases[ToDense]):
    """All pages of a step."""

    lengths = "step"

    def sizes(self, scene: Scene) -> dict[str, int]:
        return {"C": scene.columns}

    def compare(self, j: Comparison) -> int:
        return to_dense(
            j.view,
            j.wanted.arrays["page_table"],
            fill=self.op.fill,
            row_offsets=j.arrays.get("row_offsets"),
            lengths=j.wanted.arrays.get("lengths"),
            page_tokens=self.op.page_tokens,
        )
