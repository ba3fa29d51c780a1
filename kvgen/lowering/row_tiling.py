"""How a kernel that stores new rows divides them: rows and heads of a block, and the order in which threads write.

Layouts whose innermost runs are shorter than a sector put neighbouring tokens side by side (vLLM's x-packed K, its V, scales
of a head). There a block takes so many tokens that they fill sectors, fewer heads instead, and neighbouring threads write
neighbouring tokens, from rows that wait in shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from kvgen.expr.nodes import Expr, const, var
from kvgen.layout.dtypes import dtype
from kvgen.layout.regions import Region
from kvgen.lowering.lowered import LoweredCache
from kvgen.lowering.offsets import OffsetContext, offset_context
from kvgen.lowering.row_runs import rows_per_block
from kvgen.lowering.segments import SegmentContext

SECTOR: Final = 32  # bytes
MOST_ROWS: Final = 16  # that a block takes for the sake of sectors; more would leave small batches to few blocks
MOST_BASE_ROWS: Final = 8  # that it takes otherwise: 128 tokens still fill a GPU's first wave
SHARED_BYTES: Final = 47 << 10  # of a block's rows, angles, scales and places
PLACE_BYTES: Final = 96
_ZERO: Final[Expr] = const(0)


@dataclass(frozen=True)
class WriteContext:
    """How a segment's new rows are stored, and the struct `name` that a kernel spells out for that: `given` is the C type of the
    rows that are read, the caller's or float in shared memory, `rows` their name; an access to them has `bytes`. One of three
    ways: `blocks` whose scales are computed, `units` a lane in flight, and thread i stores number `scale_at` of row
    `scale_row`, in the order of memory; the `tail` of a residual; or vectors, `batch` a thread in flight, neighbouring threads
    those of neighbouring rows where it goes `by_token`."""

    segment: SegmentContext
    name: str
    given: str
    rows: str
    batch: int
    units: int
    bytes: int
    by_token: bool
    blocks: bool
    tail: bool
    scale_row: OffsetContext | None = None
    scale_at: OffsetContext | None = None


@dataclass(frozen=True)
class Blocks:
    """What a block takes: `rows` tokens and `heads` kv heads of each; `split` blocks share a token's heads."""

    rows: int
    heads: int
    split: int


def _token_step(region: Region) -> int:
    """The smallest step from a token to the next, as strides count it; 0 where tokens are no axis."""
    steps = [s for a, s in zip(region.axes, region.strides, strict=True) if a.name == "token" and s is not None]
    return min(steps, default=0)


def _by_token(cache: LoweredCache, role: str, begin: int) -> tuple[int, int]:
    """Of values and of scales of a segment: how many neighbouring tokens fill a sector; 1 where a token does by itself or
    tokens do not lie side by side."""
    segment = next(s for s in cache.spec.storage.roles[role] if s.begin == begin)
    run = segment.region.vector
    run_bytes = segment.region.bytes_of(run)
    beside = _token_step(segment.region) == run * segment.region.element and segment.region.swizzle is None
    values = max(1, SECTOR // run_bytes) if beside and 0 < run_bytes < SECTOR else 1
    scales = segment.scales
    if scales is None or scales.region is None:
        return values, 1
    step = _token_step(scales.region)
    mine = scales.heads * scales.groups * (1 + scales.zero)
    within = max(1, min(step, mine)) * scales.dtype.bytes
    return values, max(1, SECTOR // within)


def _heads_beside(cache: LoweredCache, segment: SegmentContext) -> bool:
    """Whether the scales of a token's heads lie closer than those of neighbouring tokens."""
    scales = next(s for s in cache.spec.storage.roles[segment.role] if s.begin == segment.begin).scales
    if scales is None or scales.region is None or scales.heads == 1:
        return False
    axes = zip(scales.region.axes, scales.region.strides, strict=True)
    steps = [s for a, s in axes if a.name == "head" and s is not None]
    return min(steps, default=0) < _token_step(scales.region)


def scales_by_token(cache: LoweredCache, role: str, begin: int) -> bool:
    """Whether the scales of neighbouring tokens lie closer than those of a token's heads and groups."""
    scales = next(s for s in cache.spec.storage.roles[role] if s.begin == begin).scales
    if scales is None or scales.region is None:
        return False
    return 0 < _token_step(scales.region) < scales.heads * scales.groups * (1 + scales.zero)


def scale_walk(region: Region, rows: int, heads: int, places: int) -> tuple[OffsetContext, OffsetContext]:
    """(row, place in the row) of item `i` of `rows` rows of scales, so that neighbouring items are neighbours in memory.

    A row has `heads` blocks of heads with `places` numbers each, which lie as `region` says.
    """
    count = heads * places
    i = var("i", rows * count - 1)
    inner = [(s, a) for a, s in zip(region.axes, region.strides, strict=True) if a.name in ("token", "head", "dim")]
    sizes = {"token": rows, "head": heads, "dim": places}
    if any(s is None for s, _ in inner):
        return offset_context(i // count), offset_context(i % count)
    step, row, at = 1, _ZERO, _ZERO
    for _, axis in sorted(inner, key=lambda item: (item[0] or 0, item[1].divide)):
        extent = min(axis.modulo or sizes[axis.name], max(1, sizes[axis.name] // axis.divide))
        if extent == 1:
            continue
        digit = i // step % extent
        if axis.name == "token":
            row = row + digit * axis.divide
        else:
            at = at + digit * (axis.divide * (places if axis.name == "head" else 1))
        step *= extent
    if step != rows * count:  # a factor that a block has no whole number of
        return offset_context(i // count), offset_context(i % count)
    return offset_context(row), offset_context(at)


def values_by_token(cache: LoweredCache, segment: SegmentContext) -> bool:
    """Whether neighbouring tokens fill sectors that a token's own elements do not."""
    return _by_token(cache, segment.role, segment.begin)[0] > 1 and segment.by_vectors


def divide(
    cache: LoweredCache,
    threads: int,
    *,
    q_vectors: int = 0,
    whole: bool = False,
    tiles: Mapping[str, int] | None = None,
    row_bytes: int = 0,
) -> Blocks:
    """The rows and heads of a block; `q_vectors` are what else a row has to move, `whole` keeps a row's heads together.

    `tiles` are the bytes an element has in shared memory, by role, and `row_bytes` what else a row has there. Raises
    ValueError where not even one row of as few heads as scales allow fits.
    """
    known = cache.segments
    vectors = sum(s.vectors for s in known) + q_vectors
    base = min(MOST_BASE_ROWS, rows_per_block(cache, threads, q_vectors))
    rows = base
    for s in known:
        values, scales = _by_token(cache, s.role, s.begin)
        computed = scales if s.computed else 1
        rows = max(rows, min(MOST_ROWS, max(values if values_by_token(cache, s) else 1, computed)))
    unit, heads = math.lcm(1, *(s.scales[0].heads for s in known if s.computed)), cache.spec.kv_heads
    fitting = [heads] if whole else [h for h in range(unit, heads + 1) if heads % h == 0 and h % unit == 0]
    # As much work a block as before: more rows, fewer heads, where these are not in one sector with each other.
    apart = rows > base and not any(s.computed and _heads_beside(cache, s) for s in known)
    most = max(1, heads * 4 * threads // (vectors * rows)) if apart else heads
    at = max((i for i, h in enumerate(fitting) if h <= most), default=0)

    def shared(count: int, of: int) -> int:
        """Bytes of shared memory of so many rows of so many heads."""
        row = row_bytes + PLACE_BYTES
        for role, element in (tiles or {}).items():
            row += (of * next(s.row for s in known if s.role == role) + 4) * element
        row += sum(s.scales[0].blocks * s.scales[0].each * 4 * of // heads for s in known if s.computed)
        return count * row

    while shared(rows, fitting[at]) > SHARED_BYTES:
        if rows > 1:
            rows //= 2
        elif at > 0:
            at -= 1
        else:
            kept = "a norm over the whole row" if whole else "scales of so many heads" if unit > 1 else "a head"
            raise ValueError(
                f"ops: got rows of {heads} heads x {cache.spec.head_dim}, of which {kept} needs {shared(1, fitting[0])} bytes of "
                f"shared memory; a block has {SHARED_BYTES}; use smaller heads, or change rows before they are appended"
            )
    return Blocks(rows, fitting[at], heads // fitting[at])


def divide_q(heads: int, threads: int, *, q_vectors: int, row_bytes: int) -> Blocks:
    """The rows of a block that has q alone, about four vectors a thread; all heads of a row are one block's."""
    rows = max(1, min(MOST_BASE_ROWS, 4 * threads // q_vectors, SHARED_BYTES // (row_bytes + PLACE_BYTES)))
    return Blocks(1 << rows.bit_length() - 1, heads, 1)


def within(segment: SegmentContext, blocks: Blocks) -> SegmentContext:
    """The segment as a block sees it: its heads are the block's."""
    if blocks.split == 1:
        return segment
    scales = tuple(replace(q, blocks=q.blocks // blocks.split) for q in segment.scales)
    return replace(segment, heads=blocks.heads, scales=scales)


def write(
    cache: LoweredCache, segment: SegmentContext, blocks: Blocks, threads: int, *, tiled: bool, given: str, rows: str
) -> WriteContext:
    """How a segment is written by so many threads, from the rows named `rows` of C type `given`: the caller's, or `tiled`."""
    seen, width, units = within(segment, blocks), segment.width, 1
    row = at = None
    if segment.computed and not segment.residual:
        scales = next(s for s in cache.spec.storage.roles[segment.role] if s.begin == segment.begin).scales
        q = seen.scales[0]
        assert scales is not None and scales.region is not None
        row, at = scale_walk(scales.region, blocks.rows, q.blocks // q.groups, q.groups * q.each)
        width, units = q.width, 1 if blocks.rows * q.blocks * q.lanes <= threads else q.units
    kind = "Rows" if segment.by_vectors else "Tail" if segment.residual else "Blocks"
    part = "Rope" if segment.struct.endswith("Rope") else ""
    return WriteContext(
        seen,
        name=segment.role.upper() + part + kind,
        given=given,
        rows=rows,
        batch=1 if blocks.rows * seen.vectors <= threads else 2,
        units=units,
        bytes=min(16, width * (4 if given == "float" else dtype(cache.spec.dtype).bytes)),
        by_token=tiled and values_by_token(cache, segment),
        blocks=segment.computed and not segment.residual,
        tail=segment.residual > 0,
        scale_row=row,
        scale_at=at,
    )
