"""extend on CUDA cores: the shapes of blocks, and the kernel's context."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Final

from kvgen.expr.score_c import float_literal
from kvgen.lowering.attention.mma import SLACK
from kvgen.lowering.attention.split_kv import Attended
from kvgen.lowering.lowered import lower
from kvgen.lowering.segments import SegmentContext
from kvgen.schema.kernel_set import KernelSet

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
        """Of a block."""
        return 32 * self.warps

    @property
    def partial_bytes(self) -> int:
        """Bytes of a partial result of a block: RowPartial of device/attention/extend_tiles.cuh."""
        return 4 * self.m_tiles * self.threads * (self.part_dims // 2 + 4)

    def shared(self, _arch: str = "") -> int:
        """Bytes of shared memory: struct Shared of the kernel."""
        read = self.cols * self.k_pitch + self.tokens * max(self.k_pitch, self.v_pitch) + self.cols * (self.tokens + 4)
        return -(-4 * max(read, self.cols * (self.v_size + 4 + 2)) // 16) * 16


@dataclass(frozen=True)
class ExtendSimtContext:
    """Everything ops/extend_simt.cu.j2 reads. Pitches are floats from row to row in shared memory, widths elements of a load."""

    d: Attended
    k: SegmentContext
    v: SegmentContext
    cols: int
    warps: int
    m_tiles: int
    parts: int
    part_dims: int
    tokens: int
    blocks_per_sm: int
    k_pitch: int
    v_pitch: int
    k_width: int
    v_width: int
    slack: int
    chunk_tokens: int
    qk_scale: str
    usual_scale: bool


def shape(kernels: KernelSet) -> Shape:
    """The block of a set's extend: the most columns, then two blocks a multiprocessor, then the longest tiles."""
    k_size, v_size = (parts[0].size for parts in kernels.kv.storage.roles.values())
    parts = 2 ** (-(-v_size // _PART_DIMS) - 1).bit_length()
    dims = -(-v_size // (16 * parts)) * 16
    most_tiles = 2 if dims <= _PART_DIMS // 2 else 1
    # A warp has 16 columns alone where wide rows of q leave no room for 32.
    for m_tiles, warps, blocks, tokens in product(range(most_tiles, 0, -1), (4, 2, 1), (2, 1), (32, 16, 8)):
        found = Shape(warps, m_tiles, parts, dims, tokens, _pitch(k_size), _pitch(dims * parts), v_size, blocks)
        if warps >= parts and blocks * found.shared() <= _MEMORY:
            return found
    raise AssertionError(f"rows of {k_size} and {v_size} dims")


def _pitch(dims: int) -> int:
    """Floats from row to row: an odd number of 16 bytes, so that neighbouring rows begin in different banks."""
    return (-(-dims // 4) | 1) * 4


def extend_simt_context(
    kernels: KernelSet, d: Attended, scale: float, s: Shape, chunk_tokens: int
) -> ExtendSimtContext:
    """The kernel's context."""
    k, v = lower(kernels.kv).segments
    k_span, v_span = (parts[0].span for parts in kernels.kv.storage.roles.values())
    return ExtendSimtContext(
        d=d,
        k=k,
        v=v,
        cols=s.cols,
        warps=s.warps,
        m_tiles=s.m_tiles,
        parts=s.parts,
        part_dims=s.part_dims,
        tokens=s.tokens,
        blocks_per_sm=s.blocks_per_sm,
        k_pitch=s.k_pitch,
        v_pitch=s.v_pitch,
        k_width=math.gcd(_WIDTH, k_span),
        v_width=math.gcd(_WIDTH, v_span),
        slack=SLACK,
        chunk_tokens=chunk_tokens,
        qk_scale=float_literal(scale),
        usual_scale=scale == 1 / math.sqrt(kernels.kv.head_dim),
    )
