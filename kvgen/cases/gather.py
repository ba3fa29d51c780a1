"""gather: all tokens that are alive, dequantized or as they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvgen.cases.comparison import At, Comparison
from kvgen.cases.contents import Call
from kvgen.cases.copied_rows import RUNS, CopiedRowsCases, take_gathered
from kvgen.cases.scene import LAYER, LAYERS
from kvgen.ops import Gather
from kvgen.reference import Rows, gather, gather_raw
from kvgen.reference.gather import Runs


class GatherCases(CopiedRowsCases[Gather]):
    """One layer, or all: K and V, or codes and scales (`raw`)."""

    reads_all = True

    def stored_layers(self, call: Call) -> Sequence[int]:
        return range(LAYERS) if call.launcher.KERNEL.all_layers else (LAYER,)

    def compare(self, j: Comparison) -> int:
        where, word = dict[str, Any](j.places("row_offsets", "starts", "slots")), 0
        if "row_begins" in j.arrays:
            where["row_offsets"] = Runs(j.arrays["row_begins"], j.arrays["row_counts"])
        names = [n for n in ("k_out", "v_out") if n in j.arrays]
        for pools, at in j.copied():
            if self.op.raw:
                word = self._raw(j, pools, at, where)
                continue
            word = take_gathered(j, names, gather(j.view, pools, [j.wanted.arrays[n][at] for n in names], **where), at)
        return word

    def _raw(self, j: Comparison, pools: Sequence[Rows], at: At, where: dict[str, Any]) -> int:
        outputs = {n: a[at] for n, a in j.wanted.arrays.items() if n not in (*where, *RUNS, "errors")}
        # The oracle names what it gives without the ending of an output.
        short = {n.removesuffix("_out"): a for n, a in outputs.items()}
        found, failed, word = gather_raw(j.view, pools, short, **where)
        for name, array in found.items():
            full = name if name in outputs else f"{name}_out"
            outputs[full][...] = array
            if array.dtype.kind not in "iu":
                j.take_nan(full, failed, at)
        return word
