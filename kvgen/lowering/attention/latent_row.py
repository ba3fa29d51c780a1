"""A latent row in shared memory: as it is stored, with its runs of bytes and its scales; or rounded to one type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvgen.layout.storage import Segment
from kvgen.schema.cache import Cache

# Warps of a block that multiplies rows as they are stored, each of which has some of V's dims.
WARPS: Final = 8


@dataclass(frozen=True)
class RunContext:
    """Bytes of a row that are neighbours in memory: from `struct`'s first element on, `chunks` times 16 bytes, to byte `at` of
    the row in shared memory. `lanes` lanes copy `together` rows."""

    struct: str
    at: int
    chunks: int
    lanes: int
    together: int


@dataclass(frozen=True)
class LatentRow:
    """A row in shared memory, in bytes: `pitch` from one to the next, RoPE and f32 scales at `rope_at` and `scale_at`.

    `latent_bytes` are what K's first segment has, `rope_bytes` its second (0: there is none). `groups` scales a row, each of
    `group_dims` dims (0: no scales); `pool_scales`: they lie in a pool of their own, are copied one by one, and follow a
    tile's rows. A row without runs is rounded: it comes through registers.
    """

    runs: tuple[RunContext, ...]
    pitch: int
    latent_bytes: int
    rope_bytes: int
    rope_at: int
    scale_at: int
    groups: int
    group_dims: int
    pool_scales: bool

    @property
    def rounded(self) -> bool:
        """The row's elements are all of the cache's dtype, whatever the pool holds."""
        return not self.runs


def rounded_row(cache: Cache) -> LatentRow:
    """A row whose elements are all of the cache's dtype, 16 bits each."""
    return LatentRow(
        runs=(),
        pitch=(cache.head_dim // 8 | 1) * 16,
        latent_bytes=2 * cache.head_dim,
        rope_bytes=0,
        rope_at=0,
        scale_at=0,
        groups=0,
        group_dims=0,
        pool_scales=False,
    )


def _run(struct: str, at: int, nbytes: int, step: int) -> RunContext:
    """Eight lanes a row write to all banks; rows that begin in the middle of a sector go in pairs, so that none is read twice."""
    chunks = nbytes // 16
    if step % 32:
        return RunContext(struct, at, chunks, 32, 2)
    lanes = next(n for n in (8, 4, 2, 1) if chunks % n == 0)
    return RunContext(struct, at, chunks, lanes, 1)


def _check_segment(segment: Segment, name: str) -> None:
    region = segment.region
    if region.run != segment.size or region.vector * region.dtype.bits != 128:
        raise ValueError(f"{name} does not come in pieces of 16 bytes: layout {region.text!r}")
    if segment.size * region.dtype.bits % 256:
        raise ValueError(f"{name} has {segment.size} dims of {region.dtype.name}, no multiple of 32 bytes")


def latent_row(cache: Cache) -> LatentRow:
    """How a row of the cache lies in shared memory; raises ValueError, which says why, where products cannot be made of rows as
    they are stored."""
    latent, *more = cache.storage.roles["k"]
    kind, scales = latent.region.dtype, latent.scales
    if cache.dtype == "f32" or kind.name not in ("bf16", "f16", "e4m3"):
        raise ValueError(f"rows of {kind.name}")
    _check_segment(latent, "the latent part" if more else "a row")
    if cache.latent_part > latent.size:
        raise ValueError(f"V has dims of {kind.name} and others")
    if cache.latent_part * kind.bits % 256:
        raise ValueError(f"V has {cache.latent_part} dims of {kind.name}, no multiple of 32 bytes")
    for segment in more:
        _check_segment(segment, "the RoPE part")
    if scales is not None and (scales.dtype.name != "f32" or scales.zero or scales.block[0] != 1 or scales.array):
        given = ", given by the caller" if scales.array else ", with zero points" if scales.zero else ""
        raise ValueError(f"scales of {scales.dtype.name}{given}")
    latent_bytes = latent.size * kind.bytes
    rope_bytes = sum(s.size * s.region.dtype.bytes for s in more)
    step = _step(latent)
    rope_at, scale_at, end = latent_bytes, 0, latent_bytes + rope_bytes
    groups = scales.groups if scales else 0
    pool_scales = scales is not None and scales.base != latent.base
    runs = [_run("Key", 0, latent_bytes, step)]
    for segment in more:
        if segment.base == latent.base and _step(segment) == step:
            rope_at = segment.region.byte_offset - latent.region.byte_offset
            end = rope_at + rope_bytes
            runs = [_run("Key", 0, end, step)]
        else:
            runs.append(_run("KeyRope", rope_at, rope_bytes, _step(segment)))
    if scales is not None and not pool_scales:
        assert scales.region is not None
        scale_at = scales.region.byte_offset - latent.region.byte_offset
        if not 0 <= scale_at < end:
            raise ValueError("scales lie behind the rows of their page, or behind all of their row")
    dims = scales.block[2] if scales else 0
    row = LatentRow(
        runs=tuple(runs),
        pitch=(end // 16 | 1) * 16,
        latent_bytes=latent_bytes,
        rope_bytes=rope_bytes,
        rope_at=rope_at,
        scale_at=scale_at,
        groups=groups,
        group_dims=dims,
        pool_scales=pool_scales,
    )
    each = -(-cache.latent_part // (WARPS * 32)) * 32
    if groups > 1 and (dims % each or latent.size % dims):
        raise ValueError(f"a warp has {each} dims of V, which share no scale: {dims} dims do")
    return row


def _step(segment: Segment) -> int:
    """Bytes from a token's row to the next."""
    return (segment.region.stride_of("token") or 0) * segment.region.dtype.bytes
