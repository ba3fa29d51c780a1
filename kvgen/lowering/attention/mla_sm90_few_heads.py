"""mla_decode on sm_90a for few heads, over lists of e4m3 rows with e8m0 scales: each warpgroup has tokens of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

from kvgen.architectures import Architecture
from kvgen.lowering.attention.few_heads_row import DIMS, CodedRow, columns_of, row_of
from kvgen.lowering.attention.mla_lists import ListContext
from kvgen.lowering.attention.mla_problem import MlaProblem
from kvgen.lowering.attention.problem import AttentionCall, Fit, WhyNot
from kvgen.lowering.attention.ring import SLACK, aligned
from kvgen.lowering.attention.split_kv import partial_bytes
from kvgen.plan.division import Division

NAME: Final = "mla_sm90_few_heads"
# Tokens of a tile: rows of a product. Dims of a product: what shares a scale.
TOKENS: Final = 64
GROUP: Final = 64
STAGES: Final = 2
WARPGROUPS: Final = 2
THREADS: Final = 128 * WARPGROUPS
_ALIGN: Final = 1024


@dataclass(frozen=True)
class Shape:
    """A block's work: `cols` columns, two warpgroups that have `stages` tiles of `tokens` rows each.

    A row has `latent` codes; `row_bytes` are copied of it, and `scale_bytes` of its scales. In shared memory, of which a block
    has `shared` bytes, rows begin `pitch` bytes apart.
    """

    cols: int
    tokens: int
    stages: int
    latent: int
    row_bytes: int
    scale_bytes: int
    pitch: int
    shared: int


@dataclass(frozen=True)
class MlaSm90FewHeads:
    """Everything ops/mla_sm90_few_heads.cu.j2 reads; `qk_scale` turns products into scores in base 2."""

    d: AttentionCall
    lists: tuple[ListContext, ...]
    shape: Shape
    threads: int
    slack: int
    head_dim: int
    qk_scale: str


def fit(problem: MlaProblem, arch: Architecture) -> Fit | WhyNot:
    """Codes as they are stored, products of warpgroups; tokens on M."""
    if not arch.wgmma:
        return WhyNot("no wgmma")
    row = row_of(problem)
    if isinstance(row, str):
        return WhyNot(row)
    if row.group_dims != GROUP:
        return WhyNot(f"a product has {GROUP} dims, which share no scale")
    found = _shape(row, columns_of(problem))
    if found.shared > arch.block_shared:
        return WhyNot(f"{STAGES} tiles of every warpgroup do not fit shared memory")
    nbytes = row.row_bytes + row.scale_bytes
    return Fit(
        how="codes as they are stored, products of warpgroups; tokens on M",
        context=partial(_context, problem, found),
        division=Division(
            columns=found.cols,
            tiles=1,
            heads=1,
            tokens=TOKENS,
            teams=WARPGROUPS,
            team_warps=4,
            stages=STAGES,
            held=1,
            tile_bytes=TOKENS * nbytes,
            blocks=1,
            trip_tokens=WARPGROUPS * TOKENS,
            trip_warps=4 * WARPGROUPS,
            trip_bytes=WARPGROUPS * TOKENS * nbytes,
        ),
        threads=THREADS,
        shared=found.shared,
        tile=TOKENS,
        partial_bytes=partial_bytes(found.cols, DIMS),
        q_align=8,
        out_align=4,
    )


def _shape(row: CodedRow, cols: int) -> Shape:
    """A block of so many columns."""
    pitch = (row.row_bytes // 16 | 1) * 16
    panels = (1 + WARPGROUPS) * 2 * cols * DIMS
    tiles = panels + WARPGROUPS * STAGES * TOKENS * (pitch + row.scale_bytes)
    merged = WARPGROUPS * 4 * cols * (DIMS + 6)
    exchanged = WARPGROUPS * 4 * (4 * cols + 4) + 4 * cols
    shared = aligned(aligned(max(tiles, merged), _ALIGN) + exchanged, _ALIGN)
    return Shape(cols, TOKENS, STAGES, row.latent, row.row_bytes, row.scale_bytes, pitch, shared)


def _context(problem: MlaProblem, s: Shape, d: AttentionCall) -> MlaSm90FewHeads:
    """The template's context of a whole call."""
    return MlaSm90FewHeads(
        d=d,
        lists=problem.lists,
        shape=s,
        threads=THREADS,
        slack=SLACK,
        head_dim=problem.cache.head_dim,
        qk_scale=problem.qk_scale,
    )
