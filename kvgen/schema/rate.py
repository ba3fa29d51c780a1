"""Pages of caches with an entry for several tokens: how many entries an engine's block of tokens is."""

from __future__ import annotations


def block_entries(block_tokens: int, rate: int) -> int:
    """Entries of a block of `block_tokens` tokens where each stands for `rate` of them: the `page_size` of its cache.

    vLLM's blocks of 256 tokens are pages of 64 entries at rate 4, of 2 at rate 128. Raises ValueError for a rate that does not
    divide the block: an entry would lie in two of them.
    """
    if rate < 1 or block_tokens < 1 or block_tokens % rate:
        raise ValueError(
            f"rate: got {rate} with blocks of {block_tokens} tokens; an entry lies in one block, so the rate divides it; use a "
            "divisor of the block's tokens, or larger blocks"
        )
    return block_tokens // rate
