"""Operations that copy, change or read tokens row by row: the sectors that they must touch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.contents import Call
from kvgen.cases.operation import CountedCases, O, one_page
from kvgen.cases.scene import LAYERS, Lengths, Scene
from kvgen.cases.touched_bytes import WHOLE, Marked, Marks, Token, Way
from kvgen.cases.workload import Workload
from kvgen.plan.params import Param
from kvgen.reference import Place
from kvgen.schema.kernel_set import KernelSet

Raw = NDArray[Any]
STEPS: Final = ((128, 1024, 1), (1, 4096, 4096))  # requests, tokens of each, new ones: a decode step and a prompt


@dataclass(frozen=True)
class Rows:
    """Rows of a call: those that are somebody's (`live`), and those that are stored, by role."""

    live: Marks
    stored: dict[str, Marks]


class TokenCases(CountedCases[O]):
    """An operation on tokens: by default it reads every token that is alive."""

    way: ClassVar[Way] = "read"
    every_layer: ClassVar[bool] = False
    """One call may be of all layers."""

    def sizes(self, scene: Scene) -> dict[str, int]:
        return {"all_layers": LAYERS}

    def touched(self, call: Call) -> dict[str, int]:
        """Tables count the entries that say where the tokens are: a page's entry once, a request's length and offsets once."""
        every_layer = self.every_layer and call.launcher.KERNEL.all_layers
        raw = bool(getattr(self.op, "raw", False))
        marked = Marked(call.scene, call.tables, raw=raw, every_layer=every_layer)
        rows = Rows(np.zeros(call.total, np.bool_), {role: np.zeros(call.total, np.bool_) for role in "kv"})
        self.mark(call, marked, rows)
        return self.partial(call, marked.sectors(), rows)

    def mark(self, call: Call, marked: Marked, rows: Rows) -> None:
        """Mark what the call touches of the cache; note in `rows` which of its rows are."""
        for token in self.tokens(call):
            marked.token(token, self.way)
        if self.asks_lengths(call):
            marked.lengths()

    def partial(self, call: Call, found: dict[str, int], rows: Rows) -> dict[str, int]:
        """The sectors of the cache, `found`, and those of arrays of which a part is enough."""
        return found

    def tokens(self, call: Call) -> Iterator[Token]:
        """Every token that is read or written."""
        scene = call.scene
        for b, total in enumerate(scene.workload.totals):
            first, last = self.span(call, b)
            new = total - scene.workload.new[b]
            for position in range(first, last):
                yield Token(b, position, call.begins[b] + position - new if position >= new else None, total)

    def span(self, call: Call, b: int) -> tuple[int, int]:
        """The tokens of request b, from and to."""
        last = call.scene.entries(call.scene.workload.totals[b])
        return last - call.scene.alive(b), last

    def asks_lengths(self, call: Call) -> bool:
        """True where the kernel must read how many tokens requests have."""
        return call.scene.cache.page_table.drops_tokens


def mark_slots(scene: Scene, slots: Raw, marked: Marked, rows: Rows) -> None:
    """The tokens that lie in slots; -1 is none."""
    rows.live[:] = True
    for stored in rows.stored.values():
        stored[:] = slots >= 0
    for slot in slots[slots >= 0].tolist():
        page, token = divmod(slot, scene.tokens)
        marked.row((Place(page, page),) * 2, token)


class StepCases(TokenCases[O]):
    """An operation on the new tokens of a step."""

    lengths: Lengths = "step"
    in_place: ClassVar[bool] = False
    """It changes what is stored: read once and written once."""

    def counts(self, scene: Scene) -> Sequence[int]:
        return scene.workload.new

    def number(self, scene: Scene, spec: Param) -> int | None:
        return int(self.begins(scene)[-1]) if spec.name in ("num_rows", "lora_end_idx") else None

    def timed(self, kernels: KernelSet) -> list[Workload]:
        """A decode step, and a prompt."""
        found = []
        for batch, tokens, new in STEPS:
            fits = one_page(kernels, tokens)
            found.append(Workload.uniform(batch, fits, min(new, fits)))
        return found

    def mark(self, call: Call, marked: Marked, rows: Rows) -> None:
        for b, new in enumerate(call.scene.workload.new):
            rows.live[call.begins[b] : call.begins[b] + new] = True
        roles, dims = self.changed(call.scene)
        for token in self.tokens(call):
            for role in marked.token(token, self.way, roles, dims):
                if token.row is not None:
                    rows.stored[role][token.row] = True
        marked.lengths()

    def changed(self, scene: Scene) -> tuple[str, slice]:
        """The roles that are touched, and the dims of a head."""
        return "kv", WHOLE

    def partial(self, call: Call, found: dict[str, int], rows: Rows) -> dict[str, int]:
        if not self.in_place:
            return found
        written = {t.name for t in call.scene.package.Cache.TENSORS if t.writes}
        return {name: (2 if name.partition("[")[0] in written else 1) * n for name, n in found.items()}

    def tokens(self, call: Call) -> Iterator[Token]:
        if call.scene.cache.entry_tokens == 1:
            yield from super().tokens(call)
            return
        for b, begin in enumerate(call.begins):
            yield from self._new_entries(call.scene, b, begin)

    def span(self, call: Call, b: int) -> tuple[int, int]:
        """Pages of a ring that later rows of the same step take over are not written."""
        scene, total = call.scene, call.scene.workload.totals[b]
        kept = (-(-total // scene.tokens) - len(scene.ids[b])) * scene.tokens
        return max(total - scene.workload.new[b], kept), scene.entries(total)

    def _new_entries(self, scene: Scene, b: int, begin: int) -> Iterator[Token]:
        """The entries that new tokens of request b end; its rows begin at `begin`."""
        total, new, rate = scene.workload.totals[b], scene.workload.new[b], scene.cache.entry_tokens
        for position in range(total - new, total):
            if (position + 1) % rate == 0:
                yield Token(b, position // rate, begin + position - total + new, total)
