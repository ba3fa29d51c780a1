"""lora_add: rows of the 2m layout, added to K and V of the step's first tokens."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from kvgen.cases.comparison import Comparison
from kvgen.cases.scene import Scene
from kvgen.cases.token_rows import StepCases
from kvgen.ops import LoraAdd
from kvgen.reference import lora_add


class LoraAddCases(StepCases[LoraAdd]):
    """All of the step's new tokens: K's rows, then V's."""

    in_place = True
    fused = True

    def sizes(self, scene: Scene) -> dict[str, int]:
        return {"T": 2 * sum(scene.workload.new)}

    def value(self, scene: Scene, name: str, like: NDArray[Any]) -> Any:
        return sum(scene.workload.new) if name == "lora_end_idx" else super().value(scene, name, like)

    def compare(self, j: Comparison) -> int:
        end = j.case.numbers.get("lora_end_idx")
        if end is None:
            end = int(j.arrays["lora_end_idx"][0])
        pools = j.wanted.rows(j.case.scene)
        return lora_add(j.view, pools, j.arrays["kv"], row_offsets=j.arrays["row_offsets"], lora_end_idx=end)
