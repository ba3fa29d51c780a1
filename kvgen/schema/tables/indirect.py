"""A slot per token, in the row that the request's id names."""

from __future__ import annotations

from typing import ClassVar, Literal

from kvgen.schema.tables.base import IndexName, PageTable


class Indirect(PageTable):
    """`req_to_token[requests, max_tokens]` read at row `request_ids[b]`: a slot per token (SGLang).

    The pool is one of token slots, so `page_size` is 1.
    """

    token_slots: ClassVar[bool] = True
    kind: Literal["indirect"] = "indirect"
    """Which form this is; set by the class."""
    dtype: IndexName = "i32"
    """Element type of `req_to_token`, whose entries are token slots."""
    request_dtype: IndexName = "i64"
    """Element type of `request_ids[B]`, the row of `req_to_token` that each request of the batch has."""
