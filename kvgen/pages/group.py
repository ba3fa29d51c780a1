"""Groups of layers that have one page table: their pools and windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvgen.pages.arguments import PageError, whole


@dataclass(frozen=True)
class Group:
    """Layers whose caches have one page table.

    - `pages`: of the pool.
    - `window`: tokens that a row sees, itself included; pages in front of what the next row sees are given back. None: all.
    - `null_page`: what tables have where a request has no page. -1 is no page of a pool, and kernels report it should they ever
      read it; a page of the pool is reserved for it (vLLM: 0).
    - `host_pages`: pages in host memory that requests can be swapped out to.
    """

    pages: int
    window: int | None = None
    null_page: int = -1
    host_pages: int = 0


def groups_of(given: int | Sequence[Group]) -> tuple[Group, ...]:
    """The groups of a manager; raises PageError for a field that no pool, window or table has."""
    if isinstance(given, (int, np.integer)):
        given = (Group(whole("groups", given, "a pool has at least 1 page", least=1)),)
    if not isinstance(given, Sequence) or not all(isinstance(group, Group) for group in given):
        raise PageError(f"groups: got {given!r}; pass a number of pages, or a sequence of Group(...)")
    if not given:
        raise PageError("groups: got none; layers of at least one group have pages")
    for number, group in enumerate(given):
        at = f"groups[{number}]"
        whole(f"{at}.pages", group.pages, "a pool has at least 1 page", least=1)
        whole(f"{at}.host_pages", group.host_pages, "0 is no pool in host memory", least=0)
        whole(f"{at}.null_page", group.null_page, "tables have ids of 32 bits", least=-(2**31))
        if group.window is not None:
            whole(f"{at}.window", group.window, "a row sees at least 1 token; None is all", least=1)
    return tuple(given)
