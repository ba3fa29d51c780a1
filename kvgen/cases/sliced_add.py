"""sliced_add: rows added to the first ones of another array."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from kvgen.cases.comparison import Comparison
from kvgen.cases.operation import Cases
from kvgen.cases.scene import Scene
from kvgen.ops import SlicedAdd
from kvgen.plan.params import Param, Scalar
from kvgen.reference import sliced_add


class SlicedAddCases(Cases[SlicedAdd]):
    """Half of the rows where the count is on the device."""

    def sizes(self, scene: Scene) -> dict[str, int]:
        return {"A": sum(scene.workload.new)}

    def number(self, scene: Scene, spec: Param) -> int | None:
        return sum(scene.workload.new) if isinstance(spec, Scalar) else None

    def value(self, scene: Scene, name: str, like: NDArray[Any]) -> Any:
        return sum(scene.workload.new) // 2 if name == "lora_end_idx" else None

    def compare(self, j: Comparison) -> int:
        end = j.case.numbers.get("lora_end_idx")
        end = int(j.arrays["lora_end_idx"][0]) if end is None else end
        j.wanted.arrays["c"][...], word = sliced_add(j.arrays["a"], j.arrays["b"], lora_end_idx=end)
        return word
