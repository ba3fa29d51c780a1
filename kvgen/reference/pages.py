"""Whole pages: copy_pages, swap_pages, and what reorder and compact do with them.

A page is a slice of every tensor that has a page axis, in every layer; nothing here knows how its bytes lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.faults import FaultLog
from kvgen.reference.tables import LIMIT, TableView, index
from kvgen.runtime.faults import Fault
from kvgen.spec.cache import Cache, Continuous
from kvgen.spec.table import CSR, Indirect, PerKV, Ring

Raw = NDArray[Any]
Arrays = Mapping[str, Raw | Sequence[Raw]]


def own_scales(cache: Cache, name: str) -> bool:
    """Whether a tensor has scales that are found through a page table of their own."""
    quants = [q for role, q in cache.quants.items() if name in ("scales", f"{role}_scales")]
    return any(q is not None and q.own_table for q in quants)


def pages_of(cache: Cache, arrays: Arrays) -> dict[str, list[Raw]]:
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


def copy_pages(
    cache: Cache,
    arrays: Arrays,
    pairs: Raw,
    *,
    scale_pairs: Raw | None = None,
    num_pairs: int | None = None,
    num_scale_pairs: int | None = None,
    into: Arrays | None = None,
    scale: tuple[bool, bool] = (True, True),
) -> int:
    """Copy page pairs[i, 0] of `arrays` onto page pairs[i, 1] (of `into`, if given), all of them at once.

    -1 in either skips a pair; one that names a page outside its pool is reported (PAIR, at i) and skipped. Scales with a
    table of their own have ids of their own, `scale_pairs`; other scales are in the page of their values' id. Only the
    first `num_pairs` count; a count below 0 or past every index is reported (PAIR, at 0), and no pair counts. Where pairs
    overlap, the copies are as if made one after the other from what was there before. `scale` says whether sources and
    targets are entries of the page table, which id_multiplier scales. Returns the error word.
    """
    faults, multiplier = FaultLog(), cache.page_table.id_multiplier
    multipliers = multiplier if scale[0] else 1, multiplier if scale[1] else 1
    source = pages_of(cache, arrays)
    target = source if into is None else pages_of(cache, into)
    before = {name: [a.copy() for a in each] for name, each in source.items()}
    for own, listed, count in ((False, pairs, num_pairs), (True, scale_pairs, num_scale_pairs)):
        names = [name for name in source if own_scales(cache, name) == own]
        if listed is None or not names:
            continue
        # A page has an id in all of its tensors: scales in a pool of more pages than values do not add any.
        sizes = [min(len(a) for n in names for a in pool[n]) for pool in (source, target)]
        if len(listed) and not _possible(count):
            faults.add(Fault.PAIR, 0, 0)
        for i, entries in enumerate(listed[: _live(count, len(listed))]):
            if any(int(e) == -1 for e in entries):
                continue
            ids = [page_id(e, m, size) for e, m, size in zip(entries, multipliers, sizes, strict=True)]
            if ids[0] is None or ids[1] is None:
                faults.add(Fault.PAIR, i, i)
                continue
            for name in names:
                for old, new in zip(before[name], target[name], strict=True):
                    new[ids[1]] = old[ids[0]]
    return faults.word


def _possible(count: int | None) -> bool:
    """Whether a list can have so many pairs; None: all that it has."""
    return count is None or 0 <= count < LIMIT


def _live(count: int | None, n: int) -> int:
    """How many of n pairs count."""
    return n if count is None else min(count, n) if _possible(count) else 0


def overlaps(cache: Cache, pairs: Raw, pages: int, count: int | None = None) -> int:
    """The error word of copy_pages' check: the first pair that writes what another reads, or an earlier one writes."""
    faults, multiplier = FaultLog(), cache.page_table.id_multiplier
    live: list[tuple[int, int, int]] = []
    for i, entries in enumerate(pairs[: _live(count, len(pairs))]):
        found = [page_id(e, multiplier, pages) for e in entries]
        if found[0] is not None and found[1] is not None and found[0] != found[1]:
            live.append((i, found[0], found[1]))
    for i, _, to in live:
        if any(to == source or (to == target and j < i) for j, source, target in live if j != i):
            faults.add(Fault.OVERLAP, i, i)
    return faults.word


# reorder and compact ------------------------------------------------------------------------------------------------------


def _roles_of(cache: Cache, name: str) -> tuple[int, ...]:
    """Which of a table's ids (K's, V's) find pages of this tensor, where K and V have ids of their own."""
    if name.startswith("v_"):
        return (1,)
    return (0, 1) if name in ("pool", "scales") and cache.stores == "kv" else (0,)


def _living(table: TableView, b: int) -> tuple[int, range] | None:
    """Tokens of request b and the logical pages that hold them; None where it cannot have so many."""
    tokens = table.length(b)
    if tokens is None or not table.holds(b, tokens):
        return None
    return tokens, range(table.first_token(tokens) // table.tokens, -(-tokens // table.tokens))


def _entry_places(table: TableView, b: int, i: int) -> list[tuple[str, tuple[int, ...]]]:
    """Where the entries of logical page i of request b lie: (argument, index), K's then V's, or values' then scales'."""
    form, arrays = table.cache.page_table, table.arrays
    scales = [("scales_page_table", (b, i))] if table.own_table else []
    if isinstance(table.cache, Continuous):
        return [("page_table", (b,)), *scales]
    if isinstance(form, CSR):
        return [("page_indices", (int(arrays["page_indptr"][b]) + i,))]
    if isinstance(form, Indirect):
        return [("req_to_token", (int(arrays["request_ids"][b]), i))]
    if isinstance(form, PerKV):
        return [("page_table", (b, 0, i)), ("page_table", (b, 1, i))]
    column = i % arrays["page_table"].shape[1] if isinstance(form, Ring) else i
    return [("page_table", (b, column)), *scales]


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
    form, pages = cache.page_table, pages_of(cache, arrays)
    before = {name: [a.copy() for a in each] for name, each in pages.items()}
    seen: set[int] = set()
    for b, entry in enumerate(parents):
        if entry == np.asarray(-1).astype(parents.dtype):
            continue
        parent = index(entry)
        shares = parent not in seen
        seen.add(LIMIT if parent is None else parent)
        own_row = table.arrays["request_ids"][b] if isinstance(form, Indirect) else 0
        rows = table.arrays["req_to_token"].shape[0] if isinstance(form, Indirect) else 1
        if parent is None or parent >= table.requests or not 0 <= int(own_row) < rows:
            faults.add(Fault.TABLE, b, 0)
            continue
        living = _living(table, parent)
        if living is None:
            length = table.length(parent)
            faults.add(Fault.LENGTH, b, LIMIT if length is None else length)
            continue
        tokens, logical = living
        if new_lengths is not None:
            new_lengths[b] = tokens
        whole = isinstance(form, Ring) or isinstance(cache, Continuous)
        for i in logical:
            copied = not shares and (whole or (i + 1) * table.tokens > tokens)
            sources, targets = _entry_places(table, parent, i), _entry_places(table, b, i)
            old = [table.arrays[name][at] for name, at in sources]
            given = [_fresh(table, fresh, name, b, i, which) for which, (name, _) in enumerate(targets)]
            for (name, at), mine, free in zip(targets, old, given, strict=True):
                new[name][at] = free if copied else mine
            if copied and not _copy(table, pages, before, old, given):
                faults.add(Fault.PAGE_ID, b, i * table.tokens)
    return faults.word


def _fresh(table: TableView, fresh: Mapping[str, Raw], name: str, b: int, i: int, which: int) -> Any:
    form, given = table.cache.page_table, fresh["scales_page_table" if name == "scales_page_table" else "page_table"]
    if isinstance(form, PerKV):
        return given[b, which]
    return given[b, i % given.shape[1]] if isinstance(form, Ring) else given[b]


def _copy(
    table: TableView, pages: Mapping[str, list[Raw]], before: Mapping[str, list[Raw]], old: list[Any], new: list[Any]
) -> bool:
    """Copy the page with these entries to the one with those; False where one of them is outside the pool."""
    cache = table.cache
    form, scales = cache.page_table, table.pages if table.scale_pages is None else table.scale_pages
    sizes = [table.pages, table.pages if isinstance(form, PerKV) else scales][: len(old)]
    ids = [[page_id(e, form.id_multiplier, size) for e, size in zip(side, sizes, strict=True)] for side in (old, new)]
    if any(i is None for side in ids for i in side):
        return False
    for name, each in pages.items():
        roles = _roles_of(cache, name) if isinstance(form, PerKV) else (1,) if own_scales(cache, name) else (0,)
        for role in roles:
            for found, was in zip(each, before[name], strict=True):
                found[ids[1][role]] = was[ids[0][role]]
    return True


def compact_plan(table: TableView, new_ids: Raw, moves: Raw, kept: Raw | None = None) -> tuple[int, int, int]:
    """Plan the moves: fills new_ids `[P]` and moves `[Q, 2]`; returns (number of moves, used pages, error word).

    Used are the pages of the requests' tokens and the `kept` ones, of which -1 is none, U of them; the r-th used one from
    U on moves to the r-th free one below U.
    """
    faults, multiplier = FaultLog(), table.cache.page_table.id_multiplier
    used: set[int] = set()
    for b in range(table.requests):
        living = _living(table, b)
        if living is None:
            length = table.length(b)
            faults.add(Fault.LENGTH, b, LIMIT if length is None else length)
            continue
        for i in living[1]:
            for name, at in _entry_places(table, b, i):
                if name == "scales_page_table":
                    continue
                entry = index(table.arrays[name][at])
                if entry is None or entry >= len(new_ids) or entry * multiplier >= table.pages:
                    faults.add(Fault.PAGE_ID, b, i * table.tokens)
                else:
                    used.add(entry)
    for k, entry in enumerate(() if kept is None else kept):
        number = index(entry)
        if number is not None and number < len(new_ids) and number * multiplier < table.pages:
            used.add(number)
        elif int(entry) != -1:
            faults.add(Fault.PAIR, k, k)
    count = len(used)
    free = [i for i in range(count) if i not in used]
    above = sorted(i for i in used if i >= count)
    done = list(zip(above, free, strict=True))[: len(moves)]
    new_ids[...] = np.asarray(-1).astype(new_ids.dtype)
    for i in used:
        new_ids[i] = i
    moves[...] = -1
    for r, (old, new) in enumerate(done):
        moves[r] = old, new
        new_ids[old] = new
    return len(done), count, faults.word


def compact(
    table: TableView, arrays: Arrays, moves: Raw, new_ids: Raw, new: Mapping[str, Raw], num_moves: int | None = None
) -> int:
    """Make the moves (copy_pages) and write the entries of the requests' tokens, where they are afterwards, to `new`.

    With a `num_moves` that cannot be, nothing moves and entries are as they were.
    """
    replaced = []
    for b in range(table.requests):
        living = _living(table, b)
        for i in living[1] if living is not None else ():
            for name, at in _entry_places(table, b, i):
                entry = table.arrays[name][at]
                number = index(entry)
                known = (
                    number is not None
                    and _possible(num_moves)
                    and number < len(new_ids)
                    and int(new_ids[number]) != int(np.asarray(-1).astype(new_ids.dtype))
                )
                if name != "scales_page_table":
                    replaced.append((name, at, new_ids[number] if known and number is not None else entry))
    for name, at, entry in replaced:
        new[name][at] = entry
    return copy_pages(table.cache, arrays, moves, num_pairs=num_moves)
