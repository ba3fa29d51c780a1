"""zero_pages: zeros in pages of the pool, in every layer."""

from __future__ import annotations

import numpy as np

from kvgen.reference.faults import FaultLog
from kvgen.reference.pages import Arrays, Raw, counted_pairs, own_scales, page_id, pages_of, possible_count
from kvgen.runtime.faults import Fault
from kvgen.schema.any_cache import AnyCache


def zero_pages(
    cache: AnyCache,
    arrays: Arrays,
    page_ids: Raw,
    *,
    scale_page_ids: Raw | None = None,
    num_page_ids: int | None = None,
    num_scale_page_ids: int | None = None,
) -> int:
    """Make every byte of the pages that `page_ids` names 0.

    -1 skips; an id outside its pool is reported (PAIR, at its index) and skipped. Scales with a table of their own have
    ids of their own, `scale_page_ids`; other scales are in the page of their values' id. Only the first `num_page_ids`
    count; a count below 0 or past every index is reported (PAIR, at 0), and no id counts. Returns the error word.
    """
    faults, pools = FaultLog(), pages_of(cache, arrays)
    for own, ids, count in ((False, page_ids, num_page_ids), (True, scale_page_ids, num_scale_page_ids)):
        tensors = [pages for name in pools if own_scales(cache, name) == own for pages in pools[name]]
        if ids is None or not tensors:
            continue
        if len(ids) and not possible_count(count):
            faults.add(Fault.PAIR, 0, 0)
        for i, entry in enumerate(ids[: counted_pairs(count, len(ids))]):
            # A page has an id in all of its tensors: scales in a pool of more pages than values do not add any.
            page = page_id(entry, cache.page_table.id_multiplier, min(len(pages) for pages in tensors))
            if page is not None:
                for pages in tensors:
                    pages[page] = np.zeros((), pages.dtype)
            elif int(entry) != -1:
                faults.add(Fault.PAIR, i, i)
    return faults.word
