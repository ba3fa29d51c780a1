"""move_tokens: tokens from slots to slots, in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.comparison import Comparison
from kvgen.cases.operation import Cases
from kvgen.cases.scene import LAYERS, Scene
from kvgen.ops import MoveTokens
from kvgen.reference import move_tokens

Raw = NDArray[Any]


class MoveTokensCases(Cases[MoveTokens]):
    """No slot is read that another row writes; where there is no room for two slots a row, none."""

    def fill(self, scene: Scene, arrays: dict[str, Raw], tables: Mapping[str, Raw]) -> None:
        super().fill(scene, arrays, tables)
        slots, count = np.random.default_rng(2).permutation(scene.pages * scene.tokens), len(arrays["src"])
        for name, at in (("src", slots[:count]), ("dst", slots[count : 2 * count])):
            arrays[name][...] = [*at, *[-1] * (count - len(at))]

    def compare(self, j: Comparison) -> int:
        layers = [j.wanted.rows(j.case.scene, layer) for layer in range(LAYERS)]
        return move_tokens(j.view, layers, **j.places("src", "dst", "row_offsets"))
