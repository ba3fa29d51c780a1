"""How mla_decode divides its work: a latent row in shared memory, tiles of tokens and columns, the warps of a product."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from kvgen.layout.storage import Segment
from kvgen.lowering.attention.mma import SIZES, Stages
from kvgen.schema.cache import Cache

WARPS: Final = 8
THREADS: Final = 32 * WARPS
# Shared memory that a block may have, in bytes, by the size of Stages.
MEMORY: Final = {"large": 227 << 10, "middle": 163 << 10, "small": 99 << 10}
MOST_STAGES: Final = 6


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
    tile's rows.
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
        """What one more stage takes."""
        return self.rows + self.addresses

    @property
    def shared(self) -> tuple[int, ...]:
        """What is there for all stages, without what this kernel does not have."""
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

    def shared(self, arch: str) -> int:
        """Bytes of shared memory of a block on this architecture."""
        return self.memory.fixed + self.memory.stage * int(getattr(self.stages, SIZES[arch]))


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


@lru_cache(maxsize=256)  # a plan asks for it in many places
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


@lru_cache(maxsize=256)
def shape_of(row: LatentRow, cache: Cache, columns: int, archs: tuple[str, ...]) -> Shape:
    """The largest tile of columns that fits, with as many stages as fit; one block fills a multiprocessor's shared memory. Raises
    ValueError, which says why, where none fits.

    16-bit rows come in tiles of 32 tokens, so that several are in flight; codes have half the bytes, and twice the tokens.
    """
    sizes = {SIZES[a] for a in archs}
    wanted = 64 if columns > 32 else 32 if columns > 16 else 16 if columns > 8 else 8
    while wanted >= 8:
        found = _shape(row, cache, wanted, sizes)
        if found is not None:
            return found
        wanted //= 2
    limit = min(MEMORY[size] for size in sizes) >> 10
    raise ValueError(f"no room for two tiles of rows of {row.pitch} bytes in {limit} KB of shared memory")


def _shape(row: LatentRow, cache: Cache, cols: int, sizes: set[str]) -> Shape | None:
    """A block of so many columns, None where one of the sizes of memory has no room for two stages."""
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
        scales=-(-4 * warps_m * row.groups // 16) * 16,
    )
    most = min(MOST_STAGES, THREADS // tokens)
    counts = {name: min(most, (memory - size.fixed) // size.stage) for name, memory in MEMORY.items()}
    # The result takes the place of rows, Q and scores.
    out = 4 * cols * (cache.latent_part + 6)
    if any(counts[name] < 2 or counts[name] * tile + size.query + size.scores < out for name in sizes):
        return None
    stages = Stages(**{name: count if name in sizes else 0 for name, count in counts.items()})
    return Shape(cols, tokens, stages, warps_m, warps_n, warps_k, held, apart, size)
