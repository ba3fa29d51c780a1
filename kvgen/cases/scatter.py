"""scatter: rows over the tokens that are alive, as values or as codes and scales."""

from __future__ import annotations

from kvgen.cases.comparison import Comparison
from kvgen.cases.copied_rows import CopiedRowsCases
from kvgen.ops import Scatter
from kvgen.reference import scatter, scatter_raw


class ScatterCases(CopiedRowsCases[Scatter]):
    """One layer, or all."""

    def compare(self, j: Comparison) -> int:
        where, word = j.places("row_offsets", "starts", "slots"), 0
        for pools, at in j.copied():
            if self.op.raw:
                given = {n: a[at] for n, a in j.arrays.items() if n not in (*where, "errors")}
                word = scatter_raw(j.view, pools, given, **where)
            else:
                new = [j.arrays[name][at] for name in "kv" if name in j.arrays]
                word = scatter(j.view, pools, new, **where)
        return word
