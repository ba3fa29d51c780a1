"""compact: used pages moved to the beginning of the pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from kvgen.cases.comparison import Comparison
from kvgen.cases.contents import Call, Case
from kvgen.cases.new_tables import NewTablesCases, new_tables
from kvgen.cases.scene import Scene
from kvgen.ops import Compact
from kvgen.plan.params import Param
from kvgen.reference import compact, compact_plan

Raw = NDArray[Any]


class CompactCases(NewTablesCases[Compact]):
    """All pages of the requests; in two launches: which pages move, then the moves."""

    def parameters(self, launcher: Any) -> Sequence[Param]:
        return [*launcher.KERNEL.arguments, *launcher.PLAN.arguments]

    def takes(self, scene: Scene, spec: Param) -> bool:
        return spec.name != "kept"  # pages in use besides: none

    def sizes(self, scene: Scene) -> dict[str, int]:
        used = sum(-(-n // scene.tokens) for n in scene.workload.totals)
        return {"Q": used, "P": -(-scene.pages // scene.cache.page_table.id_multiplier), "M": scene.columns}

    def planned(self, call: Call, cache: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
        launcher = call.launcher
        launcher.plan(cache, **{p.name: arguments[p.name] for p in launcher.PLAN.arguments if p.name in arguments})
        taken = {p.name for p in launcher.KERNEL.arguments}
        return {name: array for name, array in arguments.items() if name in taken}

    def follow(self, case: Case) -> None:
        """Entries that are good are written; in the new table the others are what they are in the old one."""
        for name, array in case.before.tables.items():
            if name != "lengths" and f"new_{name}" in case.before.arrays:
                case.before.arrays[f"new_{name}"][...] = array

    def compare(self, j: Comparison) -> int:
        found = j.wanted.arrays
        count, used, word = compact_plan(j.view, found["new_ids"], found["moves"])
        found["num_moves"][0] = count
        if "num_used" in found:
            found["num_used"][0] = used
        moved = compact(j.view, j.wanted.pools, found["moves"], found["new_ids"], new_tables(j), count)
        return max(word, moved)
