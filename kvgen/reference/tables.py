"""Page tables as data: which page holds logical page i of request b, and how many tokens there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvgen.runtime.faults import Fault
from kvgen.spec.cache import Cache
from kvgen.spec.tables import CSR, Indirect, Offsets, PerKV, Ring

# Token counts and indices are below this; whatever is not counts as invalid.
LIMIT = 2**32 - 1


def index(value: Any) -> int | None:
    """An untrusted entry as an index; None where it is negative or not below 2^32 - 1."""
    number = int(value)
    return number if 0 <= number < LIMIT else None


class Place(NamedTuple):
    """Where a token of K or of V is: the ids of the page of its values and of the page of its scales."""

    page: int
    scales: int


@dataclass(frozen=True)
class TableView:
    """A cache's page table and lengths on the host.

    `arrays` are the table arguments of a generated `Cache`, by name: `lengths[B]`; `page_table` `[B, M]`, `[B, 2, M]`
    (PerKV) or `[B]` (Continuous); `page_indices[I]`, `page_indptr[B + 1]` and `last_page_len[B]` (CSR);
    `req_to_token[R, M]` and `request_ids[B]` (Indirect); `scales_page_table[B, M]` where scales have a table of their own;
    `kv_offsets[B + 1]` (Ragged, whose pages are rows of one token here).
    `pages` counts the pool's pages, `tokens` a page's tokens, `scale_pages` the pages of scales that a table of their own
    may name (None: as many as `pages`).
    """

    cache: Cache
    arrays: Mapping[str, NDArray[Any]]
    pages: int
    tokens: int
    scale_pages: int | None = None

    @property
    def requests(self) -> int:
        """The number of requests, B."""
        if self.cache.ragged:
            return len(self.arrays["kv_offsets"]) - 1
        names = ("lengths", "last_page_len", "request_ids", "page_table")
        return len(next(self.arrays[n] for n in names if n in self.arrays))

    def length(self, b: int) -> int | None:
        """Tokens of request b, before or after this step as the cache says; None where the entry can be no length.

        CSR with last_page_len: (pages - 1) * page_size + last_page_len[b]; no page, no token. Ragged: its rows.
        """
        table = self.cache.page_table
        if isinstance(table, Offsets):
            return self._run(b)
        if not (isinstance(table, CSR) and table.last_page_len):
            return index(self.arrays["lengths"][b])
        count, last = self._csr_pages(b), index(self.arrays["last_page_len"][b])
        if count is None:
            return None
        if not count:
            return 0
        return None if last is None else index((count - 1) * self.tokens + last)

    def after(self, b: int, new: int) -> int | None:
        """Tokens of request b with its `new` rows of this step; None where that is no length, or fewer than it has rows."""
        length = self.length(b)
        total = length if length is None or self.cache.lengths == "after" else length + new
        return total if total is not None and new <= total < LIMIT else None

    def _csr_pages(self, b: int) -> int | None:
        """Pages of request b; None where its slice decreases or leaves the list."""
        begin, end = (index(x) for x in self.arrays["page_indptr"][b : b + 2])
        if begin is None or end is None or end < begin or end > len(self.arrays["page_indices"]):
            return None
        return end - begin

    def _run(self, b: int) -> int | None:
        """Rows of request b; None where its offsets decrease or leave the tensors."""
        begin, end = (index(x) for x in self.arrays["kv_offsets"][b : b + 2])
        return None if begin is None or end is None or not begin <= end <= self.pages else end - begin

    def first_token(self, n: int) -> int:
        """The oldest of n tokens that is still alive."""
        table = self.cache.page_table
        return max(0, n - table.window) if isinstance(table, Ring) else 0

    def stored(self, b: int, token: int) -> bool:
        """Whether the table can still hold this token: a ring keeps the last `window` of `length` tokens, as far as it has
        columns for them."""
        if not isinstance(self.cache.page_table, Ring):
            return True
        n = self.length(b)
        return n is not None and self.first_token(n) <= token < n and not self.overtaken(token // self.tokens, n)

    def overtaken(self, page: int, n: int) -> bool:
        """Whether in a ring of so many columns the newest of n tokens lies where logical page `page` was."""
        if not isinstance(self.cache.page_table, Ring):
            return False
        return (n - 1) // self.tokens - page >= int(self.arrays["page_table"].shape[1])

    def holds(self, b: int, n: int) -> bool:
        """Whether the table of request b has a place for every living one of its n tokens."""
        table = self.cache.page_table
        if n == 0:
            return True
        if isinstance(table, Offsets):
            return n <= (self._run(b) or 0)
        if isinstance(table, CSR):
            return n <= (self._csr_pages(b) or 0) * self.tokens
        if isinstance(table, Ring):
            living = (n - 1) // self.tokens - self.first_token(n) // self.tokens + 1
            return living <= int(self.arrays["page_table"].shape[1])
        if isinstance(table, Indirect):
            rows, slots = self.arrays["req_to_token"].shape
            row = index(self.arrays["request_ids"][b])
            return n <= slots and row is not None and row < rows
        columns = self.arrays["page_table"].shape[-1] if self.arrays["page_table"].ndim > 1 else 1
        if self.own_table:
            columns = min(columns, self.arrays["scales_page_table"].shape[-1])
        return n <= columns * self.tokens

    def page(self, b: int, i: int) -> tuple[int, int] | Fault:
        """The ids of the pages with K and V of tokens [i * tokens, (i + 1) * tokens) of request b, or what is wrong."""
        entries = self._entries(b, i)
        if isinstance(entries, Fault):
            return entries
        found = [self._id(entry, self.pages) for entry in entries]
        ids = [i for i in found if i is not None]
        return (ids[0], ids[-1]) if len(ids) == len(found) else Fault.PAGE_ID

    @property
    def own_table(self) -> bool:
        """Whether scales of K or V are found through `scales_page_table`."""
        return any(quant is not None and quant.own_table for quant in self.cache.quants.values())

    def places(self, b: int, i: int) -> tuple[Place, Place] | Fault:
        """Where K and V of tokens [i * tokens, (i + 1) * tokens) of request b are, or what is wrong.

        Scales with a table of their own are where it says, never where page_table does; others are in the page of the
        same number as their values. A token without a valid page of values is reported for that, whatever its scales.
        """
        values = self.page(b, i)
        if isinstance(values, Fault):
            return values
        own = [quant is not None and quant.own_table for quant in self.cache.quants.values()]
        if not any(own):
            return Place(values[0], values[0]), Place(values[1], values[1])
        row = self.arrays["scales_page_table"][b]
        if i >= len(row):
            return Fault.POSITION
        scales = self._id(row[i], self.pages if self.scale_pages is None else self.scale_pages)
        if scales is None:
            return Fault.PAGE_ID
        k, v = (Place(page, scales if mine else page) for page, mine in zip(values, (own[0], own[-1]), strict=True))
        return k, v

    def _id(self, entry: Any, pages: int) -> int | None:
        """The page that an entry names, one of `pages`; None where there is no such page."""
        number = index(entry)
        # Checked after scaling: an entry may be fine and its page still outside the pool.
        if number is None or number * self.cache.page_table.id_multiplier >= pages:
            return None
        return number * self.cache.page_table.id_multiplier

    def _entries(self, b: int, i: int) -> NDArray[Any] | Fault:
        """The table's one entry (PerKV: two) for logical page i."""
        table, arrays = self.cache.page_table, self.arrays
        if isinstance(table, Offsets):
            rows = self._run(b)
            if rows is None:
                return Fault.TABLE
            return np.array([int(arrays["kv_offsets"][b]) + i]) if i < rows else Fault.POSITION
        if isinstance(table, CSR):
            count = self._csr_pages(b)
            if count is None:
                return Fault.TABLE
            first = int(arrays["page_indptr"][b])
            return arrays["page_indices"][first + i : first + i + 1] if i < count else Fault.POSITION
        if isinstance(table, Indirect):
            rows, slots = arrays["req_to_token"].shape
            if i >= slots:
                return Fault.POSITION
            row = index(arrays["request_ids"][b])
            return arrays["req_to_token"][row, i : i + 1] if row is not None and row < rows else Fault.TABLE
        row_of_b = np.asarray(arrays["page_table"][b])
        if row_of_b.ndim == 0:  # Continuous: one block holds the request
            return row_of_b.reshape(1) if i == 0 else Fault.POSITION
        columns = row_of_b.shape[-1]
        if isinstance(table, Ring):
            return row_of_b[i % columns : i % columns + 1] if columns else Fault.POSITION
        if i >= columns:
            return Fault.POSITION
        return row_of_b[:, i] if isinstance(table, PerKV) else row_of_b[i : i + 1]


@dataclass(frozen=True)
class RowRange:
    """Whose row it is: request `b` has rows [begin, end); `valid` is False where the offsets around it contradict."""

    b: int
    begin: int
    end: int
    valid: bool


def request_of_row(offsets: NDArray[Any], row: int, rows: int) -> RowRange | None:
    """The request of one of `rows` rows, by `offsets[B + 1]`; None for a row of no request: before offsets[0], or
    padding at and past offsets[B].

    The request is found by halving, which with sorted offsets gives the b with offsets[b] <= row < offsets[b + 1]. A
    row is valid only if the offsets around it, offsets[b - 1] to offsets[b + 2], do not decrease and its request's own
    do not pass `rows`.
    """
    batch = len(offsets) - 1

    def value(i: int) -> int:
        found = index(offsets[i])
        return LIMIT if found is None else found

    if batch == 0 or row >= value(batch):
        return None
    low, high = 0, batch
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if value(middle) <= row else (low, middle)
    begin, end = value(low), value(low + 1)
    around = [value(i) for i in range(max(low - 1, 0), min(low + 3, batch + 1))]
    if low == 0 and row < begin <= end:
        return None
    return RowRange(low, begin, end, bool(np.all(np.diff(around) >= 0)) and begin <= row < end <= rows)


def bad_total(offsets: NDArray[Any], rows: int) -> bool:
    """Whether offsets[B] passes the rows or lies before offsets[B - 1]."""
    values = [LIMIT if index(x) is None else int(x) for x in offsets[-2:]]
    return len(offsets) > 1 and (values[1] > rows or values[1] < values[0])
