"""reorder: requests go on from others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from kvgen.cases.comparison import Comparison
from kvgen.cases.new_tables import NewTablesCases, new_tables
from kvgen.cases.scene import Scene
from kvgen.lowering.lowered import lower_pages
from kvgen.ops import Reorder
from kvgen.reference import reorder

Raw = NDArray[Any]


class ReorderCases(NewTablesCases[Reorder]):
    """Two requests go on from the same one; the page behind each request's own is free."""

    def sizes(self, scene: Scene) -> dict[str, int]:
        return {"M": scene.columns}

    def fill(self, scene: Scene, arrays: dict[str, Raw], tables: Mapping[str, Raw]) -> None:
        whole = lower_pages(scene.cache).table.copied_whole and not scene.cache.states
        if arrays["fresh"].ndim > 1 or "fresh_scales" in arrays or whole or scene.cache.ragged:
            raise self.no_batch()
        super().fill(scene, arrays, tables)
        batch = len(scene.workload.totals)
        arrays["parents"][...] = [(b + 1) % max(batch - 1, 1) for b in range(batch)]
        arrays["fresh"][...] = [int(ids[-1, 0]) for ids in scene.ids]

    def compare(self, j: Comparison) -> int:
        new, fresh = new_tables(j), j.arrays["fresh"]
        free = {"page_table": fresh} | dict.fromkeys(new, fresh)
        lengths = j.wanted.arrays.get("new_lengths")
        return reorder(j.view, j.wanted.pools, j.arrays["parents"], free, new, lengths)
