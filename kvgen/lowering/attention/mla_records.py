"""mla_decode by mma.sync over rows of any record, which all warps of a block round to one type on their way to shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvgen.architectures import Architecture
from kvgen.layout.storage import Segment
from kvgen.lowering.attention.latent_row import WARPS
from kvgen.lowering.attention.mla_lists import ListContext
from kvgen.lowering.attention.mla_problem import MlaProblem
from kvgen.lowering.attention.operand import token_bytes
from kvgen.lowering.attention.problem import AttentionCall, Fit, WhyNot
from kvgen.lowering.attention.ring import SLACK, aligned
from kvgen.lowering.attention.split_kv import partial_bytes
from kvgen.plan.division import Division
from kvgen.schema.cache import Cache

NAME: Final = "mla_records"
THREADS: Final = 32 * WARPS
TOKENS: Final = 32
# Dims that a thread has of a row, and bytes of their codes and scales that it keeps: RowUnit of device/attention/row_units.cuh.
UNIT: Final = 16
_UNIT_BYTES: Final = 48


@dataclass(frozen=True)
class Shape:
    """A block's work: `cols` columns, two tiles of `tokens` rows, `pitch` bytes from row to row, `shared` bytes in all.

    Warps of K Q^T: `warps_m` along tokens, `warps_n` along columns, `warps_k` along dims. Q is held in registers if `held`,
    else read from shared memory, where it stands `apart` from the rows (else, at first, in the second tile's).
    """

    cols: int
    tokens: int
    pitch: int
    warps_m: int
    warps_n: int
    warps_k: int
    held: bool
    apart: bool
    shared: int


@dataclass(frozen=True)
class MlaRecords:
    """Everything ops/mla_records.cu.j2 reads; `qk_scale` turns products into scores in base 2."""

    d: AttentionCall
    lists: tuple[ListContext, ...]
    shape: Shape
    threads: int
    slack: int
    head_dim: int
    qk_scale: str


def check_row(cache: Cache, at: str) -> None:
    """Raise ValueError, which begins with `at`, where rows of this cache cannot be taken 16 dims at a time."""
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
    """Rows of any records, rounded to the cache's dtype; tokens on M."""
    cache = problem.cache
    found = shape(cache.head_dim, cache.latent_part, problem.columns, len(problem.lists), arch)
    if found is None:
        return WhyNot(
            f"no room for two tiles of rows of {cache.head_dim} dims in {arch.block_shared >> 10} KB of shared memory; use "
            "smaller rows"
        )
    nbytes = sum(token_bytes(segment) for segment in cache.storage.roles["k"])
    caches = "one cache" if len(problem.caches) == 1 else f"{len(problem.caches)} caches"
    return Fit(
        how=f"rows of {caches}, in {cache.dtype} on their way to shared memory; tokens on M",
        context=partial(_context, problem, found),
        division=Division(
            columns=found.cols,
            tiles=-(-problem.columns // found.cols),
            heads=1,
            tokens=TOKENS,
            teams=1,
            team_warps=WARPS,
            stages=2,
            held=1,
            tile_bytes=TOKENS * nbytes,
            blocks=1,
            trip_tokens=TOKENS,
            trip_warps=WARPS,
            trip_bytes=TOKENS * nbytes,
        ),
        threads=THREADS,
        shared=found.shared,
        tile=TOKENS,
        partial_bytes=partial_bytes(found.cols, cache.latent_part),
        q_align=8,
        out_align=4,
    )


def shape(head_dim: int, v_size: int, columns: int, lists: int, arch: Architecture) -> Shape | None:
    """The most columns of a block that fit the architecture's shared memory; None where none do."""
    cols = 64 if columns > 32 else 32 if columns > 16 else 16 if columns > 8 else 8
    while cols >= 8:
        found = _shape(head_dim, v_size, cols, lists)
        if found.shared <= arch.block_shared:
            return found
        cols //= 2
    return None


def _shape(head_dim: int, v_size: int, cols: int, lists: int) -> Shape:
    pitch = (head_dim // 8 | 1) * 16
    warps_m, warps_n = TOKENS // 16, max(1, cols // 16)
    warps_k, held = WARPS // (warps_m * warps_n), cols <= 32
    query = 2 * cols * head_dim
    apart = not held or query > TOKENS * pitch
    rows = 2 * TOKENS * pitch + query * apart + 4 * warps_k * cols * (TOKENS + 4)
    merged = aligned(4 * cols * (v_size + 6))
    shared = max(rows, merged) + 2 * cols * TOKENS + 4 * cols + 8 * TOKENS + 16 * lists
    return Shape(cols, TOKENS, pitch, warps_m, warps_n, warps_k, held, apart, shared)


def _context(problem: MlaProblem, s: Shape, d: AttentionCall) -> MlaRecords:
    """The template's context of a whole call."""
    return MlaRecords(
        d=d,
        lists=problem.lists,
        shape=s,
        threads=THREADS,
        slack=SLACK,
        head_dim=problem.cache.head_dim,
        qk_scale=problem.qk_scale,
    )
