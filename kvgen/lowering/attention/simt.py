"""decode on CUDA cores: how rows are spread over lanes, and the kernel's context."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from kvgen.expr.score_c import float_literal
from kvgen.layout.dtypes import dtype
from kvgen.lowering.attention.split_kv import Attended
from kvgen.lowering.lowered import lower
from kvgen.lowering.segments import SegmentContext
from kvgen.schema.kernel_set import KernelSet

WARPS: Final = 4
# Query and accumulator elements a thread keeps in registers as f32, each; twice this plus addresses stays below 255.
REGISTER_BUDGET: Final = 64
# The same where accesses are wider than rows of q need.
WIDE_BUDGET: Final = 32


@dataclass(frozen=True)
class SimtContext:
    """Everything ops/decode_simt.cu.j2 reads.

    A row of K or V is split over `lanes` lanes, `width` elements each at a time, in `k_chunks` or `v_chunks` steps; a warp
    thus works on `32 / lanes` tokens at once. Rows of q are read `row_width` elements at a time.
    """

    d: Attended
    k: SegmentContext
    v: SegmentContext
    cols: int
    columns: int
    warps: int
    lanes: int
    width: int
    row_width: int
    k_chunks: int
    v_chunks: int
    qk_scale: str
    blocks_per_sm: int


@dataclass(frozen=True)
class Shape:
    """How a block divides columns, tokens and dims among its lanes."""

    cols: int
    tiles: int
    width: int
    lanes: int
    row_width: int
    k_chunks: int
    v_chunks: int
    blocks_per_sm: int = 2
    heads: int = 1

    @property
    def threads(self) -> int:
        """Of a block."""
        return WARPS * 32

    @property
    def align(self) -> int:
        """Elements of the widest access to rows of q and out."""
        return self.row_width

    @property
    def tile(self) -> int:
        """Tokens that the planner counts in."""
        return 64

    @property
    def factored(self) -> bool:
        """Whether the sums are still to be multiplied with Values::kFactor."""
        return False


def _walk(width: int, k: SegmentContext, v: SegmentContext, columns: int) -> tuple[int, int, int]:
    """(width, lanes of a token, blocks that share the columns) where a lane reads `width` elements at once."""
    pieces = max(k.size, v.size) // width
    lanes = min(32, 2 ** (pieces - 1).bit_length())
    chunks = math.ceil(max(k.size, v.size) / (width * lanes))
    cols = max(1, min(8, REGISTER_BUDGET // (width * chunks), columns))
    return width, lanes, math.ceil(columns / cols)


def shape(kernels: KernelSet, rows: int) -> Shape:
    """The block of a set's decode."""
    cache = kernels.kv
    k, v = lower(cache).segments
    columns = rows * kernels.group
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


def simt_context(kernels: KernelSet, d: Attended, scale: float, s: Shape) -> SimtContext:
    """The kernel's context; `d` is what both kernels of decode have."""
    k, v = lower(kernels.kv).segments
    return SimtContext(
        d=d,
        k=k,
        v=v,
        cols=s.cols,
        columns=d.rows * d.group,
        warps=WARPS,
        lanes=s.lanes,
        width=s.width,
        row_width=s.row_width,
        k_chunks=s.k_chunks,
        v_chunks=s.v_chunks,
        qk_scale=float_literal(scale),
        blocks_per_sm=s.blocks_per_sm,
    )
