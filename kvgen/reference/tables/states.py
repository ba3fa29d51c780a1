"""The id of one state a request, which counts as a page of one token here."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.tables.base import Entry, Laid, Reading
from kvgen.runtime.faults import Fault


class StatesReading(Reading):
    """`state_ids[B]`: request b has state `state_ids[b]`, -1: none, which is no token."""

    @property
    def requests(self) -> int:
        return len(self.arrays["state_ids"])

    @property
    def lengths_in(self) -> tuple[str, ...]:
        return ("state_ids",)

    def length(self, b: int) -> int | None:
        entries = self.arrays["state_ids"]
        return int(entries[b] != np.asarray(-1).astype(entries.dtype))

    def holds(self, b: int, n: int) -> bool:
        return n <= 1

    def entries(self, b: int, i: int) -> NDArray[Any] | Fault:
        return self.arrays["state_ids"][b : b + 1] if i == 0 else Fault.POSITION

    def entry_places(self, b: int, i: int) -> list[Entry]:
        return [("state_ids", (b,))]

    def written(self, laid: Laid) -> dict[str, Any]:
        return {"state_ids": laid.ids[:, 0, 0]}

    @property
    def copied_whole(self) -> bool:
        return True
