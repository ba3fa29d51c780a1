"""decode on CUDA cores: how rows are spread over lanes, and what its template reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvgen.architectures import Architecture
from kvgen.expr.score_c import float_literal
from kvgen.layout.dtypes import dtype
from kvgen.lowering.attention.decode_problem import DecodeProblem
from kvgen.lowering.attention.operand import token_bytes
from kvgen.lowering.attention.problem import AttentionCall, Fit
from kvgen.lowering.attention.split_kv import partial_bytes
from kvgen.lowering.lowered import lower
from kvgen.lowering.segments import SegmentContext
from kvgen.plan.division import Division
from kvgen.schema.cache import Cache

NAME: Final = "decode_simt"
WARPS: Final = 4
BLOCKS: Final = 2  # of a multiprocessor
TILE: Final = 64  # tokens that the planner counts in
# Query and accumulator elements a thread keeps in registers as f32, each; twice this plus addresses stays below 255.
REGISTER_BUDGET: Final = 64
# The same where accesses are wider than rows of q need.
WIDE_BUDGET: Final = 32


@dataclass(frozen=True)
class DecodeSimt:
    """Everything ops/decode_simt.cu.j2 reads.

    A row of K or V is split over `lanes` lanes, `width` elements each at a time, in `k_chunks` or `v_chunks` steps; a warp
    thus works on `32 / lanes` tokens at once. Rows of q are read `row_width` elements at a time.
    """

    d: AttentionCall
    k: SegmentContext
    v: SegmentContext
    shape: Shape
    warps: int
    qk_scale: str
    blocks_per_sm: int


@dataclass(frozen=True)
class Shape:
    """How a block divides columns, tokens and dims among its lanes; `tiles` blocks share the columns of a kv head."""

    cols: int
    tiles: int
    width: int
    lanes: int
    row_width: int
    k_chunks: int
    v_chunks: int


def fit(problem: DecodeProblem, arch: Architecture) -> Fit:
    """K and V of any cache, on every architecture."""
    cache, call = problem.cache, problem.call
    found = shape(cache, call.columns)
    tokens = 32 // found.lanes
    nbytes = sum(token_bytes(part) for parts in cache.storage.roles.values() for part in parts)
    return Fit(
        how="f32 products on CUDA cores, dims over lanes",
        context=partial(_context, problem, found),
        division=Division(
            columns=found.cols,
            tiles=found.tiles,
            heads=1,
            tokens=tokens,
            teams=WARPS,
            team_warps=1,
            stages=0,
            held=0,
            tile_bytes=0,
            blocks=BLOCKS,
            trip_tokens=tokens,
            trip_warps=1,
            trip_bytes=tokens * nbytes,
            lanes=found.lanes,
        ),
        threads=32 * WARPS,
        shared=0,
        tile=TILE,
        partial_bytes=partial_bytes(found.cols, cache.v_dim),
        q_align=found.row_width,
        out_align=found.row_width,
        vec=math.gcd(4, cache.v_dim),
    )


def _walk(width: int, k: SegmentContext, v: SegmentContext, columns: int) -> tuple[int, int, int]:
    """(width, lanes of a token, blocks that share the columns) where a lane reads `width` elements at once."""
    pieces = max(k.size, v.size) // width
    lanes = min(32, 2 ** (pieces - 1).bit_length())
    chunks = math.ceil(max(k.size, v.size) / (width * lanes))
    cols = max(1, min(8, REGISTER_BUDGET // (width * chunks), columns))
    return width, lanes, math.ceil(columns / cols)


def shape(cache: Cache, columns: int) -> Shape:
    """The block of a decode of so many columns."""
    k, v = lower(cache).segments
    spans = [parts[0].span for parts in cache.storage.roles.values()]
    row_width = math.gcd(16 // dtype(cache.dtype).bytes, *spans)
    width, lanes, tiles = _walk(row_width, k, v, columns)
    # Codes are narrower than rows of q: whole accesses leave fewer lanes to a token. Not where it costs so many registers
    # that a multiprocessor has fewer bytes on their way.
    codes = math.gcd(k.vector, v.vector, *spans)
    while width < codes:
        wider, wider_lanes, wider_tiles = _walk(2 * width, k, v, columns)
        held = math.ceil(columns / tiles) * math.ceil(max(k.size, v.size) / wider_lanes)
        if wider_tiles > tiles or held > WIDE_BUDGET:
            break
        width, lanes, tiles = wider, wider_lanes, wider_tiles
    k_chunks, v_chunks = (math.ceil(d / (width * lanes)) for d in (k.size, v.size))
    return Shape(math.ceil(columns / tiles), tiles, width, lanes, row_width, k_chunks, v_chunks)


def _context(problem: DecodeProblem, s: Shape, d: AttentionCall) -> DecodeSimt:
    """The template's context of a whole call."""
    k, v = lower(problem.cache).segments
    return DecodeSimt(
        d=d,
        k=k,
        v=v,
        shape=s,
        warps=WARPS,
        qk_scale=float_literal(problem.scale),
        blocks_per_sm=BLOCKS,
    )
