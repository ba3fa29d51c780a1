"""sliced_add: the sum of two arrays in their first rows."""

from __future__ import annotations

import numpy as np

from kvgen.reference.faults import FaultLog
from kvgen.reference.new_rows import Raw
from kvgen.runtime.faults import Fault


def sliced_add(a: Raw, b: Raw, *, lora_end_idx: int) -> tuple[Raw, int]:
    """(c, error word): c[r] = a[r] + b[r] for r < m, else a[r]; an m below 0 or past the rows of a or b adds nothing."""
    faults, rows, c = FaultLog(), min(len(a), len(b)), a.copy()
    if not len(a):
        return c, faults.word
    if not 0 <= lora_end_idx <= rows:
        faults.add(Fault.LORA_END, 0, 0 if lora_end_idx < 0 else rows)
        return c, faults.word
    m = lora_end_idx
    with np.errstate(all="ignore"):
        c[:m] = (a[:m].astype(np.float32) + b[:m].astype(np.float32)).astype(a.dtype)
    return c, faults.word
