"""append: new rows behind the tokens of every request, or into slots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.comparison import Comparison
from kvgen.cases.contents import Call, Case
from kvgen.cases.drafts import drafts
from kvgen.cases.named import new_places
from kvgen.cases.scene import Scene
from kvgen.cases.separate_passes import Pass, separate_passes
from kvgen.cases.step import Step
from kvgen.cases.stored_rows import take_q
from kvgen.cases.taken_rows import taken_rows
from kvgen.cases.token_rows import Rows, StepCases, mark_slots
from kvgen.cases.tolerance import Distance, take_row
from kvgen.cases.touched_bytes import Marked, Token
from kvgen.cases.workload import Launch
from kvgen.ops import Append
from kvgen.reference import seal
from kvgen.reference.append import locate
from kvgen.schema.kernel_set import KernelSet

Raw = NDArray[Any]


class AppendCases(StepCases[Append]):
    """The step's new tokens; with `inputs="q"` its query rows alone."""

    way = "append"

    def begins(self, scene: Scene) -> NDArray[np.int64]:
        if self.op.rows != "padded":
            return super().begins(scene)
        return np.arange(len(scene.workload.new) + 1) * max(scene.workload.new)

    def sizes(self, scene: Scene) -> dict[str, int]:
        return {"S": max(scene.workload.new), "P": max(scene.workload.totals)}

    def value(self, scene: Scene, name: str, like: Raw) -> Any:
        match name:
            case "valid_lengths":
                return scene.workload.new
            case "slots":
                return np.concatenate([new_places(scene, b) for b in range(len(scene.workload.totals))])
            case "q_scale":
                return 1
            case "positions":
                return self._positions(scene, like)
        return super().value(scene, name, like)

    def _positions(self, scene: Scene, like: Raw) -> Raw:
        found, work = np.zeros_like(like), scene.workload
        for b, (begin, total, new) in enumerate(zip(self.begins(scene)[:-1], work.totals, work.new, strict=True)):
            if self.op.rows == "padded":
                found[..., b, :new] = np.arange(total - new, total)
            else:
                found[..., begin : begin + new] = np.arange(total - new, total)
        return found

    def mark(self, call: Call, marked: Marked, rows: Rows) -> None:
        if "slots" in call.arrays:
            mark_slots(call.scene, call.arrays["slots"], marked, rows)
        else:
            super().mark(call, marked, rows)

    def tokens(self, call: Call) -> Iterator[Token]:
        return iter(()) if self.op.inputs == "q" else super().tokens(call)

    def partial(self, call: Call, found: dict[str, int], rows: Rows) -> dict[str, int]:
        return found | taken_rows(call, Step(self.op, call.scene.kernels), rows)

    def replaced(self, call: Call, least: Mapping[str, int]) -> tuple[Pass, ...]:
        return separate_passes(self.op, call, least)

    def steps(self, kernels: KernelSet) -> tuple[Launch, ...]:
        return drafts(kernels, self.op)

    def stored(self, scene: Scene) -> Sequence[int]:
        return scene.workload.before

    def settle(self, case: Case) -> None:
        """Seal the groups of a residual cache, as its own operation does first in a step."""
        if case.scene.cache.storage.residual:
            arrays = case.before.arrays
            new = [arrays[name] for name in "kv" if name in arrays]
            rows = case.before.rows(case.scene)
            seal(case.scene.view(case.before.tables), rows, new, row_offsets=arrays["row_offsets"])

    def compare(self, j: Comparison) -> int:
        scene, given = j.case.scene, j.arrays
        step = Step(self.op, scene.kernels)
        found, word = locate(
            j.view,
            j.case.call.total,
            row_offsets=given.get("row_offsets"),
            slots=given.get("slots"),
            valid_lengths=given.get("valid_lengths"),
            position_out_of_range=lambda row, at: step.position_out_of_range(given, row, at),
            stored=step.op.inputs != "q",
        )
        change = step.changed(given, np.array([at.position or 0 for at in found], np.int64))
        rows, far = step.rows(given), {"k": Distance(), "v": Distance()}
        mine, theirs = j.got.rows(scene), j.wanted.rows(scene)
        for row, at in enumerate(found):
            for role, kept, pool, place in zip("kv", mine, theirs, at.places or (), strict=False):
                if step.changes(role):
                    far[role].add(take_row(kept, pool, place, at.token, change[role], row))
                elif at.position is None:
                    pool.write(place.page, at.token, rows[role][row])
                else:
                    pool.put(at.b, at.position // scene.cache.entry_tokens, place, rows[role][row], at.after)
        for role, distance in far.items():
            j.record(f"rows of {role}", distance)
        if "q_out" in given:
            take_q(j, found, change["q"], float(given["q_scale"][0]) if "q_scale" in given else 1.0)
        return word
