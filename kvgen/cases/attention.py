"""Attention of query rows to a cache: arguments of masks, what a planner reads, and out and lse beside the oracle's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.closeness import Numerics, limits
from kvgen.cases.comparison import Comparison
from kvgen.cases.contents import Call
from kvgen.cases.operation import O, Totals
from kvgen.cases.scene import Lengths, Scene
from kvgen.cases.token_rows import TokenCases
from kvgen.cases.tolerance import Distance
from kvgen.cases.touched_bytes import Marked
from kvgen.cases.workload import Workload
from kvgen.errors import ToolError
from kvgen.plan.params import Param, Scalar
from kvgen.reference import Decoded
from kvgen.schema.kernel_set import KernelSet
from kvgen.schema.mask import Mask

Raw = NDArray[Any]
LONG: Final = 333  # tokens: more than the shortest piece that a decode is cut into


class AttentionCases(TokenCases[O]):
    """Query rows that read the tokens of their requests."""

    reads_all = True

    def sizes(self, scene: Scene) -> dict[str, int]:
        return dict.fromkeys("KNP", max(scene.workload.totals))

    def number(self, scene: Scene, spec: Param) -> int | None:
        return 1 if isinstance(spec, Scalar) else None  # of a score function

    def value(self, scene: Scene, name: str, like: Raw) -> Any:
        match name:
            case "q_scale" | "out_scale":
                return 1
            case "valid_tokens":
                return scene.workload.totals
            case "mask" | "tree_mask":  # all is visible
                return np.iinfo(like.dtype).max
        return super().value(scene, name, like)

    def asks_lengths(self, call: Call) -> bool:
        """Without a planner: a list of chunks has the lengths in it."""
        return self.op.plan(call.scene.kernels)[0].split is None

    def planning(self, call: Call) -> dict[str, int]:
        """Every request's length."""
        marked = Marked(call.scene, call.tables)
        marked.lengths()
        return {name: n for name, n in marked.sectors().items() if n}

    def batches(self, kernels: KernelSet, totals: Totals) -> list[Workload]:
        """A request that is long enough to be cut in pieces."""
        return [Workload("long", totals(LONG, 40), (1, 1))]


class RowsAttentionCases(AttentionCases[O]):
    """A fixed number of query rows a request, which are its newest tokens."""

    lengths: Lengths = "rows"

    def call(self, scene: Scene) -> Call:
        shortest = min(scene.workload.totals)
        if shortest < self.rows_each:
            raise ToolError(
                f"{scene.kernels.name}/{self.op.name}: got a request of {shortest} tokens; {self.rows_each} rows of q are as "
                "many new tokens; give more"
            )
        return super().call(scene)

    def counts(self, scene: Scene) -> Sequence[int]:
        return (self.rows_each,) * len(scene.workload.totals)

    def takes(self, scene: Scene, spec: Param) -> bool:
        return spec.name != "row_offsets"  # a request has `rows_each` rows


def first_seen(mask: Mask, total: int, rows: int) -> int:
    """The first token that one of the last `rows` rows of a request sees: the first of them sees furthest back."""
    position = total - rows
    window = position - mask.window + 1 if mask.window is not None else 0
    return max(window, position // mask.chunk * mask.chunk if mask.chunk is not None else 0)


def take_attended(j: Comparison, wanted: Decoded, given: Numerics, heads: NDArray[np.bool_] | None = None) -> int:
    """out and lse of these query heads (None: all), row by row: NaN where the oracle has NaN, exactly 0 and the empty log-sum-exp
    where a row sees nothing, else within the bounds of kvgen.cases.closeness. Returns the error word."""
    out, lse = j.got.arrays["out"].astype(np.float64), j.got.arrays.get("lse")
    if heads is not None:
        out = np.where(heads[:, None], out, wanted.out)
        lse = None if lse is None else np.where(heads, lse, wanted.lse)
    empty_lse = float(given.lse_empty)
    for row, seen in enumerate(wanted.seen):
        if seen is None:
            if not np.isnan(out[row]).all() or (lse is not None and not np.isnan(lse[row]).all()):
                j.wrong.append(f"out: row {row} is of a request with wrong data; it must be NaN, and is not")
            continue
        empty = wanted.lse[row] == empty_lse
        if out[row][empty].any() or (lse is not None and (lse[row][empty] != empty_lse).any()):
            j.wrong.append(f"out: row {row} sees no token; it must be 0, and lse {given.lse_empty}")
        if empty.all():
            continue
        allowed, lse_allowed = limits(wanted, given, j.arrays["q"], row)
        far, far_lse = Distance(), Distance()
        far.record(np.abs(out[row] - wanted.out[row]), allowed)
        j.record(f"out, row {row}", far)
        if lse is not None:
            far_lse.record(np.abs(lse[row][~empty] - wanted.lse[row][~empty]), lse_allowed[~empty])
            if not far_lse.share <= 1:
                j.wrong.append(f"lse, row {row}: off by {far_lse.error:.3g}, {far_lse.share:.3g} times its bound")
    for name in ("out", "lse"):
        if name in j.arrays:
            j.wanted.arrays[name][...] = j.got.arrays[name]
    return wanted.errors
