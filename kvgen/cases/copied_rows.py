"""Operations that copy the rows of tokens: places of rows in a call, and what a copy must leave in its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.comparison import At, Comparison
from kvgen.cases.contents import Call
from kvgen.cases.named import alive_places
from kvgen.cases.operation import O
from kvgen.cases.scene import Scene
from kvgen.cases.token_rows import Rows, TokenCases, mark_slots
from kvgen.cases.touched_bytes import Marked
from kvgen.plan.params import Param
from kvgen.reference import Gathered

Raw = NDArray[Any]
RUNS: Final = ("row_begins", "row_counts")


class CopiedRowsCases(TokenCases[O]):
    """Every token that is alive, request by request or by slots, of one layer or of all."""

    every_layer = True

    def takes(self, scene: Scene, spec: Param) -> bool:
        return spec.name != "starts" or scene.cache.page_table.drops_tokens

    def value(self, scene: Scene, name: str, like: Raw) -> Any:
        match name:
            case "row_begins":
                return self.begins(scene)[:-1]
            case "row_counts":
                return self.counts(scene)
            case "starts":
                return [scene.entries(total) - scene.alive(b) for b, total in enumerate(scene.workload.totals)]
            case "slots":
                return alive_places(scene)
        return super().value(scene, name, like)

    def mark(self, call: Call, marked: Marked, rows: Rows) -> None:
        if "slots" in call.arrays:
            mark_slots(call.scene, call.arrays["slots"], marked, rows)
        else:
            super().mark(call, marked, rows)


def take_gathered(j: Comparison, names: Sequence[str], gathered: Gathered, at: At = slice(None)) -> int:
    """Outputs of copied rows; those of requests with wrong data are NaN. Returns the error word."""
    for name, right in zip(names, gathered.outputs, strict=False):
        wanted, got = j.wanted.arrays[name][at], j.got.arrays[name][at]
        wanted[...] = right
        j.take_nan(name, gathered.failed, at)
        # A NaN that was stored is one in the output, of any bits where it was dequantized.
        both = np.isnan(right.astype(np.float32)) & np.isnan(got.astype(np.float32))
        wanted[both] = got[both]
    return gathered.errors
