"""Two rows of page ids a request: K's, then V's."""

from __future__ import annotations

from typing import ClassVar, Literal

from kvgen.schema.tables.base import IndexName, PageTable


class PerKV(PageTable):
    """`page_table[batch, 2, max_pages]`: K and V pages have ids of their own (TensorRT-LLM)."""

    separate_kv: ClassVar[bool] = True
    kind: Literal["per_kv"] = "per_kv"
    """Which form this is; set by the class."""
    dtype: IndexName = "i32"
    """Element type of `page_table[B, 2, max_pages]`."""
