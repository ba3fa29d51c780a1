"""A row of page ids a request."""

from __future__ import annotations

from typing import ClassVar, Literal

from kvgen.schema.tables.base import PageTable


class Dense(PageTable):
    """`page_table[B, max_pages]`: MAX, vLLM, FlashMLA, FlashAttention."""

    second_table: ClassVar[bool] = True
    kind: Literal["dense"] = "dense"
    """Which form this is; set by the class."""
    align: Literal[1, 2, 4, 8] = 1
    """Entries that the start of every table row is a multiple of; checked when a `Cache` is made. The accessor's
    `populate` then reads that many entries at once. 1: no promise.
    """
