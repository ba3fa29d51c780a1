"""A trip of an attention kernel's main loop: its tokens, the warps that have them, its bytes."""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.lowering.attention.operand import token_bytes as segment_bytes
from kvgen.plan.kernel import KernelPlan
from kvgen.schema.kernel_set import KernelSet


@dataclass(frozen=True)
class Tile:
    """Tokens of one kv head or several that `warps` share, with values and scales of `nbytes`, for `columns` tiles of columns."""

    tokens: int
    warps: int
    columns: int
    nbytes: float


def tile_of(plan: KernelPlan) -> Tile | None:
    """The trip of a kernel that attends; None for other kernels. On CUDA cores it has the tokens that a warp reads at once."""
    d = plan.division
    return None if d is None else Tile(d.trip_tokens, d.trip_warps, d.tiles, d.trip_bytes)


def causal_share(plan: KernelPlan, group: int, rows: int) -> float | None:
    """The part that the mask allows of the products that extend's blocks make of a causal prompt of `rows`: tiles at the
    diagonal are made whole. Products that single warps of a block leave out count as made. None for other kernels."""
    d = plan.division
    if d is None or not d.query or d.lanes:
        return None
    cols, tokens, count = d.columns, d.tokens, rows * group
    seen = (min(first + cols, count) - 1 for first in range(0, count, cols))  # a tile's last column
    made = sum(cols * tokens * (last // group // tokens + 1) for last in seen)
    return group * rows * (rows + 1) / 2 / made


def token_bytes(kernels: KernelSet) -> float:
    """Bytes of K and V of a token of one kv head, with scales."""
    return sum(segment_bytes(segment) for parts in kernels.kv.storage.roles.values() for segment in parts)
