"""seal: the groups of a residual cache that the step's tokens complete."""

from __future__ import annotations

from collections.abc import Sequence

from kvgen.cases.comparison import Comparison
from kvgen.cases.contents import Call
from kvgen.cases.scene import Scene
from kvgen.cases.taken_rows import taken_rows
from kvgen.cases.token_rows import Rows, StepCases
from kvgen.ops import Seal
from kvgen.reference import seal


class SealCases(StepCases[Seal]):
    """The first operation of a step."""

    lengths = "seal"
    way = "seal"

    def span(self, call: Call, b: int) -> tuple[int, int]:
        group, (first, _) = call.scene.cache.storage.residual, super().span(call, b)
        return first // group * group, call.scene.workload.totals[b] // group * group

    def partial(self, call: Call, found: dict[str, int], rows: Rows) -> dict[str, int]:
        return found | taken_rows(call, None, rows)

    def stored(self, scene: Scene) -> Sequence[int]:
        return scene.workload.before

    def compare(self, j: Comparison) -> int:
        rows = j.wanted.rows(j.case.scene)
        return seal(j.view, rows, [j.arrays["k"]], row_offsets=j.arrays["row_offsets"])
