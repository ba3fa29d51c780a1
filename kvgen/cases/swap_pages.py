"""swap_pages: pages between two pools."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.comparison import Comparison
from kvgen.cases.contents import Call, Contents, Pools, random_like
from kvgen.cases.operation import Cases
from kvgen.cases.scene import Scene
from kvgen.ops import SwapPages
from kvgen.plan.params import Param
from kvgen.reference import swap_pages

Raw = NDArray[Any]


class SwapPagesCases(Cases[SwapPages]):
    """A pair a request, two at least; the other pool has random bytes."""

    def sizes(self, scene: Scene) -> dict[str, int]:
        return {"N": max(len(scene.workload.totals), 2)}

    def takes(self, scene: Scene, spec: Param) -> bool:
        return not spec.name.startswith("num_")  # all pairs count

    def value(self, scene: Scene, name: str, like: Raw) -> Any:
        rng, entries = np.random.default_rng(2), sum(ids.size for ids in scene.ids)
        return np.stack([rng.permutation(entries)[: len(like)] for _ in range(2)], axis=1) if name == "pairs" else None

    def memory(self, scene: Scene, rng: np.random.Generator) -> dict[str, Contents]:
        """Another pool of as many pages."""
        paged = {t.name for t in scene.cache.storage.tensors if "page" in t.axes}
        pools: Pools = {}
        for name, pool in scene.pools.items():
            if name in paged:
                pools[name] = [random_like(a, rng) for a in pool] if isinstance(pool, list) else random_like(pool, rng)
        return {"other": Contents(pools, {}, {})}

    def cache(self, call: Call, name: str, memory: Contents) -> Any:
        return call.scene.package.Pages(**memory.pools)

    def compare(self, j: Comparison) -> int:
        others = j.wanted.others["other"].pools
        pools = {name: pool for name, pool in j.wanted.pools.items() if name in others}
        given: dict[str, Any] = j.places("pairs", "scale_pairs")
        pairs = given.pop("pairs")
        return swap_pages(j.case.scene.cache, _as_bits(pools), _as_bits(others), self.op.direction, pairs, **given)


def _as_bits(pools: Pools) -> Any:
    """Pools as integers, whose copies keep every bit of a NaN."""

    def bits(array: Raw) -> Raw:
        return array.view(f"u{array.itemsize}")

    return {name: [bits(a) for a in pool] if isinstance(pool, list) else bits(pool) for name, pool in pools.items()}
