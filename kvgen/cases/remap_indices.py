"""remap_indices: positions of tokens as slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.comparison import Comparison
from kvgen.cases.operation import Cases
from kvgen.cases.scene import Scene
from kvgen.cases.token_lists import LISTED, token_lists
from kvgen.ops import RemapIndices
from kvgen.reference import remap_indices

Raw = NDArray[Any]
BLOCKS: Final = 2  # that a row names


class RemapIndicesCases(Cases[RemapIndices]):
    """Lists of tokens, or of blocks and of places in them."""

    def sizes(self, scene: Scene) -> dict[str, int]:
        return {"J": LISTED, "C": BLOCKS}

    def fill(self, scene: Scene, arrays: dict[str, Raw], tables: Mapping[str, Raw]) -> None:
        super().fill(scene, arrays, tables)
        rng, begins = np.random.default_rng(2), self.begins(scene)
        if "candidates" not in arrays:
            arrays["indices"][...] = token_lists(scene, arrays["indices"], rng)
            return
        block = self.op.candidates or 1
        for b, entries in enumerate(scene.entries(total) for total in scene.workload.totals):
            rows, named = (arrays[name][begins[b] : begins[b + 1]] for name in ("indices", "candidates"))
            named[...] = rng.integers(0, max(entries // block, 1), named.shape)
            rows[...] = rng.integers(0, named.shape[1] * block, rows.shape)  # columns of the blocks
        arrays["indices"][:, -1] = -1

    def compare(self, j: Comparison) -> int:
        return remap_indices(
            j.view,
            j.arrays["row_offsets"],
            j.arrays["indices"],
            j.wanted.arrays["out"],
            counts=j.wanted.arrays.get("counts"),
            drop_unseen=self.op.unseen == "drop",
            candidates=j.arrays.get("candidates"),
            block=self.op.candidates or 1,
        )
