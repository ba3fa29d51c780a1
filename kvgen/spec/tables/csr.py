"""All page ids in one list, a slice a request."""

from __future__ import annotations

from typing import Literal

from kvgen.spec.tables.base import IndexName, PageTable


class CSR(PageTable):
    """`page_indices[nnz]` with `page_indptr[batch + 1]`: FlashInfer.

    With `last_page_len` the lengths come from the table too, as `(pages - 1) * page_size + last_page_len[b]`, counting
    the tokens of this step; otherwise from `lengths`.
    """

    kind: Literal["csr"] = "csr"
    dtype: IndexName = "i32"
    last_page_len: bool = False

    @property
    def counts_tokens(self) -> bool:
        return self.last_page_len
