"""Pages: a slice of every tensor that has a page axis, in every layer; nothing here knows how its bytes lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.tables import LIMIT, TableView, index
from kvgen.schema.any_cache import AnyCache

Raw = NDArray[Any]


Arrays = Mapping[str, Raw | Sequence[Raw]]


def own_scales(cache: AnyCache, name: str) -> bool:
    """Whether a tensor has scales that are found through a page table of their own."""
    quants = [q for role, q in cache.quants.items() if name in ("scales", f"{role}_scales")]
    return any(q is not None and q.own_table for q in quants)


def pages_of(cache: AnyCache, arrays: Arrays) -> dict[str, list[Raw]]:
    """Every tensor with a page axis, that axis first; one view, or one a layer."""
    found = {}
    for tensor in cache.storage.tensors:
        if "page" in tensor.axes:
            given = arrays[tensor.name]
            each = [given] if isinstance(given, np.ndarray) else list(given)
            found[tensor.name] = [np.moveaxis(a, tensor.axes.index("page"), 0) for a in each]
    return found


def page_id(entry: Any, multiplier: int, pages: int) -> int | None:
    """The page that a table's entry names; None where there is no such page."""
    number = index(entry)
    return number * multiplier if number is not None and number * multiplier < pages else None


def possible_count(count: int | None) -> bool:
    """Whether a list can have so many pairs; None: all that it has."""
    return count is None or 0 <= count < LIMIT


def counted_pairs(count: int | None, n: int) -> int:
    """How many of n pairs count."""
    return n if count is None else min(count, n) if possible_count(count) else 0


def living_pages(table: TableView, b: int) -> tuple[int, range] | None:
    """Tokens of request b and the logical pages that hold them; None where it cannot have so many."""
    tokens = table.length(b)
    if tokens is None or not table.holds(b, tokens):
        return None
    return tokens, range(table.first_token(tokens) // table.tokens, -(-tokens // table.tokens))
