"""A page pool on the host: which page holds which tokens of which request, for those who have no engine that says it."""

from kvgen.pages.inputs import GroupInputs, StepInputs
from kvgen.pages.manager import Group, PageManager
from kvgen.pages.pool import OutOfPages, PageError, Pool
from kvgen.pages.prefix import Block, PrefixTree, block_hash

__all__ = [
    "Block",
    "Group",
    "GroupInputs",
    "OutOfPages",
    "PageError",
    "PageManager",
    "Pool",
    "PrefixTree",
    "StepInputs",
    "block_hash",
]
