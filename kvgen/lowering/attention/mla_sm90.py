"""mla_decode on sm_90a for many columns, over rows of any record: warps of their own widen rows for products of warpgroups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from kvgen.architectures import Architecture
from kvgen.layout.storage import Scales, Segment
from kvgen.lowering.attention.mla_lists import ListContext
from kvgen.lowering.attention.mla_problem import MlaProblem
from kvgen.lowering.attention.operand import token_bytes
from kvgen.lowering.attention.problem import AttentionCall, Fit, WhyNot
from kvgen.lowering.attention.ring import SLACK
from kvgen.lowering.attention.split_kv import partial_bytes
from kvgen.plan.division import Division
from kvgen.schema.cache import Cache

NAME: Final = "mla_sm90"
# Two warpgroups that multiply, two that widen, and the registers of their threads.
THREADS: Final = 512
MATH_REGISTERS: Final = 192
WIDEN_REGISTERS: Final = 64
# Columns of a block: what one product has. Tokens of a tile, of which shared memory has two.
COLS: Final = 64
TOKENS: Final = 64
# Below so many columns a product is mostly padding.
LEAST_COLS: Final = 17
# Both halves of the sums are 64 x 256, 128 registers a thread.
LATENT: Final = 512
PANEL: Final = 64  # dims: 128 bytes in shared memory
UNIT: Final = 16  # dims that a thread widens at once
# Dims of the output that a thread writes at once.
VEC: Final = 8
# What dequantize_stored of templates/device/cache/segment.cuh makes of codes and one scale.
_RECIPES: Final = ("amax", "pow2", "max")


@dataclass(frozen=True)
class Record:
    """How a row lies in memory: `codes` of `kind`, then from panel `plain_panel` on dims of 16 bits, `plain_at` bytes behind the
    row's first one. A scale each `group_dims`, of `scale` ("": none); half of V's dims have `scale_bytes` of
    them, `scale_access` at once, and those of the second half lie `scale_step` bytes on."""

    kind: str
    access: int
    recipe: str
    scale: str
    group_dims: int
    plain_panel: int
    plain_at: int
    scale_bytes: int
    scale_step: int
    scale_access: int


@dataclass(frozen=True)
class RecordContext:
    """A record as the template has it: its name, the prefix of its namespace, and which lists have such rows."""

    name: str
    space: str
    lists: tuple[int, ...]
    plain_panel: int
    plain_at: int
    scale_bytes: int
    scale_step: int
    scale_access: int


@dataclass(frozen=True)
class MlaSm90:
    """Everything ops/mla_sm90.cu.j2 reads.

    `lists` name rows, or there are none, and a request's page table does. `qk_scale` turns products into scores in base 2.
    `shared` is what all stages have together of shared memory.
    """

    d: AttentionCall
    lists: tuple[ListContext, ...]
    records: tuple[RecordContext, ...]
    threads: int
    math_registers: int
    widen_registers: int
    cols: int
    tokens: int
    shared: tuple[int, ...]
    slack: int
    head_dim: int
    qk_scale: str


def fit(problem: MlaProblem, arch: Architecture) -> Fit | WhyNot:
    """Rows in the cache's dtype on their way to shared memory, products of warpgroups; columns on M."""
    if not arch.wgmma:
        return WhyNot("no wgmma")
    if problem.call.rows > 1:
        return WhyNot("rows of a request do not see the same tokens")
    if problem.columns < LEAST_COLS:
        return WhyNot(
            f"{problem.columns} columns leave most of a product of {COLS} empty; from {LEAST_COLS} on it is worth it"
        )
    records: list[Record] = []
    for cache in problem.caches:
        if cache.latent_part != LATENT or cache.head_dim not in (LATENT, LATENT + PANEL):
            return WhyNot(f"rows are not {LATENT} dims of V, and {PANEL} more or none")
        record = _record(cache)
        if isinstance(record, str):
            return WhyNot(record)
        records.append(record)
    nbytes = sum(token_bytes(segment) for segment in problem.cache.storage.roles["k"])
    return Fit(
        how="rows widened by warps of their own, products of warpgroups; columns on M",
        context=partial(_context, problem, tuple(records)),
        division=Division(
            columns=COLS,
            tiles=-(-problem.columns // COLS),
            heads=1,
            tokens=TOKENS,
            teams=1,
            team_warps=THREADS // 32,
            stages=2,
            held=1,
            tile_bytes=TOKENS * nbytes,
            blocks=1,
            trip_tokens=2 * TOKENS,
            trip_warps=THREADS // 32,
            trip_bytes=2 * TOKENS * nbytes,
            warpgroups=2,
            widens=True,
        ),
        threads=THREADS,
        shared=sum(shared_bytes(problem.cache.head_dim, len(problem.lists))),
        tile=TOKENS,
        partial_bytes=partial_bytes(COLS, LATENT),
        q_align=8,
        out_align=VEC,
        vec=VEC,
    )


def _record(cache: Cache) -> Record | str:
    """Or why threads cannot take such rows 16 dims at a time."""
    codes, *more = cache.storage.roles["k"]
    if codes.region.run != codes.size or codes.size % PANEL or codes.region.dtype.bits not in (4, 8, 16):
        return f"a row's codes are no run of a multiple of {PANEL} dims in 4, 8 or 16 bits"
    if codes.quant is not None and codes.quant.strided:
        return "codes of a byte are no neighbours"
    if codes.quant is not None and codes.quant.recipe not in _RECIPES:
        return f"recipe {codes.quant.recipe!r} has more than a scale"
    if codes.quant is None:
        return _copied(codes, more, cache)
    come = min(16, codes.region.vector * codes.region.dtype.bits // 8)
    if come < 4:
        return f"codes come {come} bytes at a time, and threads take 4 or more"
    plain = more[0] if more else None
    if plain is not None and not _follows(codes, plain, cache):
        return "a row's dims without scales lie apart from its codes"
    nbytes = step = access = 0
    if codes.scales is not None:
        if codes.size > LATENT:
            return f"scales are of more dims of a row than the {LATENT} of V"
        found = _scale_bytes(codes, codes.scales, cache)
        if isinstance(found, str):
            return found
        nbytes, step, access = found
    return Record(
        kind=codes.region.dtype.name,
        access=come,
        recipe="max" if codes.quant is not None and codes.quant.recipe == "max" else "",
        scale=codes.scales.dtype.name if codes.scales else "",
        group_dims=codes.scales.block[2] if codes.scales else 0,
        plain_panel=(plain.begin if plain else cache.head_dim) // PANEL,
        plain_at=plain.region.byte_offset - codes.region.byte_offset if plain else 0,
        scale_bytes=nbytes,
        scale_step=step,
        scale_access=access,
    )


def _copied(codes: Segment, more: Sequence[Segment], cache: Cache) -> Record | str:
    """The record of rows of 16 bits throughout, or why threads do not take them."""
    end = codes.size
    for part in more:
        if part.region.byte_offset - codes.region.byte_offset != 2 * end or not _follows(codes, part, cache):
            return "a row's RoPE part lies apart from its other dims"
        end += part.size
    if codes.region.vector != 8:
        return "rows are no runs of 16 bytes"
    return Record(codes.region.dtype.name, 16, "", "", 0, 0, 0, 0, 0, 0)


def _follows(codes: Segment, plain: Segment, cache: Cache) -> bool:
    """Dims of 16 bits lie a fixed way behind their row's codes, in whole accesses."""
    region = plain.region
    beside = plain.base == codes.base and _step(plain) == _step(codes)
    whole = region.run == plain.size and region.vector == 8 and plain.begin % PANEL == 0 and plain.size % PANEL == 0
    return beside and whole and plain.scales is None and region.dtype.name == cache.dtype


def _scale_bytes(codes: Segment, scales: Scales, cache: Cache) -> tuple[int, int, int] | str:
    """Bytes of the scales of half of V's dims, from them to the other half's, and of an access; or why threads do not take
    them."""
    tokens, heads, dims = scales.block
    if scales.region is None or scales.zero or (tokens, heads) != (1, 1):
        return "scales are given, have zero points, or are of several tokens"
    if dims % UNIT or (dims < PANEL and PANEL % dims) or (dims >= PANEL and dims % PANEL) or dims not in _DIMS:
        return f"a scale is of {dims} dims, which neither fill nor divide panels of {PANEL}"
    if scales.region.stride_of("dim") not in (1, None) or scales.region.swizzle or "/" in scales.region.text:
        return "scales of a row are no neighbours"
    halves = max(1, LATENT // 2 // dims)
    nbytes, step = halves * scales.dtype.bytes, LATENT // 2 // dims * scales.dtype.bytes
    row = (scales.region.stride_of("token") or 0) * scales.dtype.bytes
    tensor = next(t for t in cache.storage.tensors if t.name == _tensor_of(cache, scales.base))
    offset = scales.region.byte_offset
    access = math.gcd(16, nbytes, row, step, offset, max(tensor.align, tensor.page_align))
    if nbytes > 16 or step + nbytes > row or (access < nbytes and access < 4):
        return f"scales of half a row, {nbytes} bytes, come {access} bytes at a time"
    return nbytes, step, access


_DIMS: Final = (16, 32, 64, 128, 256, 512)


def _tensor_of(cache: Cache, base: str) -> str:
    return next(b.tensor for b in cache.storage.bases if b.name == base)


def _step(segment: Segment) -> int:
    """Bytes from a token's row to the next."""
    return (segment.region.stride_of("token") or 0) * segment.region.dtype.bits // 8


def _context(problem: MlaProblem, records: tuple[Record, ...], d: AttentionCall) -> MlaSm90:
    """The template's context of a whole call."""
    kinds = list(dict.fromkeys(records))
    lists = problem.lists
    return MlaSm90(
        d=d,
        lists=tuple(replace(x, record=kinds.index(r)) for x, r in zip(lists, records, strict=False)),
        records=_records(kinds, records, [x.space for x in lists]),
        threads=THREADS,
        math_registers=MATH_REGISTERS,
        widen_registers=WIDEN_REGISTERS,
        cols=COLS,
        tokens=TOKENS,
        shared=shared_bytes(problem.cache.head_dim, len(lists)),
        slack=SLACK,
        head_dim=problem.cache.head_dim,
        qk_scale=problem.qk_scale,
    )


def _records(kinds: Sequence[Record], records: Sequence[Record], spaces: Sequence[str]) -> tuple[RecordContext, ...]:
    """The different records of the caches, as the template reads them."""
    lists = [tuple(n for n, r in enumerate(records) if r == kind) for kind in kinds]
    return tuple(
        RecordContext(
            name=f"Record{number}",
            space=spaces[found[0]] if spaces else "",
            lists=found,
            plain_panel=record.plain_panel,
            plain_at=record.plain_at,
            scale_bytes=record.scale_bytes,
            scale_step=record.scale_step,
            scale_access=record.scale_access,
        )
        for number, (record, found) in enumerate(zip(kinds, lists, strict=True))
    )


def shared_bytes(head_dim: int, lists: int) -> tuple[int, ...]:
    """Shared memory of the template: two tiles of rows; Q; weights, in whose place partial results merge; maxima and sums of
    columns; works, lists, mbarriers."""
    works, barriers = 2 * (64 + 16 * lists), 8 * (4 + 4 + 2 + 4) + 16
    return 2 * 2 * TOKENS * head_dim, 2 * COLS * head_dim, 4 * COLS * 34, 4 * 4 * COLS, works + barriers
