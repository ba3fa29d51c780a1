"""What pages hold, for requests that begin with the same tokens: a tree of full pages, found by chained hashes."""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left, insort
from collections.abc import Sequence


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """SHA-256 of a page's tokens behind the hash of what comes before them: 32 bytes, the same in every process.

    The first page's parent is the hash of the request's salt, `block_hash(salt.encode(), ())`.
    """
    return hashlib.sha256(parent + struct.pack(f"<{len(tokens)}q", *tokens)).digest()


class Block:
    """The tokens of a full page behind those of its parents.

    `pages` has the page that holds them, by group; `requests` counts those whose last full page it is. A root has no parent
    and no tokens, and the salt of its requests.
    """

    __slots__ = ("children", "hash", "pages", "parent", "requests", "salt", "tokens")

    def __init__(self, parent: Block | None, tokens: tuple[int, ...], digest: bytes, salt: str) -> None:
        self.parent, self.tokens, self.hash, self.salt = parent, tokens, digest, salt
        self.pages: dict[int, int] = {}
        self.requests = 0
        self.children: list[Block] = []  # in the order of their tokens


class PrefixTree:
    """Full pages by what they hold; hashes find a block, and its tokens and parents decide whether it is the one."""

    def __init__(self) -> None:
        self._roots: dict[str, Block] = {}
        self._by_hash: dict[bytes, list[Block]] = {}

    def __len__(self) -> int:
        return sum(len(found) for found in self._by_hash.values())

    def root(self, salt: str) -> Block:
        """What requests with this salt begin with; those of another salt share no page with them."""
        if salt not in self._roots:
            self._roots[salt] = Block(None, (), block_hash(salt.encode(), ()), salt)
        return self._roots[salt]

    def find(self, parent: Block, tokens: tuple[int, ...]) -> Block | None:
        """The block of these tokens behind `parent`."""
        for block in self._by_hash.get(block_hash(parent.hash, tokens), ()):
            if block.parent is parent and block.tokens == tokens:
                return block
        return None

    def partial(self, parent: Block, tokens: tuple[int, ...]) -> tuple[Block | None, int]:
        """The block behind `parent` that begins with the most of `tokens`, and with how many."""
        best: tuple[Block | None, int] = (None, 0)
        at = bisect_left(parent.children, tokens, key=lambda block: block.tokens)
        for block in parent.children[max(0, at - 1) : at + 1]:  # the longest common prefix is a neighbour's
            common = next((i for i, (a, b) in enumerate(zip(block.tokens, tokens, strict=False)) if a != b), None)
            count = min(len(tokens), len(block.tokens)) if common is None else common
            if count > best[1]:
                best = block, count
        return best

    def insert(self, parent: Block, tokens: tuple[int, ...]) -> Block:
        """The block of these tokens behind `parent`, made where there is none."""
        block = self.find(parent, tokens)
        if block is None:
            block = Block(parent, tokens, block_hash(parent.hash, tokens), parent.salt)
            self._by_hash.setdefault(block.hash, []).append(block)
            insort(parent.children, block, key=lambda block: block.tokens)
        return block

    def prune(self, block: Block) -> None:
        """Drop the block if no page holds it, no request stands at it and nothing lies behind it; then its parents alike."""
        while not (block.pages or block.requests or block.children):
            parent = block.parent
            if parent is None:
                del self._roots[block.salt]
                return
            same = self._by_hash[block.hash]
            same.remove(block)
            if not same:
                del self._by_hash[block.hash]
            parent.children.remove(block)
            block = parent
