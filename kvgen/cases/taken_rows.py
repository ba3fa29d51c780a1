"""Rows that a step's operation is given: the sectors of those that it needs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.contents import Call
from kvgen.cases.step import Step
from kvgen.cases.token_rows import Rows
from kvgen.cases.touched_bytes import Marks, sectors_of


def taken_rows(call: Call, step: Step | None, of: Rows) -> dict[str, int]:
    """Sectors of the rows that an operation takes, q's of every row, K's and V's of those that are stored; of positions and
    angles those of rows that are rotated. `step` is that of an operation that changes them."""
    live, stored, found = of.live, of.stored, dict[str, int]()
    padded = getattr(call.op, "rows", "") == "padded"
    rotated = live if "q_out" in call.arrays else stored["k"]
    for name, array in call.arrays.items():
        rows = array.reshape(-1, *array.shape[2:]) if padded and array.ndim > 2 else array
        taken = np.zeros(rows.shape, np.bool_)
        if name == "qkv" and step is not None:
            for role, columns in step.columns().items():
                taken[:, columns] = (live if role == "q" else stored[role])[:, None]
        elif name in ("q", "q_out"):
            taken[live] = True
        elif name in ("k", "v", "k_latent", "k_rope"):
            taken[stored[name[0]]] = True
        elif name == "positions":
            taken.reshape(-1, call.total)[:] = rotated
        elif name == "cos_sin" and step is not None:
            _mark_angles(call, step, rotated, taken)
        else:
            continue
        found[name] = sectors_of(np.repeat(taken.reshape(-1), array.itemsize))
    return found


def _mark_angles(call: Call, step: Step, rotated: Marks, taken: Marks) -> None:
    """The entries of a table of angles by which rows are rotated: of each section those of its pairs."""
    half = taken.shape[1] // 2
    ends = np.cumsum(step.op.sections or (step.rotary_dim // 2,))
    for section, end in enumerate(ends):
        pairs = np.arange(0 if section == 0 else ends[section - 1], end)
        columns = np.concatenate([pairs, half + pairs] if step.op.angles == "halves" else [2 * pairs, 2 * pairs + 1])
        taken[np.ix_(_positions(call)[rotated], columns)] = True


def _positions(call: Call) -> NDArray[np.int64]:
    """The position by which every row of the step rotates, 0 of padding."""
    scene = call.scene
    found, rate = np.zeros(call.total, np.int64), scene.cache.entry_tokens
    for begin, total, new in zip(call.begins, scene.workload.totals, scene.workload.new, strict=True):
        found[begin : begin + new] = np.arange(total - new, total) // rate * rate
    return found
