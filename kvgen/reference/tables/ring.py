"""A row of page ids used as a ring: logical page i lies in column i % columns, and the last `window` tokens live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from kvgen.reference.tables.base import Entry
from kvgen.reference.tables.dense import DenseReading
from kvgen.runtime.faults import Fault


@dataclass(frozen=True)
class RingReading(DenseReading):
    """`page_table` `[B, columns]`."""

    window: int

    def first_token(self, n: int) -> int:
        return max(0, n - self.window)

    def stored(self, b: int, token: int) -> bool:
        n = self.length(b)
        return n is not None and self.first_token(n) <= token < n and not self.overtaken(token // self.tokens, n)

    def overtaken(self, page: int, n: int) -> bool:
        return (n - 1) // self.tokens - page >= self.columns

    def holds(self, b: int, n: int) -> bool:
        return (n - 1) // self.tokens - self.first_token(n) // self.tokens + 1 <= self.columns

    def entries(self, b: int, i: int) -> NDArray[Any] | Fault:
        return super().entries(b, i % self.columns) if self.columns else Fault.POSITION

    def entry_places(self, b: int, i: int) -> list[Entry]:
        return super().entry_places(b, i % self.columns)

    @property
    def copied_whole(self) -> bool:
        return True

    def free(self, fresh: NDArray[Any], b: int, i: int, which: int) -> Any:
        return fresh[b, i % fresh.shape[1]]
