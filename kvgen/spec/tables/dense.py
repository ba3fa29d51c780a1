"""A row of page ids a request."""

from __future__ import annotations

from typing import ClassVar, Literal

from kvgen.spec.tables.base import PageTable


class Dense(PageTable):
    """`page_table[batch, max_pages]`: MAX, vLLM, FlashMLA, FlashAttention.

    `align` promises that every row begins at a multiple of so many entries (checked when bound): the accessor's
    `populate` then reads that many at once.
    """

    second_table: ClassVar[bool] = True
    kind: Literal["dense"] = "dense"
    align: Literal[1, 2, 4, 8] = 1
