"""reorder: requests that go on from others, as beams do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvgen.reference.faults import FaultLog
from kvgen.reference.pages import (
    Arrays,
    Raw,
    living_pages,
    own_scales,
    page_id,
    pages_of,
)
from kvgen.reference.tables import LIMIT, TableView, index
from kvgen.runtime.faults import Fault
from kvgen.schema.cache import Cache


def reorder(
    table: TableView,
    arrays: Arrays,
    parents: Raw,
    fresh: Mapping[str, Raw],
    new: Mapping[str, Raw],
    new_lengths: Raw | None = None,
) -> int:
    """Make request b continue the tokens of parents[b]; `new` (by the table's arguments' names) are the new tables.

    Its pages are the parent's; but of the children of one parent all but the first have a copy of the last page, where
    that is not full, in fresh[b], and of every page in a ring and in a block that holds a request. `fresh` has
    "page_table" `[B]`, `[B, 2]` (PerKV) or `[B, columns]` (Ring) and "scales_page_table" `[B]`. A page that cannot be
    copied is reported (PAGE_ID, at its first token) and the new entry is the fresh one all the same. Copies are made of
    what was there before. Returns the error word.
    """
    cache, faults = table.cache, FaultLog()
    pages = pages_of(cache, arrays)
    before = {name: [a.copy() for a in each] for name, each in pages.items()}
    seen: set[int] = set()
    for b, entry in enumerate(parents):
        if entry == np.asarray(-1).astype(parents.dtype):
            continue
        parent = index(entry)
        shares = parent not in seen
        seen.add(LIMIT if parent is None else parent)
        if parent is None or parent >= table.requests or not table.form.has_row(b):
            faults.add(Fault.TABLE, b, 0)
            continue
        living = living_pages(table, parent)
        if living is None:
            length = table.length(parent)
            faults.add(Fault.LENGTH, b, LIMIT if length is None else length)
            continue
        tokens, logical = living
        if table.cache.states and not tokens:  # the parent has no state
            new["state_ids"][b] = table.arrays["state_ids"][parent]
        if new_lengths is not None:
            new_lengths[b] = tokens
        for i in logical:
            copied = not shares and (table.form.copied_whole or (i + 1) * table.tokens > tokens)
            sources, targets = table.entry_places(parent, i), table.entry_places(b, i)
            old = [table.arrays[name][at] for name, at in sources]
            given = [_fresh(table, fresh, name, b, i, which) for which, (name, _) in enumerate(targets)]
            for (name, at), mine, free in zip(targets, old, given, strict=True):
                new[name][at] = free if copied else mine
            if copied and not _copy(table, pages, before, old, given):
                faults.add(Fault.PAGE_ID, b, i * table.tokens)
    return faults.word


def _fresh(table: TableView, fresh: Mapping[str, Raw], name: str, b: int, i: int, which: int) -> Any:
    if name == "scales_page_table":
        return fresh[name][b]
    return table.form.free(fresh["page_table"], b, i, which)


def _copy(
    table: TableView, pages: Mapping[str, list[Raw]], before: Mapping[str, list[Raw]], old: list[Any], new: list[Any]
) -> bool:
    """Copy the page with these entries to the one with those; False where one of them is outside the pool."""
    cache = table.cache
    form, scales = cache.page_table, table.pages if table.scale_pages is None else table.scale_pages
    sizes = [table.pages, table.pages if form.separate_kv else scales][: len(old)]
    ids = [[page_id(e, form.id_multiplier, size) for e, size in zip(side, sizes, strict=True)] for side in (old, new)]
    if any(i is None for side in ids for i in side):
        return False
    for name, each in pages.items():
        roles = _roles_of(table.kv, name) if form.separate_kv else (1,) if own_scales(cache, name) else (0,)
        for role in roles:
            for found, was in zip(each, before[name], strict=True):
                found[ids[1][role]] = was[ids[0][role]]
    return True


def _roles_of(cache: Cache, name: str) -> tuple[int, ...]:
    """Which of a table's ids (K's, V's) find pages of this tensor, where K and V have ids of their own."""
    if name.startswith("v_"):
        return (1,)
    return (0, 1) if name in ("pool", "scales") and cache.stores == "kv" else (0,)
