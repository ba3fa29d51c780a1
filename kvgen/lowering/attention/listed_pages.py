"""Lists of pages that a call brings for each row and kv head: its arguments, and which caches have such pages."""

from __future__ import annotations

from typing import Final

from kvgen.lowering.lowered import lower
from kvgen.plan.params import Array, Size
from kvgen.schema.cache import Cache

LIST_SIZES: Final = (
    Size("page_lists_stride", "i64", "page_lists.stride"),
    Size("page_lists_head_stride", "i64", "page_lists.row_stride"),
    Size("columns_listed", "u32", "P"),
)


def page_lists(kv_heads: int) -> tuple[Array, ...]:
    """The lists of each row and kv head, and how many entries of each count."""
    return (
        Array(
            "page_lists",
            "i32",
            ("T", kv_heads, "P"),
            strided=2,
            untrusted=True,
            doc="pages that each kv head of a row attends to, numbers in the request's page table; -1 is skipped",
            fields=(None, "kv_heads", None),
        ),
        Array(
            "page_counts",
            "i32",
            ("T", kv_heads),
            optional=True,
            untrusted=True,
            doc="entries of each list in `page_lists` that count",
            fields=(None, "kv_heads"),
        ),
    )


def check_listed(cache: Cache) -> None:
    """Raise ValueError where a request's tokens do not lie in pages that a list could name, each for itself."""
    if cache.page_tokens is None or lower(cache).allocation.one_page:
        raise ValueError(
            f"pages: got 'per_head' with a {type(cache).__name__} cache; lists name pages of one size; use Paged(page_size=128), "
            "say, or pages='all'"
        )
    if cache.storage.residual:
        raise ValueError(
            "pages: got 'per_head' with tokens that wait to be quantized (residual); they lie in no page; use a quant without "
            "residual, or pages='all'"
        )
    if cache.entry_tokens > 1:
        raise ValueError(
            f"pages: got 'per_head' with rate={cache.entry_tokens}; pages are listed as the tokens they hold; use rate=1, or "
            "pages='all'"
        )
