"""A row of page ids a request, in a table of every request there is: the step's requests say which rows are theirs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.tables.base import Entry, Laid, Reading, index
from kvgen.runtime.faults import Fault


class MappedReading(Reading):
    """`page_table[R, M]` and `idx_mapping[B]`."""

    @property
    def requests(self) -> int:
        return len(self.arrays["idx_mapping"])

    def has_row(self, b: int) -> bool:
        row = index(self.arrays["idx_mapping"][b])
        return row is not None and row < self.arrays["page_table"].shape[0]

    def holds(self, b: int, n: int) -> bool:
        return n <= self.arrays["page_table"].shape[1] * self.tokens and self.has_row(b)

    def entries(self, b: int, i: int) -> NDArray[Any] | Fault:
        if not self.has_row(b):
            return Fault.TABLE
        row, table = self.arrays["idx_mapping"][b], self.arrays["page_table"]
        return table[row, i : i + 1] if i < table.shape[1] else Fault.POSITION

    def entry_places(self, b: int, i: int) -> list[Entry]:
        return [("page_table", (int(self.arrays["idx_mapping"][b]), i))]

    def read_first(self, b: int) -> list[Entry]:
        return [("idx_mapping", (b,))]

    def written(self, laid: Laid) -> dict[str, Any]:
        return {"page_table": laid.ids[:, 0], "idx_mapping": np.arange(len(laid.ids))}
