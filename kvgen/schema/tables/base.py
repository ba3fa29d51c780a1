"""What page tables share."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from kvgen.schema.base import Spec

IndexName = Literal["u32", "i32", "i64"]


class PageTable(Spec):
    """What the forms share, and what each says of itself where it is true of it.

    `separate_kv`: K and V have page ids of their own. `token_slots`: an entry is the slot of one token, so that a page is
    one. `drops_tokens`: only a request's newest tokens stay. `second_table`: scales may have another table of the form.
    """

    separate_kv: ClassVar[bool] = False
    token_slots: ClassVar[bool] = False
    drops_tokens: ClassVar[bool] = False
    second_table: ClassVar[bool] = False

    dtype: IndexName = "i32"
    """Element type of the page table's entries."""
    id_multiplier: int = Field(default=1, ge=1, le=2**20)
    """Factor from a table entry to a page of the pool: page = entry * id_multiplier, checked against the pool after
    scaling. 1: an entry is the page's number.
    """

    @property
    def counts_tokens(self) -> bool:
        """Whether the lengths follow from the table, this step's tokens included."""
        return False
