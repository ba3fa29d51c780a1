"""copy_pages: pages of the pool onto others, in every layer."""

from __future__ import annotations

from typing import Any

from kvgen.cases.comparison import Comparison
from kvgen.cases.page_ids import PageIdsCases
from kvgen.ops import CopyPages
from kvgen.reference import copy_pages


class CopyPagesCases(PageIdsCases[CopyPages]):
    """One half of the pages onto the other."""

    ids = "pairs"
    pairs = True

    def compare(self, j: Comparison) -> int:
        given: dict[str, Any] = j.places("pairs", "scale_pairs")
        return copy_pages(j.case.scene.cache, j.wanted.pools, given.pop("pairs"), **given)
