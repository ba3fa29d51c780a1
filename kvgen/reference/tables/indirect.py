"""A slot per token, in the row that the request's id names."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.tables.base import Entry, Laid, Reading, index
from kvgen.runtime.faults import Fault


class IndirectReading(Reading):
    """`req_to_token[R, M]` and `request_ids[B]`."""

    @property
    def requests(self) -> int:
        return len(self.arrays["request_ids"])

    def has_row(self, b: int) -> bool:
        row = index(self.arrays["request_ids"][b])
        return row is not None and row < self.arrays["req_to_token"].shape[0]

    def holds(self, b: int, n: int) -> bool:
        return n <= self.arrays["req_to_token"].shape[1] and self.has_row(b)

    def entries(self, b: int, i: int) -> NDArray[Any] | Fault:
        if not self.has_row(b):
            return Fault.TABLE
        row, table = self.arrays["request_ids"][b], self.arrays["req_to_token"]
        return table[row, i : i + 1] if i < table.shape[1] else Fault.POSITION

    def entry_places(self, b: int, i: int) -> list[Entry]:
        return [("req_to_token", (int(self.arrays["request_ids"][b]), i))]

    def read_first(self, b: int) -> list[Entry]:
        return [("request_ids", (b,))]

    def written(self, laid: Laid) -> dict[str, Any]:
        return {"req_to_token": laid.ids[:, 0], "request_ids": np.arange(len(laid.ids))}
