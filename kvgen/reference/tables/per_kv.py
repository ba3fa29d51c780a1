"""Two rows of page ids a request: K's, then V's."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from kvgen.reference.tables.base import Entry, Laid
from kvgen.reference.tables.dense import DenseReading
from kvgen.runtime.faults import Fault


class PerKVReading(DenseReading):
    """`page_table` `[B, 2, M]`."""

    def entries(self, b: int, i: int) -> NDArray[Any] | Fault:
        return self.arrays["page_table"][b][:, i] if i < self.columns else Fault.POSITION

    def entry_places(self, b: int, i: int) -> list[Entry]:
        return [("page_table", (b, 0, i)), ("page_table", (b, 1, i))]

    def written(self, laid: Laid) -> dict[str, Any]:
        return {"page_table": laid.ids}

    def free(self, fresh: NDArray[Any], b: int, i: int, which: int) -> Any:
        return fresh[b, which]
