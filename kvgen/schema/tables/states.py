"""The id of one state a request."""

from __future__ import annotations

from typing import Literal

from kvgen.schema.tables.base import PageTable


class States(PageTable):
    """`state_ids[batch]`: request b has state `state_ids[b]`; -1: it has none, as rows that pad a captured graph's batch.

    The table of a State cache.
    """

    kind: Literal["states"] = "states"
    """Which form this is; set by the class."""

    @property
    def counts_tokens(self) -> bool:
        return True
