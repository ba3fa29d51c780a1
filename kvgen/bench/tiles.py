"""What a tile of an attention kernel brings: how many tokens, for how many warps, how many bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvgen.layout.storage import Segment
from kvgen.lowering.attention.extend import ExtendContext
from kvgen.lowering.attention.extend_simt import ExtendSimtContext
from kvgen.lowering.attention.extend_wgmma import ExtendWgmmaContext
from kvgen.lowering.attention.mla_pairs import MlaPairsContext
from kvgen.lowering.attention.mla_records import MlaRecordsContext
from kvgen.lowering.attention.mla_warpgroups import WARPGROUPS, MlaWarpgroupsContext
from kvgen.lowering.attention.mla_widened import MlaWidenedContext
from kvgen.lowering.attention.mma import TensorContext
from kvgen.lowering.attention.simt import SimtContext
from kvgen.lowering.attention.wgmma import MlaWgmmaContext
from kvgen.ops.mla_decode import MlaDecodeContext
from kvgen.plan.kernel import KernelPlan
from kvgen.schema.kernel_set import KernelSet


@dataclass(frozen=True)
class Tile:
    """Tokens of one kv head or several that `warps` share, with values and scales of `nbytes`, for `columns` tiles of columns."""

    tokens: int
    warps: int
    columns: int
    nbytes: float


def tile_of(kernels: KernelSet, plan: KernelPlan) -> Tile | None:
    """Of a kernel that attends; None for other kernels. On CUDA cores it is the tokens that a warp reads at once."""
    context = plan.context
    if isinstance(context, TensorContext | SimtContext):
        roles = kernels.kv.storage.roles.values()
        if isinstance(context, SimtContext):
            heads, tokens, warps = 1, 32 // context.lanes, 1
        else:
            heads, tokens, warps = context.heads, context.tokens, context.team_warps
        nbytes = heads * tokens * sum(_bytes(segment) for parts in roles for segment in parts)
        return Tile(tokens, warps, context.d.tiles, nbytes)
    if isinstance(context, ExtendContext | ExtendSimtContext):
        return Tile(context.tokens, context.warps, 1, context.tokens * token_bytes(kernels))
    if isinstance(context, MlaDecodeContext):
        row, tokens = context.row, context.shape.tokens
        nbytes = tokens * (row.latent_bytes + row.rope_bytes + 4 * row.groups)
        return Tile(tokens, plan.threads // 32, context.d.tiles, nbytes)
    if isinstance(context, MlaRecordsContext):
        nbytes = context.shape.tokens * sum(map(_bytes, _latent(kernels)))
        return Tile(context.shape.tokens, plan.threads // 32, context.d.tiles, nbytes)
    if isinstance(context, MlaPairsContext):
        shape = context.shape
        tokens = shape.pairs * shape.tokens
        return Tile(tokens, plan.threads // 32, 1, tokens * (shape.row_bytes + shape.scale_bytes * shape.scales_apart))
    if isinstance(context, MlaWidenedContext):
        # A trip is two tiles.
        return Tile(
            2 * context.tokens,
            plan.threads // 32,
            context.d.tiles,
            2 * context.tokens * sum(map(_bytes, _latent(kernels))),
        )
    if isinstance(context, MlaWarpgroupsContext):
        few = context.shape
        tokens = WARPGROUPS * few.tokens
        return Tile(tokens, plan.threads // 32, 1, tokens * (few.row_bytes + few.scale_bytes))
    if isinstance(context, MlaWgmmaContext):
        return Tile(
            context.tokens, plan.threads // 32, context.d.tiles, context.tokens * sum(map(_bytes, _latent(kernels)))
        )
    return None


def causal_share(plan: KernelPlan, group: int, rows: int) -> float | None:
    """Of the products that extend's blocks make of a causal prompt of `rows`, those that the mask allows: tiles at the diagonal
    are made whole. What single warps of a block leave out counts as made. None for other kernels."""
    context = plan.context
    if not isinstance(context, ExtendContext | ExtendWgmmaContext):
        return None
    cols, tokens, count = context.cols, context.tokens, rows * group
    seen = (min(first + cols, count) - 1 for first in range(0, count, cols))  # a tile's last column
    made = sum(cols * tokens * (last // group // tokens + 1) for last in seen)
    return group * rows * (rows + 1) / 2 / made


def token_bytes(kernels: KernelSet) -> float:
    """Of K and V of a token of one kv head, with scales."""
    return sum(_bytes(segment) for parts in kernels.kv.storage.roles.values() for segment in parts)


def _latent(kernels: KernelSet) -> Iterator[Segment]:
    """K's segments, which V's are part of."""
    yield from next(iter(kernels.kv.storage.roles.values()))


def _bytes(segment: Segment) -> float:
    """Of a token of one kv head, with what its scales take in the pool."""
    found, scales = segment.size * segment.region.dtype.bits / 8, segment.scales
    if scales is None or scales.region is None:
        return found
    tokens, heads, _ = scales.block
    return found + scales.groups * (1 + scales.zero) * scales.dtype.bits / 8 / tokens / heads
