"""slot_mapping: the slots of the step's new tokens."""

from __future__ import annotations

from kvgen.cases.comparison import Comparison
from kvgen.cases.operation import Cases
from kvgen.ops import SlotMapping
from kvgen.reference import slot_mapping


class SlotMappingCases(Cases[SlotMapping]):
    """All requests; rank 0 where they are interleaved."""

    lengths = "step"

    def compare(self, j: Comparison) -> int:
        wanted = j.wanted.arrays
        return slot_mapping(
            j.view,
            j.arrays["row_offsets"],
            wanted["slots"],
            interleave=self.op.interleave,
            rank=j.case.numbers.get("rank", 0),
            local_lengths=wanted.get("local_lengths"),
        )
