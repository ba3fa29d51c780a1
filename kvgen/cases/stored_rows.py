"""Rows that an operation computes and stores: held to the oracle's, then taken over."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvgen.cases.comparison import Comparison
from kvgen.cases.tolerance import Distance, compare_rows, take_row
from kvgen.reference.append import Changed, NewRow


def take_in_place(j: Comparison, found: list[NewRow], change: Changed, which: int, mine: Any, theirs: Any) -> None:
    """Rows of K (0) or V (1) that were changed where they lie."""
    far = Distance()
    for row, at in enumerate(found):
        if at.places is not None:
            far.add(take_row(mine, theirs, at.places[which], at.token, change, row))
    j.record(f"rows of {'kv'[which]}", far)


def take_q(j: Comparison, found: list[NewRow], change: Changed, scale: float = 1.0) -> None:
    """q_out: near enough in rows that are known, NaN where the position is not, as it was in padding."""
    got = j.got.arrays["q_out"].reshape(len(found), *j.got.arrays["q_out"].shape[-2:])
    wanted = j.wanted.arrays["q_out"].reshape(got.shape)
    heads = change.rows.shape[1]
    behind = np.array([at.state != "padding" for at in found], np.bool_)
    wanted[behind, heads:] = 0
    got, wanted = got[:, :heads], wanted[:, :heads]
    known = np.array([at.state == "known" for at in found], np.bool_)
    unknown = np.array([at.state == "unknown" for at in found], np.bool_)
    j.record("q_out", compare_rows(got, change, known, scale))
    if not np.isnan(got[unknown].astype(np.float32)).all():
        j.wrong.append("q_out: rows without a position must be NaN, and are not")
    wanted[known | unknown] = got[known | unknown]
