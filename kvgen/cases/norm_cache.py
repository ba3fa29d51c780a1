"""norm_cache: the norm of K's or V's new rows where they lie."""

from __future__ import annotations

from kvgen.cases.comparison import Comparison
from kvgen.cases.scene import Scene
from kvgen.cases.stored_rows import take_in_place
from kvgen.cases.token_rows import StepCases
from kvgen.cases.touched_bytes import WHOLE
from kvgen.layout.dtypes import dtype
from kvgen.ops import NormCache
from kvgen.reference import norm_cache


class NormCacheCases(StepCases[NormCache]):
    """One role of the step's new tokens."""

    in_place = True

    def changed(self, scene: Scene) -> tuple[str, slice]:
        part = self.op.norm.dim or scene.kv.head_dim - scene.kv.rope_part
        return self.op.role, slice(0, part) if self.op.role == "k" else WHOLE

    def compare(self, j: Comparison) -> int:
        op, cache = self.op, j.case.scene.kv
        which = "kv".index(op.role)
        mine, theirs = j.got.rows(j.case.scene)[which], j.wanted.rows(j.case.scene)[which]
        found, change, word = norm_cache(
            j.view,
            theirs,
            which,
            j.case.numbers.get("num_rows", j.case.call.total),
            row_offsets=j.arrays["row_offsets"],
            norm=op.norm,
            weight=j.arrays[f"{op.role}_weight"],
            kind=dtype(cache.dtype).numpy(),
            latent=theirs.dim - cache.rope_part if cache.rope_part else 0,
        )
        take_in_place(j, found, change, which, mine, theirs)
        return word
