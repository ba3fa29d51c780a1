"""How a kernel that stores new rows divides them: rows and heads of a block, and the order in which threads write.

Layouts whose innermost runs are shorter than a sector put neighbouring tokens side by side (vLLM's x-packed K, its V, scales
of a head). There a block takes so many tokens that they fill sectors, fewer heads instead, and neighbouring threads write
neighbouring tokens, from rows that wait in shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from kvgen.dtypes import dtype
from kvgen.layout import Region
from kvgen.ops.cache import rows_per_block
from kvgen.ops.segments import SegmentContext, segments
from kvgen.spec.cache import Cache

SECTOR: Final = 32  # bytes
MOST_ROWS: Final = 16  # that a block takes for the sake of sectors; more would leave small batches to few blocks
TILE_BYTES: Final = 20 << 10  # of rows of K or V that wait in shared memory


@dataclass(frozen=True)
class WriteContext:
    """How a segment's new rows are stored: `value` is the C type of the rows that are read, the caller's or float in shared
    memory; `head` the first head of the block, with its plus sign."""

    segment: SegmentContext
    value: str
    value_bytes: int
    by_token: bool
    scales_by_token: bool
    head: str

    def row(self, units: int) -> str:
        """The row of a thread's item i, of which a row has `units`, as C."""
        return "i % rows" if self.by_token else f"i / {units}"

    def unit(self, units: int) -> str:
        """Its place in the row."""
        return "i / rows" if self.by_token else f"i % {units}"

    def scale_row(self, units: int) -> str:
        """The row of a thread's scale i."""
        return "i % rows" if self.scales_by_token else f"i / {units}"

    def scale_unit(self, units: int) -> str:
        """Its place among those of the row."""
        return "i / rows" if self.scales_by_token else f"i % {units}"

    def access(self, width: int) -> int:
        """Elements of the widest access to a row."""
        return min(width, 16 // self.value_bytes)


@dataclass(frozen=True)
class Blocks:
    """What a block takes: `rows` tokens and `heads` kv heads of each; `split` blocks share a token's heads."""

    rows: int
    heads: int
    split: int


def _token_step(region: Region) -> int:
    """The smallest step from a token to the next, in elements; 0 where tokens are no axis."""
    steps = [s for a, s in zip(region.axes, region.strides, strict=True) if a.name == "token" and s is not None]
    return min(steps, default=0)


def _by_token(cache: Cache, role: str, begin: int) -> tuple[int, int]:
    """Of values and of scales of a segment: how many neighbouring tokens fill a sector; 1 where a token does by itself or
    tokens do not lie side by side."""
    segment = next(s for s in cache.storage.roles[role] if s.begin == begin)
    run = segment.region.vector
    run_bytes = run * segment.region.dtype.bits // 8
    beside = _token_step(segment.region) == run and segment.region.swizzle is None
    values = max(1, SECTOR // run_bytes) if beside and 0 < run_bytes < SECTOR else 1
    scales = segment.scales
    if scales is None or scales.region is None:
        return values, 1
    step = _token_step(scales.region)
    mine = scales.heads * scales.groups * (1 + scales.zero)
    within = max(1, min(step, mine)) * scales.dtype.bytes
    return values, max(1, SECTOR // within)


def scales_by_token(cache: Cache, role: str, begin: int) -> bool:
    """Whether the scales of neighbouring tokens lie closer than those of a token's heads and groups."""
    segment = next(s for s in cache.storage.roles[role] if s.begin == begin)
    scales = segment.scales
    if scales is None or scales.region is None:
        return False
    return 0 < _token_step(scales.region) < scales.heads * scales.groups * (1 + scales.zero)


def values_by_token(cache: Cache, segment: SegmentContext) -> bool:
    """Whether neighbouring tokens fill sectors that a token's own elements do not."""
    return _by_token(cache, segment.role, segment.begin)[0] > 1 and segment.writer == "write/vector.j2"


def divide(cache: Cache, threads: int, *, q_vectors: int = 0, whole: bool = False) -> Blocks:
    """The rows and heads of a block; `q_vectors` are what else a row has to move, `whole` keeps a row's heads together."""
    vectors = sum(s.vectors for s in segments(cache)) + q_vectors
    base = rows_per_block(cache, threads, q_vectors)
    wanted = base
    for s in segments(cache):
        values, scales = _by_token(cache, s.role, s.begin)
        computed = scales if s.computed else 1
        wanted = max(wanted, min(MOST_ROWS, max(values if values_by_token(cache, s) else 1, computed)))
    unit = max((s.scales[0].heads for s in segments(cache) if s.computed), default=1)
    heads = cache.kv_heads
    if not whole:
        # As much work a block as before: more rows, fewer heads.
        fitting = [h for h in range(unit, heads + 1) if heads % h == 0 and h % unit == 0]
        most = max(1, heads * 4 * threads // (vectors * wanted)) if wanted > base else heads
        heads = max((h for h in fitting if h <= most), default=fitting[0])
    row = max(sum(s.size for s in segments(cache) if s.role == role) for role in cache.roles)
    while wanted > 1 and wanted * heads * row * 4 > TILE_BYTES:
        wanted //= 2
    return Blocks(wanted, heads, cache.kv_heads // heads)


def within(segment: SegmentContext, blocks: Blocks) -> SegmentContext:
    """The segment as a block sees it: its heads are the block's."""
    if blocks.split == 1:
        return segment
    scales = tuple(replace(q, blocks=q.blocks // blocks.split) for q in segment.scales)
    return replace(segment, heads=blocks.heads, scales=scales)


def write(cache: Cache, segment: SegmentContext, blocks: Blocks, *, tiled: bool) -> WriteContext:
    """How a segment is written, from the caller's rows or (`tiled`) from shared memory."""
    value = "float" if tiled else segment.value
    return WriteContext(
        within(segment, blocks),
        value=value,
        value_bytes=4 if tiled else dtype(cache.dtype).bytes,
        by_token=tiled and values_by_token(cache, segment),
        scales_by_token=scales_by_token(cache, segment.role, segment.begin),
        head="head0 + " if blocks.split > 1 else "",
    )
