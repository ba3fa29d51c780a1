"""A row of page ids used as a ring: the newest tokens live."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from kvgen.schema.tables.base import PageTable


class Ring(PageTable):
    """`page_table[batch, ring_pages]` used as a ring: logical page i lives in column i % ring_pages.

    Only the last `window` tokens of a request are alive, so ring_pages >= ceil((window - 1) / page_size) + 1 keeps them all.
    """

    drops_tokens: ClassVar[bool] = True
    kind: Literal["ring"] = "ring"
    """Which form this is; set by the class."""
    window: int = Field(ge=1, le=2**31 - 1)
    """Newest tokens of a request that stay in the cache. Older ones are overwritten."""
