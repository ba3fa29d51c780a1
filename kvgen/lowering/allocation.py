"""How memory is allocated to requests: in pages, a block or a state a request, or requests one after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvgen.schema.any_cache import AnyCache
from kvgen.schema.cache import Paged
from kvgen.schema.ragged import Ragged
from kvgen.schema.state import State


@dataclass(frozen=True)
class Allocation:
    """How a cache's memory is allocated to requests, in names and words.

    `name` is what generated caches are told, `unit` what ids count; `page_size` is 0 without pages. `one_page`: all tokens
    of a request lie in one. `table_field` is the spec's field behind the element type of the table. `place` says in a few
    words what holds tokens, `sentence` in a sentence.
    """

    name: Literal["paged", "continuous_batching", "ragged", "states"]
    unit: Literal["pages", "blocks", "rows", "states"]
    table_field: Literal["table.dtype", "table_dtype", "lengths_dtype"]
    place: str
    sentence: str
    page_size: int = 0
    one_page: bool = False


def allocation_of(cache: AnyCache) -> Allocation:
    """How a cache allocates: the only place of lowering that asks for its class."""
    if isinstance(cache, Paged):
        held = (
            f"{cache.page_size} token{'s' * (cache.page_size != 1)}"
            if cache.rate == 1
            else f"{cache.page_size} entries of {cache.rate} tokens each"
        )
        place, sentence = f"pages of {held}", f"pages hold {held}"
        return Allocation("paged", "pages", "table.dtype", place, sentence, page_size=cache.page_size)
    if isinstance(cache, Ragged):
        place = "requests one after another"
        return Allocation("ragged", "rows", "lengths_dtype", place, f"they lie in kv_offsets, {place}")
    if isinstance(cache, State):
        place = "a state a request"
        return Allocation("states", "states", "table_dtype", place, f"each is {cache.bytes} bytes", one_page=True)
    place = "a block a request"
    return Allocation("continuous_batching", "blocks", "table_dtype", place, "a block holds a request", one_page=True)
