"""convert: the tokens of one cache, or some of their heads, in another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from kvgen.cases.comparison import Comparison
from kvgen.cases.contents import Call, Case, Other
from kvgen.cases.operation import CountedCases
from kvgen.cases.scene import Scene
from kvgen.cases.touched_bytes import WHOLE, Marked, Token
from kvgen.ops import Convert, Gather
from kvgen.plan.params import Param, Scalar
from kvgen.reference import convert

Raw = NDArray[Any]


class ConvertCases(CountedCases[Convert]):
    """All tokens that both caches hold; of a part of the heads the last ones."""

    fused = True
    served = "another cache"

    def number(self, scene: Scene, spec: Param) -> int | None:
        return spec.most if isinstance(spec, Scalar) else None  # the first head

    def others(self, scene: Scene) -> dict[str, Other]:
        source = scene.beside(self.op.source_class, self.op.source, Gather(), self.op.source.kv_heads)
        return {"source": Other(source, source.tables(self.lengths))}

    def stored(self, scene: Scene) -> Sequence[int]:
        return ()  # the other cache holds them

    def damaged(self, case: Case) -> tuple[dict[str, Raw], Scene]:
        return case.before.others["source"].tables, case.call.others["source"].scene

    def touched(self, call: Call) -> dict[str, int]:
        """Every token that both caches can hold, in the one that is read and in the one that is written: of each the heads that
        move."""
        scene, source = call.scene, call.others["source"].scene
        written, read = (self._heads(call.numbers.get(name, 0)) for name in ("target_head", "source_head"))
        marked, other = Marked(scene, call.tables), Marked(source, source.tables())
        for b, total in enumerate(scene.workload.totals):
            for position in range(total - min(scene.alive(b), source.alive(b)), total):
                token = Token(b, position, None, total)
                marked.token(token, heads=written)
                other.token(token, heads=read)
        other.lengths()
        return marked.sectors() | {f"source.{name}": n for name, n in other.sectors().items()}

    def _heads(self, first: int) -> slice:
        """The heads that move, of which this is the first."""
        return WHOLE if self.op.heads is None else slice(first, first + self.op.heads)

    def compare(self, j: Comparison) -> int:
        source, read = j.case.call.others["source"].scene, j.wanted.others["source"]
        table = source.view(j.case.before.others["source"].tables)
        pools = j.wanted.rows(j.case.scene)
        first = {name: int(j.case.numbers.get(name, 0)) for name in ("source_head", "target_head")}
        return convert(
            j.view, pools, table, read.rows(source), same_scales=self.op.same_scales, heads=self.op.heads, **first
        )
