"""Operations on whole pages, or states, that a list names."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.contents import Call
from kvgen.cases.operation import CountedCases, O
from kvgen.cases.scene import LAYER, Scene
from kvgen.cases.touched_bytes import WHOLE, Marked
from kvgen.errors import ToolError
from kvgen.plan.params import Param

Raw = NDArray[Any]


class PageIdsCases(CountedCases[O]):
    """Every page of the pool once, entries of the page table in no order; `pairs` are one half of them onto the other."""

    ids: ClassVar[str]
    """The argument with the list; scales with a table of their own have `scale_<ids>` besides."""

    def rows(self, scene: Scene) -> int:
        return sum(len(ids) for ids in self._lists(scene).values())

    def sizes(self, scene: Scene) -> dict[str, int]:
        return dict(zip(("N", "NS"), map(len, self._lists(scene).values()), strict=False))

    def takes(self, scene: Scene, spec: Param) -> bool:
        return not spec.name.startswith("num_")  # all of them count

    def value(self, scene: Scene, name: str, like: Raw) -> Any:
        return self._lists(scene).get(name)

    def _lists(self, scene: Scene) -> dict[str, Raw]:
        entries = sum(ids.size for ids in scene.ids)
        if self.pairs and entries < 2:
            raise ToolError(
                f"{scene.kernels.name}: got a workload of one page; {self.op.kind} copies one onto another; give more"
            )
        order = np.random.default_rng(1)

        def ids() -> Raw:
            found = order.permutation(entries)
            return found[: entries // 2 * 2].reshape(-1, 2) if self.pairs else found

        own = scene.cache.storage.own_table and not scene.cache.page_table.separate_kv
        return {self.ids: ids()} | ({f"scale_{self.ids}": ids()} if own else {})

    def touched(self, call: Call) -> dict[str, int]:
        marked = Marked(call.scene, call.tables)
        layers = WHOLE if call.launcher.KERNEL.all_layers else slice(LAYER, LAYER + 1)
        for name, ids in call.arrays.items():
            if name.endswith(self.ids):
                marked.pages(ids.reshape(-1), scales=name != self.ids, layers=layers)
        return marked.sectors()


def states_of(pools: dict[str, Any]) -> Raw:
    """The states of the layer that operations work on."""
    found: Raw = pools["state_pool"][LAYER]
    return found
