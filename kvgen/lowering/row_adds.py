"""How rows are added to K and V: the structs of device/rows/add.cuh, and which part of the rows a block of threads has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvgen.lowering.lowered import LoweredCache
from kvgen.lowering.segments import SegmentContext, check_whole_bytes
from kvgen.schema.cache import Cache

THREADS: Final = 256
MOST_ROWS: Final = 32


@dataclass(frozen=True)
class AdderContext:
    """One role's adder, and the struct `name` that a kernel spells out for it: `batch` slots a thread of the segment `segment`,
    in vectors of `width` elements or in `blocks` of `lanes` lanes with `chunks` of them. Rows are read `access` elements at
    once, and lie `begin` elements into the caller's."""

    name: str
    segment: str
    blocks: bool
    batch: int
    width: int
    access: int
    lanes: int
    chunks: int
    unroll: int
    begin: int


@dataclass(frozen=True)
class Adders:
    """K's and V's; a block has `rows` tokens, or, where one is too much, one of `parts` of a token."""

    roles: tuple[AdderContext, ...]
    rows: int
    parts: int
    align: int


def check_addable(name: str, cache: Cache) -> None:
    """Raise ValueError where K and V of single tokens cannot be added to."""
    storage = cache.storage
    if "v" not in storage.roles:
        raise ValueError(
            f"ops: got {name} with a cache that stores K alone; its rows are K's and V's; use a cache of both"
        )
    if storage.residual:
        raise ValueError(
            f"ops: got {name} with residual={storage.residual}; the tokens of a sealed group share their scales, so none can be "
            "added to alone; add to the rows before they are appended, or use scales of single tokens"
        )
    for segment in storage.segments:
        if segment.scales is None or segment.quant is None or not segment.quant.computed:
            continue
        check_whole_bytes(name, segment)


def adders(cache: LoweredCache, *, side_by_side: bool) -> Adders:
    """The adders of a cache of K and V, whose rows lie in rows of their own, or `side_by_side` in one: K's half, V's half."""
    found, rows, parts, align, begin = [], MOST_ROWS, 1, 1, 0
    whole = sum(s.heads * s.size for s in cache.segments) if side_by_side else 0
    for s in cache.segments:
        adder, slots, access = _adder(s, begin, whole)
        share = THREADS * adder.batch
        rows, parts = min(rows, max(1, share // slots)), max(parts, -(-slots // share))
        align = max(align, access)
        found.append(adder)
        begin += s.heads * s.size if side_by_side else 0
    return Adders(tuple(found), rows, parts, align)


def _adder(s: SegmentContext, begin: int, whole: int) -> tuple[AdderContext, int, int]:
    """A segment's adder, the slots that a token has, and the elements of an access to the caller's rows, of `whole` elements."""
    quant = s.scales[0] if s.computed else None
    width = quant.width if quant else s.width
    access = width
    while begin % access or whole % access:
        access //= 2
    lanes, chunks, unroll, batch = (
        (1, 1, 1, 2) if quant is None else (quant.lanes, quant.chunks, quant.unroll, quant.units)
    )
    name = f"{s.role.upper()}{'Rope' if s.struct.endswith('Rope') else ''}Add"
    context = AdderContext(name, s.struct, quant is not None, batch, width, access, lanes, chunks, unroll, begin)
    return context, s.vectors if quant is None else quant.blocks * lanes, access
