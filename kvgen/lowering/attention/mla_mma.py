"""mla_decode by mma.sync over rows as they are stored: tiles and rings of a block, and what its template reads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

from kvgen.architectures import Architecture
from kvgen.lowering.attention.latent_row import WARPS, LatentRow
from kvgen.lowering.attention.mla_lists import ListContext
from kvgen.lowering.attention.mla_problem import MlaProblem
from kvgen.lowering.attention.problem import AttentionCall, Fit, WhyNot
from kvgen.lowering.attention.ring import SLACK, Stages, aligned
from kvgen.lowering.attention.split_kv import partial_bytes
from kvgen.plan.division import Division
from kvgen.schema.cache import Cache

NAME: Final = "mla_mma"
THREADS: Final = 32 * WARPS
MOST_STAGES: Final = 6


@dataclass(frozen=True)
class SharedBytes:
    """Shared memory of a block, as the template's struct has it: of each stage its rows, with scales of a pool, and their
    addresses; for all stages Q's operands, products, weights, a number or two a column, and the largest scales of a tile,
    which end at 16 bytes.
    """

    rows: int
    addresses: int
    query: int
    scores: int
    weights: int
    columns: int
    scales: int

    @property
    def stage(self) -> int:
        """Bytes that one more stage takes."""
        return self.rows + self.addresses

    @property
    def shared(self) -> tuple[int, ...]:
        """Bytes of each part that all stages have together, without parts that this kernel does not have."""
        return tuple(n for n in (self.query, self.scores, self.weights, self.columns, self.scales) if n)

    @property
    def fixed(self) -> int:
        """The sum of that."""
        return sum(self.shared)


@dataclass(frozen=True)
class Shape:
    """A block's work: `cols` columns, tiles of `tokens` tokens, `stages` of them in shared memory.

    Warps of K Q^T: `warps_m` along tokens, `warps_n` along columns, `warps_k` along dims. Q is held in registers if `held`,
    else read from shared memory, where it stands `apart` from the ring (else, at first, in the ring's last stage).
    """

    cols: int
    tokens: int
    stages: Stages
    warps_m: int
    warps_n: int
    warps_k: int
    held: bool
    apart: bool
    memory: SharedBytes

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        return self.memory.fixed + self.memory.stage * self.stages.most


@dataclass(frozen=True)
class MlaMma:
    """Everything ops/mla_mma.cu.j2 reads.

    `lists` name rows, or there are none, and a request's page table does. `row` says how a latent row lies in shared memory,
    `shape` how a block divides its work. `ranged`: codes are multiplied in f16, and Q is brought into its range.
    """

    d: AttentionCall
    lists: tuple[ListContext, ...]
    row: LatentRow
    shape: Shape
    threads: int
    slack: int
    head_dim: int
    qk_scale: str
    ranged: bool


def fit(problem: MlaProblem, arch: Architecture) -> Fit | WhyNot:
    """Rows of one cache as they are stored, tokens on M."""
    cache, row = problem.cache, problem.row
    if len(problem.caches) > 1:
        return WhyNot("rows of several caches")
    if isinstance(row, str):
        return WhyNot(row)
    found = shape(row, cache, problem.columns, arch)
    if found is None:
        memory = arch.block_shared >> 10
        return WhyNot(f"no room for two tiles of rows of {row.pitch} bytes in {memory} KB of shared memory")
    nbytes = row.latent_bytes + row.rope_bytes + 4 * row.groups
    return Fit(
        how="rows as they are stored, tokens on M",
        context=partial(_context, problem, row, found),
        division=Division(
            columns=found.cols,
            tiles=-(-problem.columns // found.cols),
            heads=1,
            tokens=found.tokens,
            teams=1,
            team_warps=WARPS,
            stages=found.stages.most,
            held=1,
            tile_bytes=found.tokens * nbytes,
            blocks=1,
            trip_tokens=found.tokens,
            trip_warps=WARPS,
            trip_bytes=found.tokens * nbytes,
        ),
        threads=THREADS,
        shared=found.shared,
        tile=found.tokens,
        partial_bytes=partial_bytes(found.cols, cache.latent_part),
        q_align=8,
        out_align=4,
    )


def shape(row: LatentRow, cache: Cache, columns: int, arch: Architecture) -> Shape | None:
    """The largest tile of columns that fits, with as many stages as fit; one block fills a multiprocessor's shared memory. None
    where no tile fits.

    16-bit rows come in tiles of 32 tokens, so that several are in flight; codes have half the bytes, and twice the tokens.
    """
    wanted = 64 if columns > 32 else 32 if columns > 16 else 16 if columns > 8 else 8
    while wanted >= 8:
        found = _shape(row, cache, wanted, arch)
        if found is not None:
            return found
        wanted //= 2
    return None


def _shape(row: LatentRow, cache: Cache, cols: int, arch: Architecture) -> Shape | None:
    """A block of so many columns; None where there is no room for two stages."""
    codes = cache.quants["k"] is not None
    tokens = 64 if codes and cols <= 16 else 32
    warps_m, warps_n, held = tokens // 16, max(1, cols // 16), cols <= 32
    warps_k = WARPS // (warps_m * warps_n)
    query, tile = 2 * cols * cache.head_dim, tokens * (row.pitch + 4 * row.groups * row.pool_scales)
    apart = not held or query > tile
    size = SharedBytes(
        rows=tile,
        addresses=8 * tokens * (len(row.runs) + row.pool_scales),
        query=query * apart,
        scores=4 * warps_k * cols * (tokens + 4),
        weights=2 * cols * tokens,
        columns=4 * cols * (1 + codes),
        scales=aligned(4 * warps_m * row.groups),
    )
    stages = min(MOST_STAGES, THREADS // tokens, (arch.block_shared - size.fixed) // size.stage)
    # The result takes the place of rows, Q and scores.
    out = 4 * cols * (cache.latent_part + 6)
    if stages < 2 or stages * tile + size.query + size.scores < out:
        return None
    return Shape(cols, tokens, Stages.on(arch, stages), warps_m, warps_n, warps_k, held, apart, size)


def _context(problem: MlaProblem, row: LatentRow, s: Shape, d: AttentionCall) -> MlaMma:
    """The template's context of a whole call."""
    cache = problem.cache
    return MlaMma(
        d=d,
        lists=problem.lists,
        row=row,
        shape=s,
        threads=THREADS,
        slack=SLACK,
        head_dim=cache.head_dim,
        qk_scale=problem.qk_scale,
        ranged=cache.quants["k"] is not None,
    )
