"""mla_decode of few columns over lists of rows of 8-bit codes with e8m0 scales: pairs of warps that have tokens of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvgen.layout.storage import Segment
from kvgen.lowering.attention.mla import MEMORY, THREADS
from kvgen.lowering.attention.mla_lists import ListContext
from kvgen.lowering.attention.mma import SIZES, Stages
from kvgen.lowering.attention.split_kv import Attended
from kvgen.schema.cache import Cache
from kvgen.schema.kernel_set import KernelSet
from kvgen.schema.keys import Keys

TEMPLATE: Final = "ops/mla_decode_pairs.cu.j2"
COLS: Final = 16
PAIRS: Final = 4
TOKENS: Final = 16
# Dims of a row: two warps' sums, 16 columns of 256 dims each, are 128 registers a thread.
DIMS: Final = 512
MOST_STAGES: Final = 4
LEAST_STAGES: Final = 3
# Steps of 16 dims whose Q a thread keeps, of a half's 16: 4 registers each with 16 columns.
HELD: Final = {8: 16, 16: 8}
# Where a half of the dims ends in the middle of a row, the other one still has a group of codes.
_HALF: Final = DIMS // 2


@dataclass(frozen=True)
class PairRow:
    """A row as every cache of the lists stores it: `latent` codes, then what is not quantized, a scale each `group_dims`
    codes; `row_bytes` are copied of it. Its scales lie behind the codes, or apart: then `scale_bytes` of them are copied."""

    latent: int
    group_dims: int
    row_bytes: int
    scales_apart: bool
    scale_bytes: int


@dataclass(frozen=True)
class PairsShape:
    """A block's work: `cols` columns, `pairs` pairs of warps, tiles of `tokens` rows, `pitch` bytes from row to row in shared
    memory and `scale_pitch` from a token's scales to the next one's. `held` of a warp's steps of Q are in registers.

    Bytes of shared memory: `ring_bytes` for each of `stages` and `union_bytes` of Q and scores, which become `merged_bytes` of
    results at the end, and `beside_bytes`.
    """

    cols: int
    pairs: int
    tokens: int
    latent: int
    group_dims: int
    row_bytes: int
    scales_apart: bool
    scale_bytes: int
    pitch: int
    scale_pitch: int
    held: int
    stages: Stages
    ring_bytes: int
    union_bytes: int
    merged_bytes: int
    beside_bytes: int

    def shared(self, arch: str) -> int:
        """Bytes of shared memory of a block on this architecture."""
        return _shared(int(getattr(self.stages, SIZES[arch])), self)


@dataclass(frozen=True)
class MlaPairsContext:
    """Everything ops/mla_decode_pairs.cu.j2 reads; `qk_scale` turns products into scores in base 2."""

    d: Attended
    lists: tuple[ListContext, ...]
    shape: PairsShape
    threads: int
    slack: int
    head_dim: int
    qk_scale: str


def rows_hindrance(kernels: KernelSet, sources: tuple[Keys, ...]) -> str:
    """Why a set's columns and rows are none for codes as they are stored; empty where they are."""
    caches = (kernels.kv, *(keys.cache for keys in sources))
    if kernels.q_heads > COLS:
        return f"a pair of warps has {COLS} columns"
    if any(cache.head_dim != DIMS or cache.latent_part != DIMS for cache in caches):
        return f"rows are not {DIMS} dims that are all of V"
    rows = {_row_of(cache) for cache in caches}
    if None in rows or len(rows) > 1:
        return "rows are not all of e4m3 codes with e8m0 scales, in one order"
    return ""


def hindrance(kernels: KernelSet, sources: tuple[Keys, ...]) -> str:
    """Why a set's lists do not go through this kernel; empty where they do."""
    if hindered := rows_hindrance(kernels, sources):
        return hindered
    if _stages(kernels, pair_row(kernels.kv)) is None:
        return f"{', '.join(kernels.arch)}: {LEAST_STAGES} tiles of every pair do not fit shared memory"
    return ""


def pair_row(cache: Cache) -> PairRow:
    """How its rows are stored."""
    found = _row_of(cache)
    assert found is not None
    return found


def _row_of(cache: Cache) -> PairRow | None:
    """None where pairs of warps cannot take the cache's rows as they are stored."""
    codes, *more = cache.storage.roles["k"]
    scales = codes.scales
    if cache.dtype == "f32" or codes.region.dtype.name != "e4m3" or scales is None or scales.region is None:
        return None
    group = scales.block[2]
    if scales.dtype.name != "e8m0" or scales.block[:2] != (1, 1) or group not in (32, 64):
        return None
    if codes.size < _HALF or (codes.size - _HALF) % group or not _in_bytes(codes, 1):
        return None
    end = codes.size
    for plain in more:
        beside = plain.base == codes.base and plain.region.byte_offset == codes.region.byte_offset + end
        if plain.scales is not None or plain.region.dtype.bits != 16 or not beside or not _in_bytes(plain, 2):
            return None
        if _step(plain) != _step(codes):
            return None
        end += 2 * plain.size
    return _with_scales(codes, end)


def _with_scales(codes: Segment, end: int) -> PairRow | None:
    """The same row, by where its scales lie: behind its bytes, or in whole words apart."""
    scales = codes.scales
    assert scales is not None and scales.region is not None
    size, group = codes.size, scales.block[2]
    step = (scales.region.stride_of("token") or 0) * scales.dtype.bytes
    at = scales.region.byte_offset - codes.region.byte_offset
    if scales.base == codes.base and at == end == size and step == _step(codes) and size // group == 16:
        return PairRow(size, group, end + 16, scales_apart=False, scale_bytes=16)
    wide = 8 if group == 64 else 16
    if step != wide or (scales.base == codes.base and at % wide):
        return None
    return PairRow(size, group, end, scales_apart=True, scale_bytes=wide)


def _in_bytes(segment: Segment, nbytes: int) -> bool:
    """Whether a row's part is a run of whole accesses."""
    region = segment.region
    return region.run == segment.size and region.vector * nbytes == 16 and _step(segment) % 16 == 0


def _step(segment: Segment) -> int:
    return (segment.region.stride_of("token") or 0) * segment.region.dtype.bytes


def pairs_shape(kernels: KernelSet) -> PairsShape:
    """How a block divides its work, where nothing hinders it."""
    row = pair_row(kernels.kv)
    stages = _stages(kernels, row)
    assert stages is not None
    return _shape(kernels, row, stages)


def _stages(kernels: KernelSet, row: PairRow) -> Stages | None:
    """As many tiles a pair as fit each size of memory; None where one has no room for the fewest."""
    sizes = {SIZES[a] for a in kernels.arch}
    found = dict.fromkeys(MEMORY, 0)
    for name in sizes:
        fits = [
            n for n in range(LEAST_STAGES, MOST_STAGES + 1) if _shared(n, _shape(kernels, row, None)) <= MEMORY[name]
        ]
        if not fits:
            return None
        found[name] = fits[-1]
    return Stages(**found)


def _shape(kernels: KernelSet, row: PairRow, stages: Stages | None) -> PairsShape:
    cols = 8 if kernels.q_heads <= 8 else COLS
    pitch = (row.row_bytes // 16 | 1) * 16
    apart = row.scale_bytes * row.scales_apart
    ring = PAIRS * TOKENS * (pitch + apart)
    union = 2 * cols * DIMS + PAIRS * 2 * 2 * 4 * TOKENS * cols
    return PairsShape(
        cols=cols,
        pairs=PAIRS,
        tokens=TOKENS,
        latent=row.latent,
        group_dims=row.group_dims,
        row_bytes=row.row_bytes,
        scales_apart=row.scales_apart,
        scale_bytes=row.scale_bytes,
        pitch=pitch,
        scale_pitch=row.scale_bytes if row.scales_apart else pitch,
        held=HELD[cols],
        stages=stages or Stages(0, 0, 0),
        ring_bytes=ring,
        union_bytes=union,
        merged_bytes=PAIRS * 4 * cols * (DIMS + 6),
        beside_bytes=4 * cols,
    )


def _shared(stages: int, shape: PairsShape) -> int:
    """What a block has with so many tiles a pair; results take the place of rows, Q and scores."""
    return max(stages * shape.ring_bytes + shape.union_bytes, shape.merged_bytes) + shape.beside_bytes


__all__ = ["TEMPLATE", "THREADS", "MlaPairsContext", "PairsShape", "hindrance", "pairs_shape"]
