"""extend on CUDA cores: blocks, and what its template reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Final

from kvgen.architectures import Architecture
from kvgen.expr.score_c import float_literal
from kvgen.lowering.attention.extend_problem import ExtendProblem
from kvgen.lowering.attention.operand import token_bytes
from kvgen.lowering.attention.problem import AttentionCall, Fit
from kvgen.lowering.attention.ring import SLACK
from kvgen.lowering.lowered import lower
from kvgen.lowering.segments import SegmentContext
from kvgen.plan.division import Division
from kvgen.schema.cache import Cache

NAME: Final = "extend_simt"
# Dims of V whose sums a warp keeps in registers, of 16 columns: 128 registers of a lane. Of half of them it has 32 columns: what
# it reads of K and V serves twice as many.
_PART_DIMS: Final = 256
# Elements that a thread loads at once.
_WIDTH: Final = 8
# Shared memory of a multiprocessor with the least, less what each block is charged besides.
_MEMORY: Final = 98 * 1024


@dataclass(frozen=True)
class Shape:
    """How a block divides columns and dims of V among its warps: `parts` of them share the columns of one."""

    warps: int
    m_tiles: int
    parts: int
    part_dims: int
    tokens: int
    k_pitch: int
    v_pitch: int
    v_size: int
    blocks_per_sm: int

    @property
    def cols(self) -> int:
        """Columns of a block."""
        return 16 * self.m_tiles * self.warps // self.parts

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def partial_bytes(self) -> int:
        """Bytes of a partial result of a block: RowPartial of device/attention/extend/extend_tiles.cuh."""
        return 4 * self.m_tiles * self.threads * (self.part_dims // 2 + 4)

    @property
    def shared(self) -> int:
        """Bytes of shared memory: struct Shared of the kernel."""
        read = self.cols * self.k_pitch + self.tokens * max(self.k_pitch, self.v_pitch) + self.cols * (self.tokens + 4)
        return -(-4 * max(read, self.cols * (self.v_size + 4 + 2)) // 16) * 16


@dataclass(frozen=True)
class ExtendSimt:
    """Everything ops/extend_simt.cu.j2 reads; widths are elements of a load."""

    d: AttentionCall
    k: SegmentContext
    v: SegmentContext
    shape: Shape
    k_width: int
    v_width: int
    slack: int
    chunk_tokens: int
    qk_scale: str
    usual_scale: bool


def fit(problem: ExtendProblem, arch: Architecture) -> Fit:
    """K and V of any cache as f32, on every architecture."""
    cache = problem.cache
    found = shape(cache)
    nbytes = sum(token_bytes(part) for parts in cache.storage.roles.values() for part in parts)
    return Fit(
        how="f32 products on CUDA cores",
        context=partial(_context, problem, found),
        division=Division(
            columns=found.cols,
            tiles=1,
            heads=1,
            tokens=found.tokens,
            teams=1,
            team_warps=found.warps,
            stages=0,
            held=0,
            tile_bytes=0,
            blocks=found.blocks_per_sm,
            trip_tokens=found.tokens,
            trip_warps=found.warps,
            trip_bytes=found.tokens * nbytes,
            lanes=32,
            query="shared memory",
        ),
        threads=found.threads,
        shared=found.shared,
        tile=found.tokens,
        partial_bytes=found.partial_bytes,
        q_align=1,
        out_align=math.gcd(4, cache.v_dim),
        vec=math.gcd(4, cache.v_dim),
    )


def shape(cache: Cache) -> Shape:
    """The block of an extend: the most columns, then two blocks a multiprocessor, then the longest tiles."""
    k_size, v_size = (parts[0].size for parts in cache.storage.roles.values())
    parts = 2 ** (-(-v_size // _PART_DIMS) - 1).bit_length()
    dims = -(-v_size // (16 * parts)) * 16
    most_tiles = 2 if dims <= _PART_DIMS // 2 else 1
    # A warp has 16 columns alone where wide rows of q leave no room for 32.
    for m_tiles, warps, blocks, tokens in product(range(most_tiles, 0, -1), (4, 2, 1), (2, 1), (32, 16, 8)):
        found = Shape(warps, m_tiles, parts, dims, tokens, _pitch(k_size), _pitch(dims * parts), v_size, blocks)
        if warps >= parts and blocks * found.shared <= _MEMORY:
            return found
    raise AssertionError(f"rows of {k_size} and {v_size} dims")


def _pitch(dims: int) -> int:
    """Floats from row to row: an odd number of 16 bytes, so that neighbouring rows begin in different banks."""
    return (-(-dims // 4) | 1) * 4


def _context(problem: ExtendProblem, s: Shape, d: AttentionCall) -> ExtendSimt:
    """The template's context of a whole call."""
    cache = problem.cache
    k, v = lower(cache).segments
    k_span, v_span = (parts[0].span for parts in cache.storage.roles.values())
    return ExtendSimt(
        d=d,
        k=k,
        v=v,
        shape=s,
        k_width=math.gcd(_WIDTH, k_span),
        v_width=math.gcd(_WIDTH, v_span),
        slack=SLACK,
        chunk_tokens=problem.chunk,
        qk_scale=float_literal(problem.scale),
        usual_scale=problem.scale == 1 / math.sqrt(cache.head_dim),
    )
