"""copy_pages: pages of the pool onto others, in every layer."""

from __future__ import annotations

from kvgen.reference.faults import FaultLog
from kvgen.reference.pages import (
    Arrays,
    Raw,
    counted_pairs,
    own_scales,
    page_id,
    pages_of,
    possible_count,
)
from kvgen.runtime.faults import Fault
from kvgen.schema.any_cache import AnyCache


def copy_pages(
    cache: AnyCache,
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
        if len(listed) and not possible_count(count):
            faults.add(Fault.PAIR, 0, 0)
        for i, entries in enumerate(listed[: counted_pairs(count, len(listed))]):
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


def overlaps(cache: AnyCache, pairs: Raw, pages: int, count: int | None = None) -> int:
    """The error word of copy_pages' check: the first pair that writes what another reads, or an earlier one writes."""
    faults, multiplier = FaultLog(), cache.page_table.id_multiplier
    live: list[tuple[int, int, int]] = []
    for i, entries in enumerate(pairs[: counted_pairs(count, len(pairs))]):
        found = [page_id(e, multiplier, pages) for e in entries]
        if found[0] is not None and found[1] is not None and found[0] != found[1]:
            live.append((i, found[0], found[1]))
    for i, _, to in live:
        if any(to == source or (to == target and j < i) for j, source, target in live if j != i):
            faults.add(Fault.OVERLAP, i, i)
    return faults.word
