"""A cache's page table and lengths on the host, whatever its form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

from numpy.typing import NDArray

from kvgen.reference.tables.base import LIMIT, Entry, Reading, index
from kvgen.reference.tables.csr import CountingCSRReading, CSRReading
from kvgen.reference.tables.dense import DenseReading
from kvgen.reference.tables.indirect import IndirectReading
from kvgen.reference.tables.mapped import MappedReading
from kvgen.reference.tables.offsets import OffsetsReading
from kvgen.reference.tables.per_kv import PerKVReading
from kvgen.reference.tables.ring import RingReading
from kvgen.reference.tables.states import StatesReading
from kvgen.runtime.faults import Fault
from kvgen.schema.any_cache import AnyCache
from kvgen.schema.cache import Cache
from kvgen.schema.tables import CSR, Dense, Indirect, Mapped, Offsets, PerKV, Ring, States


def reading_of(cache: AnyCache, arrays: Mapping[str, NDArray[Any]], pages: int, tokens: int) -> Reading:
    """The table's arrays as its form reads them: the only place of the oracles that asks for its class."""
    match cache.page_table:
        case Dense():
            return DenseReading(arrays, pages, tokens)
        case CSR(last_page_len=counts):
            return CountingCSRReading(arrays, pages, tokens) if counts else CSRReading(arrays, pages, tokens)
        case PerKV():
            return PerKVReading(arrays, pages, tokens)
        case Indirect():
            return IndirectReading(arrays, pages, tokens)
        case Mapped():
            return MappedReading(arrays, pages, tokens)
        case Ring(window=window):
            return RingReading(arrays, pages, tokens, window)
        case Offsets():
            return OffsetsReading(arrays, pages, tokens)
        case States():
            return StatesReading(arrays, pages, tokens)


class Place(NamedTuple):
    """Where a token of K or of V is: the ids of the page of its values and of the page of its scales."""

    page: int
    scales: int


@dataclass(frozen=True)
class TableView:
    """A cache's page table and lengths on the host.

    `arrays` are the table arguments of a generated `Cache`, by name: `lengths[B]`; `page_table` `[B, M]`, `[B, 2, M]`
    (PerKV) or `[B]` (Continuous); `page_indices[I]`, `page_indptr[B + 1]` and `last_page_len[B]` (CSR);
    `req_to_token[R, M]` and `request_ids[B]` (Indirect); `page_table[R, M]` and `idx_mapping[B]` (Mapped);
    `scales_page_table[B, M]` where scales have a table of their own; `kv_offsets[B + 1]` (Ragged, whose pages are rows of
    one token here); `state_ids[B]` (State).
    `pages` counts the pool's pages, `tokens` a page's tokens, `scale_pages` the pages of scales that a table of their own
    may name (None: as many as `pages`).
    """

    cache: AnyCache
    arrays: Mapping[str, NDArray[Any]]
    pages: int
    tokens: int
    scale_pages: int | None = None

    @property
    def kv(self) -> Cache:
        """The cache of an oracle that knows tokens."""
        return cast(Cache, self.cache)

    @cached_property
    def form(self) -> Reading:
        """The table as its form reads it."""
        return reading_of(self.cache, self.arrays, self.pages, self.tokens)

    @property
    def requests(self) -> int:
        """The number of requests, B."""
        return self.form.requests

    def length(self, b: int) -> int | None:
        """Tokens of request b, before or after this step as the cache says; None where the entry can be no length."""
        return self.form.length(b)

    def after(self, b: int, new: int) -> int | None:
        """Tokens of request b with its `new` rows of this step; None where that is no length, or fewer than it has rows."""
        length = self.length(b)
        total = length if length is None or self.kv.lengths == "after" else length + new
        return total if total is not None and new <= total < LIMIT else None

    def first_token(self, n: int) -> int:
        """The oldest of n tokens that is still alive."""
        return self.form.first_token(n)

    def stored(self, b: int, token: int) -> bool:
        """Whether the table can still hold this token: a ring keeps the last `window` of `length` tokens, as far as it has
        columns for them."""
        return self.form.stored(b, token)

    def overtaken(self, page: int, n: int) -> bool:
        """Whether in a ring of so many columns the newest of n tokens lies where logical page `page` was."""
        return self.form.overtaken(page, n)

    def holds(self, b: int, n: int) -> bool:
        """Whether the table of request b has a place for every living one of its n tokens."""
        if n == 0:
            return True
        scales = self.arrays["scales_page_table"].shape[-1] * self.tokens if self.own_table else n
        return n <= scales and self.form.holds(b, n)

    def page(self, b: int, i: int) -> tuple[int, int] | Fault:
        """The ids of the pages with K and V of tokens [i * tokens, (i + 1) * tokens) of request b, or what is wrong."""
        entries = self.form.entries(b, i)
        if isinstance(entries, Fault):
            return entries
        found = [self.page_of(entry, self.pages) for entry in entries]
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
        scales = self.page_of(row[i], self.pages if self.scale_pages is None else self.scale_pages)
        if scales is None:
            return Fault.PAGE_ID
        k, v = (Place(page, scales if mine else page) for page, mine in zip(values, (own[0], own[-1]), strict=True))
        return k, v

    def page_of(self, entry: Any, pages: int) -> int | None:
        """The page that an entry names, one of `pages`; None where there is no such page."""
        number = index(entry)
        # Checked after scaling: an entry may be fine and its page still outside the pool.
        if number is None or number * self.cache.page_table.id_multiplier >= pages:
            return None
        return number * self.cache.page_table.id_multiplier

    def entry_places(self, b: int, i: int) -> list[Entry]:
        """Where the entries of logical page i of request b lie: (argument, index), K's then V's, or values' then scales'."""
        return [*self.form.entry_places(b, i), *([("scales_page_table", (b, i))] if self.own_table else [])]
