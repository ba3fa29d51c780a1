"""row_offsets: where the tokens of every request begin."""

from __future__ import annotations

from kvgen.cases.comparison import Comparison
from kvgen.cases.operation import Cases
from kvgen.ops import RowOffsets
from kvgen.reference import row_offsets


class RowOffsetsCases(Cases[RowOffsets]):
    """Lengths, summed."""

    lengths = "step"

    def compare(self, j: Comparison) -> int:
        out = j.wanted.arrays["out"]
        out[...], word = row_offsets(j.view, out.dtype, j.arrays.get("row_offsets"))
        return word
