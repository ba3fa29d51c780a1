"""decode on tensor cores by mma.sync: tiles and rings of a block, and what its template reads."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Final

from kvgen.architectures import Architecture
from kvgen.expr.score_c import float_literal
from kvgen.lowering.attention.decode_problem import DecodeProblem
from kvgen.lowering.attention.operand import MOST_SUMS, Operand, operands, run_of, token_bytes, why_no_operands
from kvgen.lowering.attention.problem import AttentionCall, Fit, WhyNot
from kvgen.lowering.attention.ring import LARGEST, SLACK, Stages, aligned, shared_for
from kvgen.lowering.attention.split_kv import partial_bytes
from kvgen.lowering.lowered import lower
from kvgen.lowering.segments import SegmentContext
from kvgen.plan.division import Division
from kvgen.schema.cache import Cache

NAME: Final = "decode_mma"
# Registers of the sums of a lane, and of Q's fragments, beside which the rest of a kernel fits 255.
OUT_REGISTERS: Final = 128
QUERY_REGISTERS: Final = 64
MOST_STAGES: Final = 6
MOST_WARPS: Final = 4
# Tokens of a tile and warps of a block, the best first: what a tile costs besides its tokens counts less the longer it is,
# and a warp alone in its block has nobody to share the end of a chunk with. Where instructions are many, four warps first: of
# fewer all may lie on one sub-core.
_TILES: Final = ((32, 4), (32, 2), (16, 4), (16, 2), (32, 1), (16, 1))
_FOUR_WARPS: Final = ((32, 4), (16, 4), (32, 2), (16, 2), (32, 1), (16, 1))
# The part of a sub-core's issue slots up to which two warps a block are enough; bytes a cycle for a multiprocessor of an H200.
FEW_SLOTS: Final = 0.4
REACHABLE: Final = 17.6
# Neighbouring kv heads that a block has where it has several: results of each are to be merged where requests are cut.
MOST_HEADS: Final = 2
# Registers of sums up to which 32 tokens have room.
LONG_REGISTERS: Final = 64
# Of the largest memory: a multiprocessor's, less what two blocks are charged besides.
_LARGEST: Final = (LARGEST - 2) << 10


@dataclass(frozen=True)
class Shape:
    """How a block divides heads, columns and tokens among its warps: a team's warps have different columns, of one kv head or of
    `heads` neighbouring ones, a warp each. `tiles` blocks share the columns of a kv head."""

    n_tiles: int
    team_warps: int
    heads: int
    teams: int
    tiles: int
    tokens: int
    stages: Stages
    blocks_per_sm: int

    @property
    def cols(self) -> int:
        """Columns of a block."""
        return 8 * self.n_tiles * self.team_warps

    @property
    def tile(self) -> int:
        """Tokens that the planner counts in."""
        return self.teams * self.tokens

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.teams * self.team_warps


@dataclass(frozen=True)
class DecodeMma:
    """Everything ops/decode_mma.cu.j2 reads. `flight_bytes` are those of a tile of all teams of a multiprocessor's blocks."""

    d: AttentionCall
    k: SegmentContext
    v: SegmentContext
    key: Operand
    value: Operand
    shape: Shape
    flight_bytes: int
    slack: int
    run: int
    value_groups: int
    scales: bool
    scales_as_f16: bool
    scale_in_p: bool
    padded: bool
    rows_differ: bool
    query_held: bool
    q_normalized: bool
    qk_scale: str
    usual_scale: bool


def fit(problem: DecodeProblem, arch: Architecture) -> Fit | WhyNot:
    """K and V as 16-bit operands, tokens on M."""
    cache, call = problem.cache, problem.call
    if why := why_not(cache, call.rows, call.columns, elementwise=problem.elementwise):
        return WhyNot(why)
    found = shape(cache, call.rows, call.columns, arch, elementwise=problem.elementwise, lists=call.lists)
    if found is None:
        return WhyNot(f"rows of {cache.head_dim} dims do not fit shared memory")
    if call.lists and (why := _lists_why_not(cache, found.tokens)):
        return WhyNot(why)
    k, v = operands(cache, call.columns, found.heads)
    tile_bytes = found.tokens * (found.heads * (k.bytes + v.bytes))
    stages = found.stages.most
    return Fit(
        how="16-bit operands, tokens on M",
        context=partial(_context, problem, found),
        division=Division(
            columns=found.cols,
            tiles=found.tiles,
            heads=found.heads,
            tokens=found.tokens,
            teams=found.teams,
            team_warps=found.team_warps,
            stages=stages,
            held=1,
            tile_bytes=tile_bytes,
            blocks=found.blocks_per_sm,
            trip_tokens=found.tokens,
            trip_warps=found.team_warps,
            trip_bytes=found.heads * found.tokens * sum(token_bytes(x.segment) for x in (k, v)),
        ),
        threads=found.threads,
        shared=_shared(cache, call.columns, found),
        tile=found.tile,
        partial_bytes=partial_bytes(found.cols, cache.v_dim),
        q_align=4,
        out_align=4,
        vec=math.gcd(4, cache.v_dim),
        factored=k.segment.quant is not None or v.segment.quant is not None,
    )


def why_not(cache: Cache, rows: int, columns: int, *, elementwise: bool) -> str:
    """Why K and V cannot be operands for so many columns, or their sums do not fit; "" where they can."""
    if why := why_no_operands(cache, columns):
        return why
    if 4 * -(-cache.v_dim // 16) > _room(cache, rows, elementwise):
        return f"sums of {cache.v_dim} dims do not fit a lane's registers"
    return ""


def _lists_why_not(cache: Cache, tokens: int) -> str:
    """Why tiles of `tokens` tokens cannot come from lists of pages; "" where they can."""
    if cache.page_tokens is None or cache.page_tokens % tokens:
        return f"listed pages of {cache.page_tokens} tokens are no whole tiles of {tokens}"
    if not all(operand.scales_aligned for operand in operands(cache)):
        return "scales of listed pages that no copy can begin at"
    return ""


def _room(cache: Cache, rows: int, elementwise: bool) -> int:
    """Registers that sums may take: fewer where columns may have to be multiplied one by one, or weights carry scales."""
    if rows == 1 and not elementwise:
        return OUT_REGISTERS
    _, v = operands(cache, 8)
    return OUT_REGISTERS // 2 if v.path == "token" else OUT_REGISTERS * 3 // 4


def heads_together(cache: Cache) -> int:
    """Neighbouring kv heads of a block: MOST_HEADS where their scales share sectors, which the block of each would ask for.

    Without scales there is nothing to share: rows have whole sectors, and N heads a block are N times as many results to merge
    where requests are cut, and a barrier a tile.
    """
    both = operands(cache)
    scales = [x.segment.scales for x in both if x.segment.scales is not None and x.segment.scales.region is not None]
    adjacent = all(x.bytes % 16 == 0 and x.segment.region.stride_of("head") == x.segment.size for x in both) and all(
        s.block[1] == 1 and s.region is not None and s.region.stride_of("head") == s.groups * (1 + s.zero)
        for s in scales
    )
    waits = any(x.segment.quant is not None and x.segment.quant.residual for x in both)
    runs = run_of(cache, 16) > 0 and not waits
    return MOST_HEADS if scales and adjacent and runs and cache.kv_heads % MOST_HEADS == 0 else 1


def issue_slots(cache: Cache, n_tiles: int) -> float:
    """The part of one sub-core's issue slots that tokens take which come at the bandwidth of its multiprocessor, estimated:
    the slots if all warps lay on that sub-core. By warp instructions of a token and kv head."""
    both = operands(cache, 8 * n_tiles)
    nbytes, dims = sum(x.bytes for x in both), sum(x.segment.size for x in both)
    tile = 80 / 32  # waiting, page ids, addresses: of 32 tokens
    access = 2 * nbytes / 512  # a copy and an ldmatrix of 512 bytes
    places = 0 if run_of(cache, 16) else 5 * nbytes / 512  # an address a row, by shuffles
    products = n_tiles * dims / 256  # of 16 tokens and 16 dims
    # Ten for each of a lane's scores, of which a token and 8 columns have a quarter; six for its scale.
    softmax = n_tiles * (2.5 + 1.5 * [x.path for x in both].count("token"))
    # Registers of two elements are 64 of a token's to a warp: of codes each is widened, of groups of dims scaled too.
    widened = sum((x.segment.quant is not None) + x.path.endswith(("_groups", "_channels")) for x in both)
    return (tile + access + places + products + softmax + widened * dims / 128) / (nbytes / REACHABLE)


def shape(
    cache: Cache, rows: int, columns: int, arch: Architecture, *, elementwise: bool = False, lists: bool = False
) -> Shape | None:
    """The block of a decode: the longest tiles that leave two blocks to a multiprocessor, rings of three tiles each.

    An architecture with less memory than the largest takes the same block where that fits it, with rings of two tiles or one
    block a multiprocessor. None where rows are so long that no ring of two has room. A block has one kv head where each
    `lists` its pages.
    """
    k, v = operands(cache, columns)
    dims = max(-(-v.segment.size // 16), 1)
    total = -(-columns // 8)
    most = max(1, min(4, _room(cache, rows, elementwise) // (4 * dims)))
    team_warps = min(4, -(-total // most))
    team_warps += team_warps == 3  # all three may lie on one sub-core; of four that are alike none do
    tiles = -(-total // (most * team_warps))
    n_tiles = -(-total // (team_warps * tiles))
    together = heads_together(cache) if team_warps * tiles == 1 and not lists else 1
    largest = arch.shared >> 10 == LARGEST
    for blocks, (tokens, warps) in product((2, 1), _FOUR_WARPS if issue_slots(cache, n_tiles) > FEW_SLOTS else _TILES):
        if tokens > 16 and 4 * dims * n_tiles > LONG_REGISTERS:
            continue
        quant = k.segment.quant
        if quant is not None and quant.residual and quant.residual % tokens:
            continue  # a tile's tokens share K's scales
        heads = min(together, warps)
        teams = warps // heads
        found = Shape(n_tiles, team_warps * heads, heads, teams, tiles, tokens, Stages(()), blocks)
        stage, merged, held = _bytes(cache, columns, found)
        room = shared_for(arch, blocks) - held
        if not largest and room < max(2 * stage, merged):
            room = shared_for(arch, 1) - held
        fits = (
            max((3 if largest else 2) * stage, merged) <= room and max(3 * stage, merged) <= _LARGEST // blocks - held
        )
        if (teams == 1 or teams * team_warps <= MOST_WARPS) and fits:
            return replace(found, stages=Stages.on(arch, max(2, min(MOST_STAGES, room // stage))))
    return None


def _bytes(cache: Cache, columns: int, s: Shape) -> tuple[int, int, int]:
    """Bytes of shared memory: a stage of the ring, the results of teams (or what the merge of chunks needs), and the rest."""
    k, v = operands(cache, columns, s.heads)
    plain = k.segment.quant is None and v.segment.quant is None
    query = k.steps * s.cols // 8 * 256 + 4 * s.cols * ((not plain) + k.query_sums)
    copied = sum(x.stage_bytes(s.tokens) for x in (k, v))
    merged = 4 * s.cols * max(s.teams * (v.segment.size + 4 + 2), 32 + 2)
    # A tile of each team has its scales as products read them.
    expanded = s.heads * sum(x.expanded_bytes(s.tokens) for x in (k, v) if not x.direct)
    # Scales begin where the last row ends.
    gap = (v.pitch - s.heads * v.bytes) // 16 * 16 if copied else 0
    return s.teams * (s.tokens * (k.pitch + v.pitch) - gap + copied), merged, query + s.teams * expanded


def _shared(cache: Cache, columns: int, s: Shape) -> int:
    """Bytes of shared memory: struct Shared of the kernel."""
    stage, merged, held = _bytes(cache, columns, s)
    return aligned(max(s.stages.most * stage, merged) + held)


def carried_by_weights(cache: Cache, n_tiles: int) -> bool:
    """Weights carry V's scales, powers of two, where all columns see all tokens: where that is fewer multiplications,
    for so many tiles of 8 columns, than one an element."""
    _, v = operands(cache)
    scales = v.segment.scales
    if scales is None or not v.powers or not v.whole_groups:
        return False
    return 4 * scales.groups * n_tiles <= v.segment.size // 2 and scales.groups * n_tiles <= 2 * MOST_SUMS["key"]


def _context(problem: DecodeProblem, s: Shape, d: AttentionCall) -> DecodeMma:
    """The template's context of a whole call."""
    cache = problem.cache
    k, v = lower(cache).segments
    key, value = operands(cache, d.columns, s.heads)
    rows_differ = d.rows > 1 or d.attend.mask_differs_by_row
    weighted = not rows_differ and carried_by_weights(cache, s.n_tiles)
    return DecodeMma(
        d=d,
        k=k,
        v=v,
        key=key,
        value=value,
        shape=s,
        flight_bytes=s.blocks_per_sm * s.tile * s.heads * (key.bytes + value.bytes),
        slack=SLACK,
        run=run_of(cache, s.tokens),
        value_groups=value.segment.scales.groups if weighted and value.segment.scales else value.groups,
        scales=bool({key.path, value.path} - {"none", "given"}),
        scales_as_f16=any(x.grouped and not x.direct and not x.powers for x in (key, value)),
        scale_in_p=weighted,
        padded=bool(key.bytes % 16 or value.bytes % 16),
        rows_differ=rows_differ,
        query_held=2 * -(-k.size // 16) * s.n_tiles <= QUERY_REGISTERS and 4 * -(-v.size // 16) * s.n_tiles <= 96,
        q_normalized=d.factored,
        qk_scale=float_literal(problem.scale),
        usual_scale=problem.scale == 1 / math.sqrt(cache.head_dim),
    )
