"""mla_decode by mma.sync for few heads, over lists of e4m3 rows with e8m0 scales: pairs of warps have tokens of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from kvgen.architectures import Architecture
from kvgen.lowering.attention.few_heads_row import DIMS, CodedRow, columns_of, row_of
from kvgen.lowering.attention.mla_lists import ListContext
from kvgen.lowering.attention.mla_problem import MlaProblem
from kvgen.lowering.attention.problem import AttentionCall, Fit, WhyNot
from kvgen.lowering.attention.ring import SLACK, Stages
from kvgen.lowering.attention.split_kv import partial_bytes
from kvgen.plan.division import Division

NAME: Final = "mla_mma_few_heads"
PAIRS: Final = 4
THREADS: Final = 2 * 32 * PAIRS
TOKENS: Final = 16
MOST_STAGES: Final = 4
LEAST_STAGES: Final = 3
# Steps of 16 dims whose Q a thread keeps, of a half's 16: 4 registers each with 16 columns.
HELD: Final = {8: 16, 16: 8}


@dataclass(frozen=True)
class Shape:
    """A block's work: `cols` columns, `pairs` pairs of warps, tiles of `tokens` rows, `pitch` bytes from row to row in shared
    memory and `scale_pitch` from a token's scales to the next one's. `held` of a warp's steps of Q are in registers.

    Bytes of shared memory: `ring_bytes` for each of `stages` and `union_bytes` of Q and scores, which become `merged_bytes` of
    results at the end, and `fixed_bytes`.
    """

    cols: int
    pairs: int
    tokens: int
    latent: int
    group_dims: int
    row_bytes: int
    scales_in_footer: bool
    scale_bytes: int
    pitch: int
    scale_pitch: int
    held: int
    stages: Stages
    ring_bytes: int
    union_bytes: int
    merged_bytes: int
    fixed_bytes: int

    def shared(self, stages: int) -> int:
        """Bytes of shared memory of a block with so many tiles a pair; results take the place of rows, Q and scores."""
        return max(stages * self.ring_bytes + self.union_bytes, self.merged_bytes) + self.fixed_bytes


@dataclass(frozen=True)
class MlaMmaFewHeads:
    """Everything ops/mla_mma_few_heads.cu.j2 reads; `qk_scale` turns products into scores in base 2."""

    d: AttentionCall
    lists: tuple[ListContext, ...]
    shape: Shape
    threads: int
    slack: int
    head_dim: int
    qk_scale: str


def fit(problem: MlaProblem, arch: Architecture) -> Fit | WhyNot:
    """Codes as they are stored, half of a row's dims a warp; tokens on M."""
    row = row_of(problem)
    if isinstance(row, str):
        return WhyNot(row)
    found = _shape(row, columns_of(problem))
    counts = [n for n in range(LEAST_STAGES, MOST_STAGES + 1) if found.shared(n) <= arch.block_shared]
    if not counts:
        return WhyNot(f"{LEAST_STAGES} tiles of every pair do not fit shared memory")
    found = replace(found, stages=Stages.on(arch, counts[-1]))
    nbytes = row.row_bytes + row.scale_bytes * row.scales_in_footer
    return Fit(
        how=f"codes as they are stored, half of {DIMS} dims a warp; tokens on M",
        context=partial(_context, problem, found),
        division=Division(
            columns=found.cols,
            tiles=1,
            heads=1,
            tokens=TOKENS,
            teams=PAIRS,
            team_warps=2,
            stages=counts[-1],
            held=2,
            tile_bytes=TOKENS * nbytes,
            blocks=1,
            trip_tokens=PAIRS * TOKENS,
            trip_warps=2 * PAIRS,
            trip_bytes=PAIRS * TOKENS * nbytes,
        ),
        threads=THREADS,
        shared=found.shared(counts[-1]),
        tile=TOKENS,
        partial_bytes=partial_bytes(found.cols, DIMS),
        q_align=8,
        out_align=4,
    )


def _shape(row: CodedRow, cols: int) -> Shape:
    """A block of so many columns, without its stages."""
    pitch = (row.row_bytes // 16 | 1) * 16
    apart = row.scale_bytes * row.scales_in_footer
    return Shape(
        cols=cols,
        pairs=PAIRS,
        tokens=TOKENS,
        latent=row.latent,
        group_dims=row.group_dims,
        row_bytes=row.row_bytes,
        scales_in_footer=row.scales_in_footer,
        scale_bytes=row.scale_bytes,
        pitch=pitch,
        scale_pitch=row.scale_bytes if row.scales_in_footer else pitch,
        held=HELD[cols],
        stages=Stages(()),
        ring_bytes=PAIRS * TOKENS * (pitch + apart),
        union_bytes=2 * cols * DIMS + PAIRS * 2 * 2 * 4 * TOKENS * cols,
        merged_bytes=PAIRS * 4 * cols * (DIMS + 6),
        fixed_bytes=4 * cols,
    )


def _context(problem: MlaProblem, s: Shape, d: AttentionCall) -> MlaMmaFewHeads:
    """The template's context of a whole call."""
    return MlaMmaFewHeads(
        d=d,
        lists=problem.lists,
        shape=s,
        threads=THREADS,
        slack=SLACK,
        head_dim=problem.cache.head_dim,
        qk_scale=problem.qk_scale,
    )
