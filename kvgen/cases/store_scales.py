"""store_scales: scales of the step's new tokens into the pool."""

from __future__ import annotations

from kvgen.cases.comparison import Comparison
from kvgen.cases.operation import Cases
from kvgen.ops import StoreScales
from kvgen.reference import store_scales


class StoreScalesCases(Cases[StoreScales]):
    """One role."""

    lengths = "step"

    def compare(self, j: Comparison) -> int:
        pools, which = j.wanted.rows(j.case.scene), "kv".index(self.op.role)
        return store_scales(j.view, pools, j.arrays["new_scales"], row_offsets=j.arrays["row_offsets"], role=which)
