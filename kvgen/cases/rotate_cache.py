"""rotate_cache: RoPE of K's new rows where they lie, and of q."""

from __future__ import annotations

from kvgen.cases.comparison import Comparison
from kvgen.cases.contents import Call
from kvgen.cases.scene import Scene
from kvgen.cases.step import Step
from kvgen.cases.stored_rows import take_in_place, take_q
from kvgen.cases.taken_rows import taken_rows
from kvgen.cases.token_rows import Rows, StepCases
from kvgen.ops import RotateCache
from kvgen.reference import rotate_cache


class RotateCacheCases(StepCases[RotateCache]):
    """K of the step's new tokens."""

    in_place = True

    def changed(self, scene: Scene) -> tuple[str, slice]:
        return "k", slice(*Step(self.op, scene.kernels).rotated(scene.kv.head_dim))

    def partial(self, call: Call, found: dict[str, int], rows: Rows) -> dict[str, int]:
        return super().partial(call, found, rows) | taken_rows(call, Step(self.op, call.scene.kernels), rows)

    def compare(self, j: Comparison) -> int:
        scene = j.case.scene
        rope = Step(self.op, scene.kernels).rope
        assert rope is not None
        mine, theirs = j.got.rows(scene)[0], j.wanted.rows(scene)[0]
        latent = theirs.dim - scene.kv.rope_part if scene.kv.rope_part else 0
        found, change, q, word = rotate_cache(
            j.view,
            theirs,
            j.case.numbers.get("num_rows", j.case.call.total),
            j.arrays.get("q"),
            row_offsets=j.arrays["row_offsets"],
            rope=rope,
            latent=latent,
        )
        take_in_place(j, found, change, 0, mine, theirs)
        if q is not None:
            take_q(j, found, q)
        return word
