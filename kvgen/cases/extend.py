"""extend: attention of any number of new rows of every request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvgen.cases import attention
from kvgen.cases.attention import LONG, AttentionCases, first_seen
from kvgen.cases.closeness import numerics
from kvgen.cases.comparison import Comparison
from kvgen.cases.contents import Call
from kvgen.cases.operation import Totals
from kvgen.cases.scene import Lengths, Scene
from kvgen.cases.workload import Workload
from kvgen.ops import Extend
from kvgen.plan.params import Param
from kvgen.reference import extend
from kvgen.reference.tables import LIMIT
from kvgen.schema.kernel_set import KernelSet
from kvgen.schema.mask import TREE_ROWS


class ExtendCases(AttentionCases[Extend]):
    """A query row for every new token, which is stored by then."""

    def __init__(self, op: Extend) -> None:
        super().__init__(op)
        self.lengths: Lengths = "all" if op.cross else "step"

    def counts(self, scene: Scene) -> Sequence[int]:
        return scene.workload.new

    def parameters(self, launcher: Any) -> Sequence[Param]:
        return [*launcher.KERNEL.arguments, *launcher.PLAN.arguments]

    def takes(self, scene: Scene, spec: Param) -> bool:
        return True

    def span(self, call: Call, b: int) -> tuple[int, int]:
        first, last = super().span(call, b)
        work = call.scene.workload
        return max(first, first_seen(self.op.mask, work.totals[b], work.new[b])), last

    def batches(self, kernels: KernelSet, totals: Totals) -> list[Workload]:
        """The batch of every attention, and a prompt behind a prefix beside one without."""
        prompt = Workload("prompt", totals(LONG, 40, 17), (LONG - 20, 40, 1))
        return [*super().batches(kernels, totals), prompt]

    def compare(self, j: Comparison) -> int:
        given = numerics(j.case.scene.kernels, self.op, {**j.arrays, **j.case.numbers})
        how = {name: value for name, value in given.oracle().items() if name != "rows"}
        most = TREE_ROWS if self.op.mask.tree == "packed" else LIMIT
        rows, offsets = j.wanted.rows(j.case.scene), j.arrays.get("row_offsets")
        wanted = extend(j.view, rows, j.arrays["q"], row_offsets=offsets, most_rows=most, **how)
        # Near a row that sees a page that is not there others may be NaN as well.
        lost = wanted.doubtful & np.isnan(j.got.arrays["out"].astype(np.float64)).all(axis=(1, 2))
        seen = tuple(None if gone else one for gone, one in zip(lost, wanted.seen, strict=True))
        return attention.take_attended(j, replace(wanted, seen=seen), given)
