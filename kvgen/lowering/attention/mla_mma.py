"""mla_decode by mma.sync over tiles of latent rows: rows are copied as they are stored, or rounded to one type on their way.

Both kinds of rows meet in one template: what lies in shared memory is a row of one of two forms, and tiles come by one of two
device policies (device/attention/mla/latent_sources.cuh).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvgen.architectures import Architecture
from kvgen.layout.dtypes import dtype
from kvgen.layout.storage import Segment
from kvgen.lowering.attention.latent_row import WARPS, LatentRow, rounded_row
from kvgen.lowering.attention.mla_lists import ListContext
from kvgen.lowering.attention.mla_problem import MlaProblem
from kvgen.lowering.attention.operand import token_bytes
from kvgen.lowering.attention.problem import AttentionCall, Fit, WhyNot
from kvgen.lowering.attention.ring import SLACK, Stages, aligned
from kvgen.lowering.attention.split_kv import partial_bytes
from kvgen.plan.division import Division
from kvgen.schema.cache import Cache

NAME: Final = "mla_mma"
THREADS: Final = 32 * WARPS
MOST_STAGES: Final = 6
# Rounded rows: one tile is multiplied, the next one is stored to shared memory.
ROUNDED_STAGES: Final = 2
# Dims that a thread rounds of a row, and bytes of their codes and scales that it keeps: RowUnit of row_units.cuh.
UNIT: Final = 16
_UNIT_BYTES: Final = 48


@dataclass(frozen=True)
class SharedBytes:
    """Shared memory of a block, as the template's struct has it: of each stage its rows, with scales of a pool, and where these
    rows lie; for all stages Q's operands, products, weights, a number or two a column, and the largest scales of a tile,
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
    else read from shared memory, with memory of its own if `own_query` (else, at first, in the ring's last stage).
    """

    cols: int
    tokens: int
    stages: Stages
    warps_m: int
    warps_n: int
    warps_k: int
    held: bool
    own_query: bool
    memory: SharedBytes

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        return self.memory.fixed + self.memory.stage * self.stages.most


@dataclass(frozen=True)
class MlaMma:
    """Everything ops/mla_mma.cu.j2 reads.

    `lists` name rows, or there are none, and a request's page table does. `row` says how a latent row lies in shared memory,
    its V as `v_elem`; `shape` how a block divides its work. `q_normalized`: codes are multiplied in f16, and Q
    is brought into its range.
    """

    d: AttentionCall
    lists: tuple[ListContext, ...]
    row: LatentRow
    shape: Shape
    threads: int
    slack: int
    head_dim: int
    qk_scale: str
    v_elem: str
    q_normalized: bool


def check_row(cache: Cache, at: str) -> None:
    """Raise ValueError, which begins with `at`, where rows of this cache cannot be rounded 16 dims at a time."""
    if cache.dtype == "f32":
        raise ValueError(
            f"{at}: got dtype='f32'; rows are multiplied on tensor cores, in 16 bits; use dtype='bf16' or 'f16'"
        )
    if cache.storage.own_table:
        raise ValueError(
            f"{at}: got scales with a page table of their own (own_table); a list finds rows by one index; use own_table=False"
        )
    for segment in cache.storage.roles["k"]:
        part = "the RoPE part" if segment.begin else "a row"
        if segment.begin % UNIT or segment.size % UNIT:
            raise ValueError(
                f"{at}: got {segment.size} dims in {part}, from {segment.begin} on; a thread takes {UNIT} of them; use multiples "
                f"of {UNIT}"
            )
        if segment.quant is not None and segment.quant.norm_correction:
            raise ValueError(
                f"{at}: got norm_correction=True; a thread takes {UNIT} dims, and a norm is corrected by all codes of a row; use "
                "recipe='unit', whose scales are corrected as they are stored"
            )
        if _unit_bytes(segment) > _UNIT_BYTES:
            raise ValueError(
                f"{at}: got {_unit_bytes(segment)} bytes of codes and scales for {UNIT} dims of {part}; a thread keeps "
                f"{_UNIT_BYTES}; use blocks of more dims, or a narrower scale_dtype"
            )
    if cache.latent_part % UNIT:
        raise ValueError(
            f"{at}: got latent_dim={cache.latent_part}; V is multiplied {UNIT} dims at a time; use a multiple of {UNIT}"
        )


def _unit_bytes(segment: Segment) -> int:
    """Bytes that a thread keeps of a row, scales in whole words."""
    codes, scales = UNIT * segment.region.dtype.bits // 8, segment.scales
    if scales is None:
        return codes
    count = UNIT // math.gcd(UNIT, scales.block[2]) * (1 + scales.zero)
    return codes + -(-count * scales.dtype.bytes // 8) * 8


def fit(problem: MlaProblem, arch: Architecture) -> Fit | WhyNot:
    """Rows of one cache as they are stored; where that is impossible, rounded rows of any caches. Tokens on M."""
    cache, row = problem.cache, problem.row
    why_rounded = ""  # empty where rows are copied
    if len(problem.caches) > 1:
        why_rounded = "rows of several caches"
    elif isinstance(row, str):
        why_rounded = row
    elif (found := shape(row, cache, problem.columns, arch)) is not None:
        nbytes = row.latent_bytes + row.rope_bytes + 4 * row.groups
        return _fit(problem, row, found, nbytes, "rows as they are stored, tokens on M")
    else:
        why_rounded = f"no room for two tiles of rows of {row.pitch} bytes"
    row = rounded_row(cache)
    found = shape(row, cache, problem.columns, arch)
    if found is None:
        return WhyNot(
            f"no room for two tiles of rows of {cache.head_dim} dims in {arch.block_shared >> 10} KB of shared memory; use "
            "smaller rows"
        )
    stored = sum(token_bytes(segment) for segment in cache.storage.roles["k"])
    caches = "one cache" if len(problem.caches) == 1 else f"{len(problem.caches)} caches"
    how = f"rows of {caches}, in {cache.dtype} on their way to shared memory ({why_rounded}); tokens on M"
    return _fit(problem, row, found, stored, how)


def _fit(problem: MlaProblem, row: LatentRow, found: Shape, nbytes: float, how: str) -> Fit:
    """A block of this shape over such rows, which have `nbytes` in the pool."""
    tile_bytes = found.tokens * nbytes
    return Fit(
        how=how,
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
            tile_bytes=tile_bytes,
            blocks=1,
            trip_tokens=found.tokens,
            trip_warps=WARPS,
            trip_bytes=tile_bytes,
        ),
        threads=THREADS,
        shared=found.shared,
        tile=found.tokens,
        partial_bytes=partial_bytes(found.cols, problem.cache.latent_part),
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
    codes = _q_normalized(row, cache)
    tokens = 64 if codes and cols <= 16 else 32
    warps_m, warps_n, held = tokens // 16, max(1, cols // 16), cols <= 32
    warps_k = WARPS // (warps_m * warps_n)
    query, tile = 2 * cols * cache.head_dim, tokens * (row.pitch + 4 * row.groups * row.pool_scales)
    own_query = not held or query > tile
    # A copied row has an address for each of its runs and for its scales; a rounded one a number.
    place = 4 if row.rounded else 8 * (len(row.runs) + row.pool_scales)
    size = SharedBytes(
        rows=tile,
        addresses=place * tokens,
        query=query * own_query,
        scores=4 * warps_k * cols * (tokens + 4),
        weights=2 * cols * tokens,
        columns=4 * cols * (1 + codes),
        scales=aligned(4 * warps_m * row.groups),
    )
    most = ROUNDED_STAGES if row.rounded else min(MOST_STAGES, THREADS // tokens)
    stages = min(most, (arch.block_shared - size.fixed) // size.stage)
    # The result takes the place of rows, Q and scores.
    out = 4 * cols * (cache.latent_part + 6)
    if stages < 2 or stages * tile + size.query + size.scores < out:
        return None
    return Shape(cols, tokens, Stages.on(arch, stages), warps_m, warps_n, warps_k, held, own_query, size)


def _q_normalized(row: LatentRow, cache: Cache) -> bool:
    """Products are of codes."""
    return not row.rounded and cache.quants["k"] is not None


def _context(problem: MlaProblem, row: LatentRow, s: Shape, d: AttentionCall) -> MlaMma:
    """The template's context of a whole call."""
    cache = problem.cache
    kind = dtype(cache.dtype) if row.rounded else cache.storage.roles["k"][0].region.dtype
    return MlaMma(
        d=d,
        lists=problem.lists,
        row=row,
        shape=s,
        threads=THREADS,
        slack=SLACK,
        head_dim=cache.head_dim,
        qk_scale=problem.qk_scale,
        v_elem=kind.c,
        q_normalized=_q_normalized(row, cache),
    )
