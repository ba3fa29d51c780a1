"""A page pool on the host: which page holds which tokens of which request, for those who have no engine that says it."""

from kvgen.pages.arguments import PageError
from kvgen.pages.group import Group
from kvgen.pages.inputs import GroupInputs, StepInputs
from kvgen.pages.manager import PageManager
from kvgen.pages.pool import OutOfPages, Pool
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
