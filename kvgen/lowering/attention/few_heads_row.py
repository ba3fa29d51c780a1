"""Rows of e4m3 codes with e8m0 scales that kernels of few heads take as they are stored: two kernels read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvgen.layout.storage import Segment
from kvgen.lowering.attention.mla_problem import MlaProblem
from kvgen.schema.cache import Cache

# Columns that a block of few heads has at most; dims of a row, all of them V's: two warps' sums, 16 columns of 256 dims each,
# are 128 registers a thread.
COLS: Final = 16
DIMS: Final = 512
# Where a half of the dims ends in the middle of a row, the other one still has a group of codes.
_HALF: Final = DIMS // 2


@dataclass(frozen=True)
class CodedRow:
    """A row as every cache of the lists stores it: `latent` codes, then what is not quantized, a scale each `group_dims` codes.

    `row_bytes` are copied of it. Its scales lie behind the codes; or, if `scales_in_footer`, in a footer of the page or a tensor
    of their own: then `scale_bytes` of them are copied.
    """

    latent: int
    group_dims: int
    row_bytes: int
    scales_in_footer: bool
    scale_bytes: int


def columns_of(problem: MlaProblem) -> int:
    """Columns of a block."""
    return 8 if problem.columns <= 8 else COLS


def row_of(problem: MlaProblem) -> CodedRow | str:
    """How the rows of a call's caches are stored, or why they cannot be taken as they are."""
    if not problem.lists:
        return "a request's table names its rows"
    if problem.columns > COLS:
        return f"a block of few heads has {COLS} columns"
    if any(cache.head_dim != DIMS or cache.latent_part != DIMS for cache in problem.caches):
        return f"rows are not {DIMS} dims that are all of V"
    rows = {_row_of(cache) for cache in problem.caches}
    (row, *more) = rows
    if row is None or more:
        return "rows are not all of e4m3 codes with e8m0 scales, in one order"
    return row


def _row_of(cache: Cache) -> CodedRow | None:
    """How a cache's rows are stored; None where kernels of few heads cannot take them."""
    codes, *more = cache.storage.roles["k"]
    scales = codes.scales
    if cache.dtype == "f32" or codes.region.dtype.name != "e4m3" or scales is None or scales.region is None:
        return None
    group = scales.block[2]
    if scales.dtype.name != "e8m0" or scales.block[:2] != (1, 1) or group not in (32, 64):
        return None
    if codes.size < _HALF or (codes.size - _HALF) % group or not _in_bytes(codes, 1):
        return None
    end = codes.size
    for plain in more:
        beside = plain.base == codes.base and plain.region.byte_offset == codes.region.byte_offset + end
        if plain.scales is not None or plain.region.dtype.bits != 16 or not beside or not _in_bytes(plain, 2):
            return None
        if _step(plain) != _step(codes):
            return None
        end += 2 * plain.size
    return _with_scales(codes, end)


def _with_scales(codes: Segment, end: int) -> CodedRow | None:
    """A row of these codes, by where its scales lie: behind its bytes, or in whole words of a footer or tensor."""
    scales = codes.scales
    assert scales is not None and scales.region is not None
    size, group = codes.size, scales.block[2]
    step = (scales.region.stride_of("token") or 0) * scales.dtype.bytes
    at = scales.region.byte_offset - codes.region.byte_offset
    if scales.base == codes.base and at == end == size and step == _step(codes) and size // group == 16:
        return CodedRow(size, group, end + 16, scales_in_footer=False, scale_bytes=16)
    wide = 8 if group == 64 else 16
    if step != wide or (scales.base == codes.base and at % wide):
        return None
    return CodedRow(size, group, end, scales_in_footer=True, scale_bytes=wide)


def _in_bytes(segment: Segment, nbytes: int) -> bool:
    """A row's part is a run of whole accesses."""
    region = segment.region
    return region.run == segment.size and region.vector * nbytes == 16 and _step(segment) % 16 == 0


def _step(segment: Segment) -> int:
    return (segment.region.stride_of("token") or 0) * segment.region.dtype.bytes
