"""advance: the lengths after the step."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.comparison import Comparison
from kvgen.cases.operation import Cases
from kvgen.cases.scene import Scene
from kvgen.ops import Advance
from kvgen.reference import advance

Raw = NDArray[Any]


class AdvanceCases(Cases[Advance]):
    """New tokens of every request, counted."""

    lengths = "step"

    def value(self, scene: Scene, name: str, like: Raw) -> Any:
        return np.array(scene.workload.new) if name == "new_tokens" else super().value(scene, name, like)

    def compare(self, j: Comparison) -> int:
        j.wanted.arrays["new_lengths"][...], word = advance(j.view, **j.places("row_offsets", "new_tokens"))
        return word
