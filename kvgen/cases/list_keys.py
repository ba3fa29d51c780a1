"""list_keys: the keys that each row sees."""

from __future__ import annotations

from kvgen.cases.comparison import Comparison
from kvgen.cases.operation import Cases
from kvgen.cases.scene import Scene
from kvgen.cases.token_lists import LISTED
from kvgen.ops import ListKeys
from kvgen.reference import list_keys


class ListKeysCases(Cases[ListKeys]):
    """All tokens of its request, or a window of them."""

    lengths = "step"

    def sizes(self, scene: Scene) -> dict[str, int]:
        return {"K": max(scene.workload.totals) + LISTED}

    def compare(self, j: Comparison) -> int:
        arrays = j.wanted.arrays
        return list_keys(j.view, j.arrays["row_offsets"], arrays["keys"], arrays["counts"], self.op.window)
