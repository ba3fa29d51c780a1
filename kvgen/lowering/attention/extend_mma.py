"""extend on tensor cores by mma.sync: blocks and rings, and what its template reads."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from kvgen.architectures import Architecture
from kvgen.expr.score_c import float_literal
from kvgen.lowering.attention.extend_problem import ExtendProblem
from kvgen.lowering.attention.operand import Operand, operands, run_of, token_bytes, why_no_operands
from kvgen.lowering.attention.problem import AttentionCall, Fit, WhyNot
from kvgen.lowering.attention.ring import SLACK, Stages, aligned, shared_for
from kvgen.lowering.lowered import lower
from kvgen.lowering.segments import SegmentContext
from kvgen.plan.division import Division
from kvgen.schema.cache import Cache

NAME: Final = "extend_mma"
# Warps of a block, tiles of 16 columns of each, and tokens of a tile, the best first: what a warp reads of K and V serves 32
# columns, or the tensor cores wait for shared memory.
_BLOCKS: Final = ((4, 2, 64), (4, 2, 32), (8, 1, 64), (8, 1, 32), (4, 1, 32), (4, 1, 16))
# Registers beside sums, scores and weights of a tile: addresses, page ids, operands, what columns see; more where sums are
# added up at fixed cuts. Then what a kernel may seem to need, and what it may need with Q in registers: the compiler takes
# some more to overlap trips.
_OTHER_REGISTERS: Final = 54
_CUT_REGISTERS: Final = 26
_MOST_REGISTERS: Final = 240
_HELD_REGISTERS: Final = 224
_MOST_STAGES: Final = 4
# Columns of q that a warp loads at once.
_AT_ONCE: Final = 4


@dataclass(frozen=True)
class Shape:
    """How a block divides columns among its warps; `query_held`: operands of Q stay in registers."""

    warps: int
    m_tiles: int
    tokens: int
    stages: Stages
    blocks_per_sm: int
    query_held: bool

    @property
    def cols(self) -> int:
        """Columns of a block."""
        return 16 * self.m_tiles * self.warps

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps


@dataclass(frozen=True)
class ExtendMma:
    """Everything ops/extend_mma.cu.j2 reads. `flight_bytes` are those of a tile."""

    d: AttentionCall
    k: SegmentContext
    v: SegmentContext
    key: Operand
    value: Operand
    shape: Shape
    flight_bytes: int
    slack: int
    at_once: int
    chunk_tokens: int
    run: int
    scales: bool
    scales_as_f16: bool
    padded: bool
    q_normalized: bool
    qk_scale: str
    usual_scale: bool


def fit(problem: ExtendProblem, arch: Architecture) -> Fit | WhyNot:
    """K and V as 16-bit operands, columns on M."""
    cache = problem.cache
    if why := why_no_operands(cache):
        return WhyNot(why)
    found = shape(cache, arch, fixed=bool(problem.chunk))
    if found is None:
        return WhyNot(f"rows of {cache.head_dim} and {cache.v_dim} dims do not fit registers and shared memory")
    key, value = operands(cache)
    return Fit(
        how="16-bit operands, columns on M",
        context=partial(_context, problem, found),
        division=Division(
            columns=found.cols,
            tiles=1,
            heads=1,
            tokens=found.tokens,
            teams=1,
            team_warps=found.warps,
            stages=found.stages.most,
            held=1,
            tile_bytes=found.tokens * (key.bytes + value.bytes),
            blocks=found.blocks_per_sm,
            trip_tokens=found.tokens,
            trip_warps=found.warps,
            trip_bytes=found.tokens * sum(token_bytes(x.segment) for x in (key, value)),
            query="registers" if found.query_held else "shared memory",
        ),
        threads=found.threads,
        shared=_shared(cache, found),
        tile=found.tokens,
        partial_bytes=_partial_bytes(value, found),
        q_align=4,
        out_align=4,
        vec=math.gcd(4, cache.v_dim),
        factored=not _plain(cache),
    )


def _plain(cache: Cache) -> bool:
    return all(operand.segment.quant is None for operand in operands(cache))


def _bytes(cache: Cache, s: Shape) -> tuple[int, int, int, int]:
    """Bytes of shared memory: a stage of the ring, results, Q, and the rest."""
    k, v = operands(cache)
    stage = s.tokens * (k.pitch + v.pitch) + sum(x.stage_bytes(s.tokens) for x in (k, v))
    held = sum(x.expanded_bytes(s.tokens) for x in (k, v)) + 4 * s.cols * (not _plain(cache))
    return stage, 4 * s.cols * (v.segment.size + 4 + 2), k.steps * s.cols // 8 * 256, held


def _shared(cache: Cache, s: Shape) -> int:
    """Bytes of shared memory: struct Shared of the kernel."""
    stage, merged, query, held = _bytes(cache, s)
    ring = s.stages.most * stage
    read = max(ring, query) if s.query_held else ring + query
    return aligned(max(read, merged) + 48 + held)


def shape(cache: Cache, arch: Architecture, *, fixed: bool = False) -> Shape | None:
    """The block of an extend: the first one whose registers and rings of two tiles fit; None where none does. `fixed`: sums
    begin anew at fixed cuts."""
    k, v = operands(cache)
    dims = -(-v.segment.size // 16) * 16
    memory = shared_for(arch, 1)
    for warps, m_tiles, tokens in _BLOCKS:
        working = m_tiles * (dims // 2 + 3 * tokens // 4) + _OTHER_REGISTERS + fixed * _CUT_REGISTERS
        in_registers = working + 4 * m_tiles * k.steps <= _HELD_REGISTERS
        found = Shape(warps, m_tiles, tokens, Stages(()), 1, in_registers)
        stage, merged, query, held = _bytes(cache, found)
        least = (max(2 * stage, merged, query) if in_registers else max(2 * stage + query, merged)) + held
        quant = k.segment.quant
        if quant is not None and quant.residual and quant.residual % tokens:
            continue  # a tile's tokens share K's scales
        if tokens > 32 and not run_of(cache, tokens):  # a lane looks up one token's page
            continue
        if working > _MOST_REGISTERS or least > memory:
            continue
        blocks = 2 if warps == 4 and 2 * least <= memory else 1
        room = memory // blocks - held - query * (not in_registers)
        stages = max(2, min(_MOST_STAGES, room // stage))
        return replace(found, stages=Stages.on(arch, stages), blocks_per_sm=blocks)
    return None


def _partial_bytes(v: Operand, s: Shape) -> int:
    """Bytes of a partial result of a block: RowPartial of device/attention/extend/extend_tiles.cuh."""
    return 4 * s.m_tiles * s.threads * (4 * 2 * v.steps + 4)


def _context(problem: ExtendProblem, s: Shape, d: AttentionCall) -> ExtendMma:
    """The template's context of a whole call."""
    cache = problem.cache
    k, v = lower(cache).segments
    key, value = operands(cache)
    return ExtendMma(
        d=d,
        k=k,
        v=v,
        key=key,
        value=value,
        shape=s,
        flight_bytes=s.tokens * (key.bytes + value.bytes),
        slack=SLACK,
        at_once=_AT_ONCE,
        chunk_tokens=problem.chunk,
        run=run_of(cache, s.tokens),
        scales=bool({key.path, value.path} - {"none", "given"}),
        scales_as_f16=any(x.grouped and not x.powers for x in (key, value)),
        padded=bool(key.bytes % 32 or value.bytes % 32),
        q_normalized=d.factored,
        qk_scale=float_literal(problem.scale),
        usual_scale=problem.scale == 1 / math.sqrt(cache.head_dim),
    )
