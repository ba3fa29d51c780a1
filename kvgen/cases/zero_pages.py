"""zero_pages: pages of the pool become zero, in every layer."""

from __future__ import annotations

from typing import Any

from kvgen.cases.comparison import Comparison
from kvgen.cases.page_ids import PageIdsCases
from kvgen.ops import ZeroPages
from kvgen.reference import zero_pages


class ZeroPagesCases(PageIdsCases[ZeroPages]):
    """All pages."""

    ids = "page_ids"

    def compare(self, j: Comparison) -> int:
        given: dict[str, Any] = j.places("page_ids", "scale_page_ids")
        return zero_pages(j.case.scene.cache, j.wanted.pools, given.pop("page_ids"), **given)
