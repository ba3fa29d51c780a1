"""combine_lists: the entries and the newest tokens that each row attends to, in one buffer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.comparison import Comparison
from kvgen.cases.operation import Cases
from kvgen.cases.scene import Scene
from kvgen.cases.token_lists import LISTED, token_lists
from kvgen.ops import CombineLists
from kvgen.plan.params import Param, Scalar
from kvgen.reference import combine_lists

Raw = NDArray[Any]


class CombineListsCases(Cases[CombineLists]):
    """A buffer of each request's entries and then its tokens, request by request."""

    lengths = "step"

    def sizes(self, scene: Scene) -> dict[str, int]:
        longest = max(scene.workload.totals)
        return {"J": LISTED, "K": longest + scene.entries(longest)}

    def number(self, scene: Scene, spec: Param) -> int | None:
        return int(_ends(scene)[-1]) if isinstance(spec, Scalar) else None  # buffer_rows

    def value(self, scene: Scene, name: str, like: Raw) -> Any:
        match name:
            case "indices":
                return token_lists(scene, like, np.random.default_rng(2))
            case "entries_begin":
                return _ends(scene)[:-1]
            case "tokens_begin":
                return _ends(scene)[:-1] + [scene.entries(n) for n in scene.workload.totals]
        return super().value(scene, name, like)

    def compare(self, j: Comparison) -> int:
        arrays = j.wanted.arrays
        return combine_lists(
            j.view,
            j.arrays["row_offsets"],
            j.arrays["entries_begin"],
            j.arrays["tokens_begin"],
            j.case.numbers["buffer_rows"],
            arrays["keys"],
            arrays["counts"],
            window=self.op.window,
            indices=j.arrays.get("indices"),
        )


def _ends(scene: Scene) -> NDArray[np.int64]:
    """The places where each request's entries begin in the buffer, and its end."""
    return np.cumsum([0, *(scene.entries(n) + n for n in scene.workload.totals)])
