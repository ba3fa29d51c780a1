"""mla_decode on sm_90a over rows of 16 bits as they are stored, in one pool or two, for any rows a request: warpgroups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

from kvgen.architectures import Architecture
from kvgen.lowering.attention.latent_row import LatentRow
from kvgen.lowering.attention.mla_problem import MlaProblem
from kvgen.lowering.attention.operand import token_bytes
from kvgen.lowering.attention.problem import AttentionCall, Fit, WhyNot
from kvgen.lowering.attention.ring import SLACK
from kvgen.lowering.attention.split_kv import partial_bytes
from kvgen.plan.division import Division

NAME: Final = "mla_sm90_rows"
THREADS: Final = 256
# Columns of a block: what one product has. Tokens of a tile: four of them beside Q fill a multiprocessor's shared memory.
COLS: Final = 64
TOKENS: Final = 32
STAGES: Final = 4
# Tokens of a step of both warpgroups, the unit of plans.
STEP: Final = 2 * TOKENS
# Both halves of the sums are 64 x 256, 128 registers a thread: the only size that device/mma/wgmma.cuh has.
LATENT: Final = 512
# Steps of 16 dims whose Q a thread keeps, 4 registers each, beside 128 of sums; a plan's chunks take the place of one.
HELD: Final = 16


@dataclass(frozen=True)
class MlaSm90Rows:
    """Everything ops/mla_sm90_rows.cu.j2 reads.

    `rope_at` bytes into the run of `rope_struct` the dims that are K alone begin. Q of the first `held` steps of 16 dims is in
    registers. `shared` is what all stages have together of shared memory. `qk_scale` turns products into scores in base 2; a
    maximum rises when a score passes it by 2^`slack`.
    """

    d: AttentionCall
    threads: int
    cols: int
    tokens: int
    stages: int
    held: int
    slack: int
    shared: tuple[int, ...]
    head_dim: int
    rope_struct: str
    rope_at: int
    qk_scale: str


def fit(problem: MlaProblem, arch: Architecture) -> Fit | WhyNot:
    """Rows of 16 bits as they are, products of warpgroups; columns on M."""
    if not arch.wgmma:
        return WhyNot("no wgmma")
    cache, row = problem.cache, problem.row
    if problem.lists:
        return WhyNot("lists name rows one by one")
    if problem.columns < COLS:
        return WhyNot(f"a product has {COLS} columns")
    if isinstance(row, str):
        return WhyNot(row)
    if cache.quants["k"] is not None or cache.dtype not in ("bf16", "f16"):
        return WhyNot("rows are not of 16-bit elements")
    if cache.latent_part != LATENT or cache.head_dim != LATENT + cache.rope_part or cache.rope_part % 64:
        return WhyNot(f"rows are not {LATENT} dims and a multiple of 64")
    if shared_bytes(cache.head_dim) > arch.block_shared:
        return WhyNot("its tiles do not fit shared memory")
    nbytes = sum(token_bytes(segment) for segment in cache.storage.roles["k"])
    return Fit(
        how="rows as they are stored, products of warpgroups; columns on M",
        context=partial(_context, problem, row),
        division=Division(
            columns=COLS,
            tiles=-(-problem.columns // COLS),
            heads=1,
            tokens=TOKENS,
            teams=1,
            team_warps=THREADS // 32,
            stages=STAGES,
            held=2,
            tile_bytes=TOKENS * nbytes,
            blocks=1,
            trip_tokens=TOKENS,
            trip_warps=THREADS // 32,
            trip_bytes=TOKENS * nbytes,
            warpgroups=2,
        ),
        threads=THREADS,
        shared=shared_bytes(cache.head_dim),
        tile=STEP,
        partial_bytes=partial_bytes(COLS, LATENT),
        q_align=8,
        out_align=4,
    )


def shared_bytes(head_dim: int) -> int:
    """Shared of the template: ring, and what its stages share."""
    return 2 * head_dim * STAGES * TOKENS + sum(_fixed_bytes(head_dim))


def _fixed_bytes(head_dim: int) -> tuple[int, ...]:
    """Q, weights, maxima and barriers."""
    return 2 * head_dim * COLS, 128 * COLS, 8 * COLS, 8 * (STAGES + 2)


def _context(problem: MlaProblem, row: LatentRow, d: AttentionCall) -> MlaSm90Rows:
    """The template's context of a whole call."""
    rope_struct, rope_at = _rope(row)
    head_dim = problem.cache.head_dim
    return MlaSm90Rows(
        d=d,
        threads=THREADS,
        cols=COLS,
        tokens=TOKENS,
        stages=STAGES,
        held=HELD - d.planned,
        slack=SLACK,
        shared=_fixed_bytes(head_dim),
        head_dim=head_dim,
        rope_struct=rope_struct,
        rope_at=rope_at,
        qk_scale=problem.qk_scale,
    )


def _rope(row: LatentRow) -> tuple[str, int]:
    """Where K's own dims are: which run, and how many bytes into it."""
    if not row.rope_bytes:
        return row.runs[0].struct, 2 * LATENT
    if len(row.runs) == 1:
        return row.runs[0].struct, row.rope_at
    return row.runs[1].struct, 0
