"""All page ids in one list, a slice a request."""

from __future__ import annotations

from typing import Literal

from kvgen.schema.tables.base import IndexName, PageTable


class CSR(PageTable):
    """`page_indices[J]` with `page_indptr[B + 1]`: FlashInfer.

    With `last_page_len` a request has `(pages - 1) * page_size + last_page_len[b]` tokens, this step's included.
    """

    kind: Literal["csr"] = "csr"
    """Which form this is; set by the class."""
    dtype: IndexName = "i32"
    """Element type of `page_indices` and `page_indptr`."""
    last_page_len: bool = False
    """True: the call brings `last_page_len[B]`, the tokens in each request's last page, this step's tokens included,
    and no `lengths`. False: the call brings `lengths[B]`.
    """

    @property
    def counts_tokens(self) -> bool:
        return self.last_page_len
