"""mla_plan: the keys of a batch, chunk by chunk."""

from __future__ import annotations

from typing import Final

from kvgen.cases.comparison import Comparison
from kvgen.cases.decompressed import alignment_of
from kvgen.cases.operation import Cases
from kvgen.cases.scene import Scene
from kvgen.ops import MlaPlan
from kvgen.reference import mla_plan

CHUNKS: Final = 2


class MlaPlanCases(Cases[MlaPlan]):
    """Two chunks."""

    lengths = "step"

    def sizes(self, scene: Scene) -> dict[str, int]:
        return {"C": CHUNKS}

    def compare(self, j: Comparison) -> int:
        found, to = j.wanted.arrays, alignment_of(j.case.scene, self.op)
        offsets = found["buffer_row_offsets"]
        own = j.arrays.get("row_offsets")
        plan = mla_plan(j.view, len(offsets), self.op.buffer_token_size, to, offsets.dtype, own)
        for name in ("buffer_row_offsets", "cache_offsets", "buffer_lengths"):
            found[name][...] = getattr(plan, name)
        return plan.errors
