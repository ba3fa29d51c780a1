"""All page ids in one list, a slice a request."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.tables.base import Entry, Laid, Reading, index, slice_of
from kvgen.runtime.faults import Fault


class CSRReading(Reading):
    """`page_indices[I]`, `page_indptr[B + 1]`, and `last_page_len[B]` where the table says lengths."""

    @property
    def requests(self) -> int:
        return len(self.arrays["page_indptr"]) - 1

    def counted_pages(self, b: int) -> int | Fault:
        found = slice_of(self.arrays["page_indptr"], b, len(self.arrays["page_indices"]))
        return Fault.TABLE if found is None else found[1] - found[0]

    def holds(self, b: int, n: int) -> bool:
        count = self.counted_pages(b)
        return not isinstance(count, Fault) and n <= count * self.tokens

    def entries(self, b: int, i: int) -> NDArray[Any] | Fault:
        count = self.counted_pages(b)
        if isinstance(count, Fault):
            return count
        first = int(self.arrays["page_indptr"][b])
        return self.arrays["page_indices"][first + i : first + i + 1] if i < count else Fault.POSITION

    def entry_places(self, b: int, i: int) -> list[Entry]:
        return [("page_indices", (int(self.arrays["page_indptr"][b]) + i,))]

    def read_first(self, b: int) -> list[Entry]:
        return [("page_indptr", (b,)), ("page_indptr", (b + 1,))]

    def written(self, laid: Laid) -> dict[str, Any]:
        rows = [row[:n] for row, n in zip(laid.ids[:, 0], laid.counts, strict=True)]
        return {"page_indices": np.concatenate(rows), "page_indptr": np.cumsum([0, *laid.counts])}


class CountingCSRReading(CSRReading):
    """With last_page_len: (pages - 1) * page_size + last_page_len[b] tokens; no page, no token."""

    @property
    def lengths_in(self) -> tuple[str, ...]:
        return ("page_indptr", "last_page_len")

    def length(self, b: int) -> int | None:
        count, last = self.counted_pages(b), index(self.arrays["last_page_len"][b])
        if isinstance(count, Fault) or not count:
            return None if isinstance(count, Fault) else 0
        return None if last is None else index((count - 1) * self.tokens + last)

    def written(self, laid: Laid) -> dict[str, Any]:
        last = [n - (count - 1) * self.tokens for n, count in zip(laid.totals, laid.counts, strict=True)]
        return super().written(laid) | {"last_page_len": last}
