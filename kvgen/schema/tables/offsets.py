"""No pages: where each request's rows begin."""

from __future__ import annotations

from typing import Literal

from kvgen.schema.tables.base import PageTable


class Offsets(PageTable):
    """`kv_offsets[batch + 1]`: no pages; request b has rows [kv_offsets[b], kv_offsets[b + 1]) of the tensors.

    The table of a Ragged cache, which says the lengths as well: cumulative sequence lengths, as varlen attention takes
    them.
    """

    kind: Literal["offsets"] = "offsets"
    """Which form this is; set by the class."""

    @property
    def counts_tokens(self) -> bool:
        return True
