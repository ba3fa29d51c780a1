"""mla_decompress: the latent rows of one chunk of keys."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.comparison import Comparison
from kvgen.cases.copied_rows import take_gathered
from kvgen.cases.decompressed import alignment_of
from kvgen.cases.operation import Cases
from kvgen.cases.scene import Scene
from kvgen.ops import MlaDecompress
from kvgen.reference import mla_decompress, mla_plan

Raw = NDArray[Any]


class MlaDecompressCases(Cases[MlaDecompress]):
    """One buffer with the keys of all requests, as mla_plan lays them."""

    lengths = "step"

    def sizes(self, scene: Scene) -> dict[str, int]:
        return {"T": self._buffer_rows(scene)}

    def value(self, scene: Scene, name: str, like: Raw) -> Any:
        if name in ("buffer_row_offsets", "cache_offsets"):
            own = self.begins(scene) if scene.kv.lengths == "before" else None
            view, to = scene.view(scene.tables(self.lengths)), alignment_of(scene, self.op)
            plan = mla_plan(view, 1, self._buffer_rows(scene), to, np.dtype(np.int64), own)
            return getattr(plan, name)[0]
        return super().value(scene, name, like)

    def _buffer_rows(self, scene: Scene) -> int:
        to = alignment_of(scene, self.op)
        return sum(-(-n // to) * to for n in scene.workload.totals)

    def compare(self, j: Comparison) -> int:
        name = next(n for n in ("k_latent", "k") if n in j.arrays)
        pools, to = j.wanted.rows(j.case.scene), alignment_of(j.case.scene, self.op)
        where = j.places("buffer_row_offsets", "cache_offsets", "row_offsets")
        return take_gathered(j, [name], mla_decompress(j.view, pools, j.wanted.arrays[name], to, **where))
