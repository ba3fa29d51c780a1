"""indexer_query: an indexer's query rows behind RoPE and Hadamard transform."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.angles import table_rows
from kvgen.cases.comparison import Comparison
from kvgen.cases.operation import Cases
from kvgen.cases.scene import Scene
from kvgen.cases.tolerance import Distance
from kvgen.lowering.new_rows_rules import resolve_rope
from kvgen.ops import IndexerQuery
from kvgen.reference import indexer_query
from kvgen.reference.indexer_query import Query, e2m1_half_step, head_scales
from kvgen.reference.indexer_scores import e8m0_scales, unpacked
from kvgen.reference.rope import Table

Raw = NDArray[Any]


class IndexerQueryCases(Cases[IndexerQuery]):
    """A row a new token."""

    def sizes(self, scene: Scene) -> dict[str, int]:
        return {"P": table_rows(scene)}

    def value(self, scene: Scene, name: str, like: Raw) -> Any:
        return np.arange(like.size).reshape(like.shape) % table_rows(scene) if name == "positions" else None

    def compare(self, j: Comparison) -> int:
        """Weights between those of rows that have lost what f32 may lose, codes within half a step of the rows."""
        op, given, kernels = self.op, j.arrays, j.case.scene.kernels
        found = indexer_query(
            given["q"],
            rope=resolve_rope(op.rope, kernels),
            local=op.rope == "local",
            positions=given.get("positions"),
            table=Table(given["cos_sin"], op.angles) if op.angles != "computed" else None,
            hadamard=op.hadamard,
        )
        rows, lost = found.change.rows[found.known], found.change.lost[found.known]
        if "q_scales" in given:
            return _take_packed(j, op, found)
        codes, got = (j.got.arrays[name][found.known].astype(np.float64) for name in ("q_out", "weights_out"))
        weights = given["weights"][found.known].astype(np.float64) * op.weight_factor(kernels)
        ends = [
            weights * head_scales(np.maximum(np.abs(rows) + by, 0), op.recipe, op.least(kernels))
            for by in (-lost, lost)
        ]
        low, high = np.minimum(*ends), np.maximum(*ends)
        far = Distance()  # a scale, two products and the factor are rounded, and so are the ends
        far.record(np.abs(got - np.clip(got, low, high)), 5 * 2.0**-24 * np.maximum(np.abs(low), np.abs(high)))
        j.record("weights_out", far)
        with np.errstate(all="ignore"):
            scale = (got / weights)[..., None]
            half = np.maximum(np.abs(rows) * 2.0**-4, scale * 2.0**-10) * 1.001 + lost
            far = Distance()
            far.record(np.abs(codes * scale - rows), np.where(weights[..., None] == 0, np.inf, half))
        j.record("q_out", far)
        for name in ("q_out", "weights_out"):
            if not np.isnan(j.got.arrays[name][~found.known].astype(np.float32)).all():
                j.wrong.append(f"{name}: rows without a position must be NaN, and are not")
            j.wanted.arrays[name][...] = j.got.arrays[name]
        return found.word


def _take_packed(j: Comparison, op: IndexerQuery, found: Query) -> int:
    """Codes of e2m1, whose numbers are within half a step of the rows."""
    kernels, far = j.case.scene.kernels, Distance()
    names = ("q_out", "q_scales", "weights_out")
    codes, words, got = (np.ascontiguousarray(j.got.arrays[name][found.known]) for name in names)
    rows, lost = found.change.rows[found.known], found.change.lost[found.known]
    numbers, scales = unpacked(codes, words), np.repeat(e8m0_scales(words), 32, axis=-1)
    far.record(np.abs(numbers - rows), e2m1_half_step(rows, scales) * 1.001 + lost)
    j.record("q_out", far)
    weights = j.arrays["weights"][found.known].astype(np.float64) * op.weight_factor(kernels)
    far = Distance()
    far.record(np.abs(got - weights), 2.0**-22 * np.abs(weights))
    j.record("weights_out", far)
    if not np.isnan(j.got.arrays["weights_out"][~found.known]).all():
        j.wrong.append("weights_out: rows without a position must be NaN, and are not")
    for name in names:
        j.wanted.arrays[name][...] = j.got.arrays[name]
    return found.word
