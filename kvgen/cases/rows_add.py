"""rows_add: rows added to K and V of the step's new tokens."""

from __future__ import annotations

from kvgen.cases.comparison import Comparison
from kvgen.cases.operation import Cases
from kvgen.cases.scene import Scene
from kvgen.ops import RowsAdd
from kvgen.reference import rows_add


class RowsAddCases(Cases[RowsAdd]):
    """All requests, from the first one on."""

    lengths = "step"

    def sizes(self, scene: Scene) -> dict[str, int]:
        return {"A+1": len(scene.workload.new) + 1}

    def compare(self, j: Comparison) -> int:
        pools = j.wanted.rows(j.case.scene)
        offsets, first = j.arrays["row_offsets"], j.case.numbers["batch_offset"]
        return rows_add(j.view, pools, j.arrays["a"], row_offsets=offsets, batch_offset=first)
