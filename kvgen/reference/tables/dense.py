"""A row of page ids a request, or the id of the one block that holds it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.tables.base import Entry, Laid, Reading
from kvgen.runtime.faults import Fault


class DenseReading(Reading):
    """`page_table` `[B, M]`, or `[B]`, which is a row of one."""

    @property
    def requests(self) -> int:
        return len(self.arrays["page_table"])

    @property
    def columns(self) -> int:
        """The pages that a request has entries for."""
        table = self.arrays["page_table"]
        return int(table.shape[-1]) if table.ndim > 1 else 1

    def holds(self, b: int, n: int) -> bool:
        return n <= self.columns * self.tokens

    def entries(self, b: int, i: int) -> NDArray[Any] | Fault:
        row = np.atleast_1d(self.arrays["page_table"][b])
        return row[i : i + 1] if i < self.columns else Fault.POSITION

    def entry_places(self, b: int, i: int) -> list[Entry]:
        return [("page_table", (b, i) if self.arrays["page_table"].ndim > 1 else (b,))]

    def written(self, laid: Laid) -> dict[str, Any]:
        return {"page_table": laid.ids[:, 0]}

    @property
    def copied_whole(self) -> bool:
        return self.arrays["page_table"].ndim == 1
