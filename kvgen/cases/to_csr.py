"""to_csr: a page table as lists of pages, one behind the other."""

from __future__ import annotations

from kvgen.cases.comparison import Comparison
from kvgen.cases.operation import Cases
from kvgen.cases.scene import Scene
from kvgen.ops import ToCsr
from kvgen.reference import to_csr


class ToCsrCases(Cases[ToCsr]):
    """All pages of a step."""

    lengths = "step"

    def sizes(self, scene: Scene) -> dict[str, int]:
        return {"J": sum(-(-n // scene.tokens) for n in scene.workload.totals) + 2}

    def compare(self, j: Comparison) -> int:
        found = j.wanted.arrays
        return to_csr(
            j.view,
            found["page_indices"],
            found["page_indptr"],
            found.get("last_page_len"),
            fill=self.op.fill,
            row_offsets=j.arrays.get("row_offsets"),
        )
