"""merge_states: attention over disjoint sets of keys, made one."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.closeness import HALF_ULP, TINY
from kvgen.cases.comparison import Comparison
from kvgen.cases.operation import Cases
from kvgen.cases.scene import Scene
from kvgen.cases.tolerance import Distance
from kvgen.ops import MergeStates
from kvgen.plan.params import Array, Param
from kvgen.reference import merge_states

Raw = NDArray[Any]
STATES: Final = 3


class MergeStatesCases(Cases[MergeStates]):
    """Three states, or two; a fifth of them saw nothing."""

    def sizes(self, scene: Scene) -> dict[str, int]:
        return {"S": STATES}

    def draw(self, spec: Param, array: Raw, rng: np.random.Generator) -> None:
        if isinstance(spec, Array) and spec.name.startswith("lse") and spec.access == "in":
            array[rng.random(array.shape) < 0.2] = float(self.op.lse_empty)

    def compare(self, j: Comparison) -> int:
        """Within half an ulp of the output and what f32 loses of weights: an exponent of at most 128, rounded, and 2^-21."""
        op, given = self.op, j.arrays
        if "outs" in given:
            outs, lses = given["outs"], given["lses"]
            if op.first == "rows":
                outs, lses = outs.swapaxes(0, 1), lses.swapaxes(0, 1)
        else:
            outs, lses = (np.stack([given[f"{n}_a"], given[f"{n}_b"]]) for n in ("out", "lse"))
        wanted, sums = merge_states(outs, lses, base=op.lse_base, empty=op.lse_empty)
        kind = op.out_dtype or op.dtype or j.case.scene.kv.dtype
        bound = HALF_ULP[kind] * np.abs(wanted) + TINY[kind] + 2.0**-15 * np.abs(outs.astype(np.float64)).max(axis=0)
        far, far_lse = Distance(), Distance()
        far.record(np.abs(j.got.arrays["out"].astype(np.float64) - wanted), bound)
        j.record("out", far)
        lse, finite = j.got.arrays["lse"].astype(np.float64), np.isfinite(sums)
        far_lse.record(np.abs(lse[finite] - sums[finite]), 2.0**-19 * (1 + np.abs(sums[finite])))
        if not far_lse.share <= 1 or (lse[~finite] != sums[~finite]).any():
            j.wrong.append(f"lse: off by {far_lse.error:.3g}, {far_lse.share:.3g} times its bound")
        for name in ("out", "lse"):
            j.wanted.arrays[name][...] = j.got.arrays[name]
        return 0
