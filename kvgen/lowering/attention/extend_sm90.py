"""extend on sm_90a: products of warpgroups, K and V by tensor copies, codes widened by warps of their own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from kvgen.architectures import Architecture
from kvgen.expr.score_c import float_literal
from kvgen.layout.dtypes import dtype
from kvgen.lowering.attention.extend_problem import ExtendProblem
from kvgen.lowering.attention.operand import Operand, operands, token_bytes, why_no_operands
from kvgen.lowering.attention.problem import AttentionCall, Fit, WhyNot
from kvgen.lowering.attention.ring import SLACK, aligned
from kvgen.lowering.lowered import lower
from kvgen.lowering.segments import SegmentContext
from kvgen.plan.division import Division
from kvgen.plan.params import PoolMap
from kvgen.schema.cache import Cache
from kvgen.tensor_map import head_steps

NAME: Final = "extend_sm90"
THREADS: Final = 384
# Columns of a block: 64 of each of two warpgroups.
COLS: Final = 128
# An entry with no more columns than one warpgroup's is narrow: both warpgroups have them, and every other tile of keys each. The
# tensor cores take half the time of others for its tiles.
NARROW_COLS: Final = COLS // 2
# Warps that have columns, and threads.
_WARPS: Final = 8
_CONSUMERS: Final = 32 * _WARPS
# Shared memory of a block less barriers, flags and what warps keep of entries.
_OTHER_SHARED: Final = 2048
_MOST_STAGES: Final = 4
# Registers of a thread that copies and of one that multiplies: of 168 at the start the copying warpgroup leaves 128.
# Tensor copies need the fewest, rows that come 16 bytes at a time an address a lane, widening the codes themselves.
_TENSOR_COPIES: Final = (40, 232)
_ROW_COPIES: Final = (56, 224)
_WIDENING: Final = (72, 216)
# Columns of q that one of its warps loads at once, beside codes of 4 bits and of 8.
_AT_ONCE: Final = {4: 2, 8: 4}


@dataclass(frozen=True)
class Widening:
    """How codes of K and V become f16, or bf16 where their scales are e8m0 of groups of dims.

    `code_bytes` are a tile's codes; `at_once` columns of q are loaded by a warp at once. `base_two`: products become scores in
    base 2 at once. `q_scaled`: q may have a scale.
    """

    key: Operand
    value: Operand
    code_bytes: int
    at_once: int
    base_two: bool
    q_scaled: bool


@dataclass(frozen=True)
class ExtendSm90:
    """Everything ops/extend_sm90.cu.j2 reads.

    `rows`: K and V come 16 bytes at a time, else `issue` tokens by one tensor copy. In the tensor maps a kv head begins so
    many chunks of 64 dims (`k_head_chunks`) or groups of 8 tokens (`k_head_groups`) after the one before it. `ping_pong`:
    warpgroups begin their products in turns. `w`: K and V are of codes.
    """

    d: AttentionCall
    operand: str
    k: SegmentContext
    v: SegmentContext
    cols: int
    narrow_cols: int
    chunk_tokens: int
    tokens: int
    stages: int
    rows: bool
    issue: int
    k_head_chunks: int
    k_head_groups: int
    v_head_chunks: int
    v_head_groups: int
    producer_registers: int
    consumer_registers: int
    slack: int
    shared_bytes: int
    ping_pong: bool
    qk_scale: str
    w: Widening | None


def fit(problem: ExtendProblem, arch: Architecture) -> Fit | WhyNot:
    """K and V of 16 bits as they are, or of codes that other warps widen; columns on M."""
    if not arch.wgmma:
        return WhyNot("no wgmma")
    cache = problem.cache
    if why := _why_not(problem, arch):
        return WhyNot(why)
    stages = _stages(cache, arch)
    if not stages:
        return WhyNot("two tiles do not fit shared memory")
    key, value = operands(cache)
    tokens = tile_tokens(cache)
    rows = by_rows(cache)
    return Fit(
        how="products of warpgroups" + (f", rows 16 bytes at a time: {rows}" if rows else ", rows by tensor copies"),
        context=partial(_context, problem, arch),
        division=Division(
            columns=COLS,
            tiles=1,
            heads=1,
            tokens=tokens,
            teams=1,
            team_warps=_WARPS,
            stages=stages,
            held=1,
            tile_bytes=2 * tokens * (key.segment.size + value.segment.size),
            blocks=1,
            trip_tokens=tokens,
            trip_warps=THREADS // 32,
            trip_bytes=tokens * sum(token_bytes(x.segment) for x in (key, value)),
            warpgroups=2,
            query="shared memory",
        ),
        threads=THREADS,
        shared=shared_bytes(cache, arch),
        tile=tokens,
        partial_bytes=4 * _CONSUMERS * (4 * (cache.v_dim // 8) + 4),
        q_align=8,
        out_align=4,
        vec=math.gcd(4, cache.v_dim),
        factored=widens(cache),
        maps=maps(cache),
        persistent=True,
        narrow_columns=0 if problem.chunk else NARROW_COLS,
    )


def tile_tokens(cache: Cache) -> int:
    """Tokens of a tile: what sums, scores and weights leave registers and shared memory for."""
    return 128 if max(cache.head_dim, cache.v_dim) <= 192 else 64


def _why_not(problem: ExtendProblem, arch: Architecture) -> str:
    """Why warpgroups do not take it on an architecture that has them; "" where they do but for the room of tiles."""
    cache, chunk = problem.cache, problem.chunk
    if why := why_no_operands(cache):
        return why
    if chunk % tile_tokens(cache):
        return f"sums begin anew every {chunk} tokens, which are no whole tiles of {tile_tokens(cache)}"
    if cache.dtype not in ("bf16", "f16"):
        return "K and V are not of 16-bit elements"
    if (cache.quants["k"] is None) != (cache.quants["v"] is None):
        return "one of K and V is of codes, and not the other"
    if cache.head_dim % 64 or cache.v_dim % 64 or max(cache.head_dim, cache.v_dim) > 256:
        return f"dims are not multiples of 64 up to 256: {cache.head_dim}, {cache.v_dim}"
    for operand in operands(cache):
        if operand.access < 16:
            return f"{operand.role[0].upper()}: rows are not aligned to 16 bytes"
    return (by_rows(cache) or _widening_why_not(problem)) if widens(cache) else ""


def by_rows(cache: Cache) -> str:
    """Why K and V come 16 bytes at a time; "" where tensor copies bring them."""
    if cache.page_tokens is None or cache.page_tokens % 8 or lower(cache).allocation.one_page:
        return "tensor copies bring groups of 8 tokens of a page"
    for operand in operands(cache):
        region, role = operand.segment.region, operand.role[0].upper()
        token, head = _strides(operand)
        if not token or not head:
            return f"{role} has no one stride from token to token and from head to head"
        if token * operand.bits % 128 or region.byte_offset % 16 or _steps(cache, operand) is None:
            return f"{role}: heads of a page are neither side by side in a token nor one behind the other"
    return ""


def _widening_why_not(problem: ExtendProblem) -> str:
    """Why codes of K and V cannot be widened; "" where they can."""
    cache, chunk, scores, masks = problem.cache, problem.chunk, problem.scored, problem.masked
    for role, quant in cache.quants.items():
        if quant is not None and quant.residual:
            return f"{role.upper()}: tokens that wait to be quantized are no codes"
    key, value = operands(cache)
    scaled = value.path == "token"
    if chunk and scaled:
        return "weights are relative to the scales of a tile of V, whichever tokens of it a row sees"
    if scores or (masks and scaled and cache.v_dim > 64):
        what = "a score function" if scores else "masks and scales of tokens"
        return f"{what} and sums of {cache.v_dim} dims do not fit {_WIDENING[1]} registers, which widening leaves"
    if cache.v_dim > 192:
        return f"sums of {cache.v_dim} dims do not fit {_WIDENING[1]} registers, which widening leaves"
    if key.powers != value.powers:
        return "one of K and V becomes bf16, beside e8m0 scales of dims, and the other f16"
    halves = 128 // tile_tokens(cache)  # threads of a row
    for operand in (key, value):
        scales = operand.segment.scales
        if scales is None or scales.groups == 1 or not operand.grouped:
            continue
        if operand.segment.size // halves % scales.block[2]:
            return f"{operand.role[0].upper()}: two threads share a row, and scales of dims lie across both halves"
    return ""


def _strides(operand: Operand) -> tuple[int, int]:
    """Elements from token to token and from kv head to kv head; 0 where there is no one step."""
    region = operand.segment.region
    alone = not any(axis.name == "head" for axis in region.axes)  # a single head
    return region.stride_of("token") or 0, operand.segment.size if alone else region.stride_of("head") or 0


def _steps(cache: Cache, operand: Operand) -> tuple[int, int] | None:
    """Chunks and groups of 8 tokens from a kv head to the next; None where heads lie neither way."""
    if cache.page_tokens is None or cache.kv_heads == 1:
        return 0, 0
    segment = operand.segment
    if segment.quant is None:
        return head_steps(cache.page_tokens, *_strides(operand), segment.size, 64)
    token, head = (n * operand.bits // 8 for n in _strides(operand))
    return head_steps(cache.page_tokens, token, head, operand.bytes, _span(operand))


def _span(operand: Operand) -> Literal[32, 64, 128]:
    """Bytes of the swizzle by which codes come: CodeRows::kSpan of device/attention/extend/row_widen.cuh."""
    return 128 if operand.bytes % 128 == 0 else 64 if operand.bytes % 64 == 0 else 32


def widens(cache: Cache) -> bool:
    """K and V are of codes."""
    return cache.quants["k"] is not None


def _copied_rows(cache: Cache) -> int:
    """Rows that one warp has copied: a tile's, or a quarter of them."""
    return tile_tokens(cache) // (4 if widens(cache) else 1)


def _code_bytes(cache: Cache, stages: int) -> int:
    """Bytes besides Q and rings where codes are widened: a tile's codes, scales of tokens and of columns of q, mbarriers."""
    if not widens(cache):
        return 0
    key, value = operands(cache)
    a_tile = 4 * tile_tokens(cache)
    found = 4 * COLS + 8 * 8 + tile_tokens(cache) * (key.bytes + value.bytes)
    found += 2 * stages * a_tile * (key.path == "token")
    return found + 2 * stages * (a_tile + 32) * (value.path == "token")


def _stages(cache: Cache, arch: Architecture) -> int:
    """Tiles of K and of V that have room; 0 where not even two have."""
    room = arch.block_shared - _OTHER_SHARED
    return next((n for n in range(_MOST_STAGES, 1, -1) if _tiles_bytes(cache, n) <= room), 0)


def _tiles_bytes(cache: Cache, stages: int) -> int:
    """Bytes of Q, rings of K and of V, codes and scales."""
    dims = cache.head_dim + cache.v_dim
    return 2 * COLS * cache.head_dim + stages * 2 * tile_tokens(cache) * dims + _code_bytes(cache, stages)


def shared_bytes(cache: Cache, arch: Architecture) -> int:
    """Bytes of shared memory: struct Shared of the template."""
    stages = _stages(cache, arch)
    flags = aligned(8 * ((6 if by_rows(cache) else 4) * stages + 6) + 4 * (stages + 5))
    return _tiles_bytes(cache, stages) + flags + 8 * NARROW_COLS + 48 * _WARPS


def maps(cache: Cache) -> tuple[PoolMap, ...]:
    """The tensor maps of K and V; none where rows come 16 bytes at a time."""
    if by_rows(cache):
        return ()
    rows, found = _copied_rows(cache), list[PoolMap]()
    for operand in operands(cache):
        segment, role = operand.segment, operand.role[0]
        codes = segment.quant is not None
        token, head = (n * operand.bits // 8 if codes else n for n in _strides(operand))
        found.append(
            PoolMap(
                f"{role}_map",
                doc=f"pages of {role.upper()} in groups of 8 tokens: `group_tile` of kvgen.tensor_map for tiles of {rows} tokens",
                base=segment.base,
                element="u8" if codes else cache.dtype,
                heads=cache.kv_heads,
                dim=operand.bytes if codes else segment.size,
                token_stride=token,
                head_stride=head,
                rows=rows,
                offset=segment.region.byte_offset,
                swizzle=_span(operand) if codes else 128,
            )
        )
    return tuple(found)


def _context(problem: ExtendProblem, arch: Architecture, d: AttentionCall) -> ExtendSm90:
    """The template's context of a whole call."""
    cache = problem.cache
    k, v = lower(cache).segments
    key, value = operands(cache)
    k_steps, v_steps = _steps(cache, key) or (0, 0), _steps(cache, value) or (0, 0)
    stages, w = _stages(cache, arch), None
    if widens(cache):
        w = Widening(
            key=key,
            value=value,
            code_bytes=tile_tokens(cache) * (key.bytes + value.bytes),
            at_once=_AT_ONCE[key.bits],
            base_two=d.attend.plain,
            q_scaled=d.q_scaled,
        )
    producer, consumer = _WIDENING if w else _ROW_COPIES if by_rows(cache) else _TENSOR_COPIES
    return ExtendSm90(
        d=d,
        operand=dtype(cache.dtype).c if w is None else "bf16" if key.powers else "f16",
        k=k,
        v=v,
        cols=COLS,
        narrow_cols=0 if problem.chunk else NARROW_COLS,
        chunk_tokens=problem.chunk,
        tokens=tile_tokens(cache),
        stages=stages,
        rows=bool(by_rows(cache)),
        issue=math.gcd(cache.page_tokens or 0, _copied_rows(cache)),
        k_head_chunks=k_steps[0],
        k_head_groups=k_steps[1],
        v_head_chunks=v_steps[0],
        v_head_groups=v_steps[1],
        producer_registers=producer,
        consumer_registers=consumer,
        slack=SLACK,
        shared_bytes=shared_bytes(cache, arch),
        ping_pong=max(cache.head_dim, cache.v_dim) > 64 or stages % 2 == 1,
        qk_scale=float_literal(problem.scale),
        w=w,
    )
