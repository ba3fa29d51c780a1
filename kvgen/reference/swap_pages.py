"""swap_pages: pages of the cache onto pages of another pool, or back."""

from __future__ import annotations

from typing import Literal

from kvgen.reference.copy_pages import copy_pages
from kvgen.reference.pages import Arrays, Raw
from kvgen.schema.any_cache import AnyCache


def swap_pages(
    cache: AnyCache,
    arrays: Arrays,
    other: Arrays,
    direction: Literal["out", "in"],
    pairs: Raw,
    *,
    scale_pairs: Raw | None = None,
    num_pairs: int | None = None,
    num_scale_pairs: int | None = None,
) -> int:
    """Copy page pairs[i, 0] of one pool onto page pairs[i, 1] of the other: "out" of the cache, or "in"; returns the error word.

    Ids of the cache are entries of its page table; those of `other` number its pages.
    """
    outwards = direction == "out"
    source, target = (arrays, other) if outwards else (other, arrays)
    return copy_pages(
        cache,
        source,
        pairs,
        scale_pairs=scale_pairs,
        num_pairs=num_pairs,
        num_scale_pairs=num_scale_pairs,
        into=target,
        scale=(outwards, not outwards),
    )
