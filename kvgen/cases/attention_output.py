"""attention_output: what attention gave, V's transforms undone."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.angles import table_rows
from kvgen.cases.comparison import Comparison
from kvgen.cases.operation import Cases
from kvgen.cases.scene import Scene
from kvgen.cases.tolerance import Distance, compare_rows
from kvgen.lowering.new_rows_rules import resolve_rope
from kvgen.ops import AttentionOutput
from kvgen.reference import attention_output
from kvgen.reference.attention_output import Output, blocks_of, read_blocks, scales_of
from kvgen.reference.rope import Table
from kvgen.reference.rounding import ulp

Raw = NDArray[Any]


class AttentionOutputCases(Cases[AttentionOutput]):
    """A row a new token."""

    def sizes(self, scene: Scene) -> dict[str, int]:
        return {"P": table_rows(scene)}

    def value(self, scene: Scene, name: str, like: Raw) -> Any:
        return np.arange(like.size).reshape(like.shape) % table_rows(scene) if name == "positions" else None

    def compare(self, j: Comparison) -> int:
        op, given, cache = self.op, j.arrays, j.case.scene.kernels.kv
        found = attention_output(
            given["o"],
            hadamard=op.hadamard,
            rope=resolve_rope(op.rope, j.case.scene.kernels),
            local=op.rope == "local",
            positions=given.get("positions"),
            table=Table(given["cos_sin"], op.angles) if op.angles != "computed" else None,
            dims=cache.rope_part or None,
            part="last" if cache.rope_part else None,
        )
        out = j.got.arrays["out"]
        if op.block is None:
            j.record("out", compare_rows(out, found.change, found.known))
        else:
            _take_blocks(j, op, found)
        if not np.isnan((out if op.block is None else out.swapaxes(0, 1))[~found.known].astype(np.float32)).all():
            j.wrong.append("out: rows without a position must be NaN, and are not")
        for name in ("out", "out_scales"):
            if name in given:
                j.wanted.arrays[name][...] = j.got.arrays[name]
        return found.word


def _take_blocks(j: Comparison, op: AttentionOutput, found: Output) -> None:
    """Codes and scales: scales between those of rows that have lost what f32 may lose, codes within half a step of the rows."""
    assert op.block is not None
    out, heads = j.got.arrays["out"].swapaxes(0, 1), j.case.scene.kernels.q_heads
    rows, lost = found.change.rows[found.known], found.change.lost[found.known]
    codes = np.ascontiguousarray(out).view(np.uint8).reshape(found.change.rows.shape)[found.known]
    scales = scales_of(j.got.arrays["out_scales"], heads)[found.known]
    low, high = (
        blocks_of(np.maximum(np.abs(rows) + by, 0), op.block, op.recipe, op.amax_min)[0] for by in (-lost, lost)
    )
    far = Distance()
    far.record(np.abs(scales - np.clip(scales, low, high)), ulp(high, np.dtype(np.float32)))
    j.record("scales", far)
    half = np.maximum(np.abs(rows) * 2.0**-4, np.repeat(scales, op.block, axis=-1) * 2.0**-10) * 1.001 + lost
    far = Distance()
    far.record(np.abs(read_blocks(codes, scales) - rows), half)
    j.record("out", far)
