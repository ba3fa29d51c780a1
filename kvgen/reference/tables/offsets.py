"""No pages: where each request's rows begin; a page is a row of one token here."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.tables.base import Entry, Laid, Reading, slice_of
from kvgen.runtime.faults import Fault


class OffsetsReading(Reading):
    """`kv_offsets[B + 1]`: request b has the rows [kv_offsets[b], kv_offsets[b + 1]) of the tensors."""

    @property
    def requests(self) -> int:
        return len(self.arrays["kv_offsets"]) - 1

    @property
    def lengths_in(self) -> tuple[str, ...]:
        return ("kv_offsets",)

    def length(self, b: int) -> int | None:
        found = slice_of(self.arrays["kv_offsets"], b, self.pages)
        return None if found is None else found[1] - found[0]

    def holds(self, b: int, n: int) -> bool:
        return n <= (self.length(b) or 0)

    def entries(self, b: int, i: int) -> NDArray[Any] | Fault:
        rows = self.length(b)
        if rows is None:
            return Fault.TABLE
        return np.array([int(self.arrays["kv_offsets"][b]) + i]) if i < rows else Fault.POSITION

    def entry_places(self, b: int, i: int) -> list[Entry]:
        return []

    def read_first(self, b: int) -> list[Entry]:
        return [("kv_offsets", (b,)), ("kv_offsets", (b + 1,))]

    def written(self, laid: Laid) -> dict[str, Any]:
        return {"kv_offsets": np.cumsum([0, *laid.counts])}
