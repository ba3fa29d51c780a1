"""A cache in numbers and names: what its kernels are written from, worked out once and handed on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from kvgen.lowering.allocation import Allocation, allocation_of
from kvgen.lowering.cache_struct import cache_fields, state_fields
from kvgen.lowering.segments import SegmentContext, segments
from kvgen.lowering.tables import TableForm, table_form
from kvgen.plan.params import Field
from kvgen.schema.any_cache import AnyCache
from kvgen.schema.cache import Cache


@dataclass(frozen=True)
class LoweredPages:
    """A cache as kernels that move pages see it.

    `allocation` says if it has pages, blocks, states or rows, `table` how they are found; `fields` is the struct that kernels
    take first.
    """

    allocation: Allocation
    table: TableForm
    fields: tuple[Field, ...]


@dataclass(frozen=True)
class LoweredCache(LoweredPages):
    """A cache as its kernels see it.

    `spec` is the user's model, `segments` how K and V are stored, K's first.
    """

    spec: Cache
    segments: tuple[SegmentContext, ...]

    def segments_of(self, role: str) -> tuple[SegmentContext, ...]:
        """The segments of K ("k") or V."""
        return tuple(s for s in self.segments if s.role == role)


@lru_cache(maxsize=256)
def lower(cache: Cache) -> LoweredCache:
    """The cache in numbers and names; once for a cache, whoever of its operations asks first."""
    return LoweredCache(allocation_of(cache), table_form(cache), cache_fields(cache), cache, segments(cache))


def lower_pages(cache: AnyCache) -> LoweredPages:
    """Any cache, for operations that ask for pages and their table alone."""
    if isinstance(cache, Cache):
        return lower(cache)
    return LoweredPages(allocation_of(cache), table_form(cache), state_fields(cache))
