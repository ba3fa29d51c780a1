"""indexer_scores: which rows of keys it takes, a block's tiles and shared memory, products of warpgroups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvgen.architectures import BLOCK_CHARGE, Arch, architecture
from kvgen.lowering.lowered import lower
from kvgen.schema.cache import Cache
from kvgen.schema.kernel_set import KernelSet

THREADS: Final = 128
# Keys of a tile, one a thread.
TOKENS: Final = 128
# Blocks of a multiprocessor that registers leave room for; shared memory may leave room for fewer.
BLOCKS: Final = 2
# Stages of the ring by the bytes of a row: 24 to 32 KB in flight a block.
STAGES: Final = {64: 4, 128: 3, 256: 2}
# Bytes of a row of q in shared memory where keys are e2m1: those of bf16.
WIDE: Final = 256
# Columns that products of warpgroups have in device/mma, the most first.
COLUMNS: Final = (128, 64, 32)
# Bytes of a key's scales, one copy.
_SCALE: Final = 4
# Bytes of static shared memory of a block, to which dynamic ones are aligned.
STATIC: Final = 1 << 10


@dataclass(frozen=True)
class IndexerShape:
    """A block's work: q and the weights of its rows, `stages` tiles of keys of `row_bytes` each; `members` are the bytes of the
    template's struct: q, the ring, weights, scales, and of lists which columns name a key. `packed`: keys are e2m1, with four
    scales each. `together` rows of q are a product of a warpgroup, 0: none is one."""

    stages: int
    row_bytes: int
    scaled: bool
    packed: bool
    together: int
    members: tuple[int, ...]

    @property
    def shared(self) -> int:
        """Dynamic shared memory of a block."""
        return sum(self.members)

    def blocks_on(self, arch: Arch) -> int:
        """Blocks of a multiprocessor."""
        return min(BLOCKS, architecture(arch).shared // (self.shared + STATIC + BLOCK_CHARGE)) or 1


def indexer_shape(kernels: KernelSet, rows: int, *, lists: bool = False) -> IndexerShape:
    """The work of a block of a set's kernel, for `rows` rows of q at once; raises ValueError where the cache is none that it can
    score. `lists`: rows have lists of keys."""
    cache, heads = kernels.kv, kernels.q_heads
    row_bytes = _row_bytes(cache)
    if heads % 8:
        raise ValueError(f"q_heads: got {heads} for indexer_scores; a product has 8 heads; use a multiple of 8")
    stages, quant = STAGES[row_bytes], cache.quants["k"]
    packed = quant is not None and quant.codes.packed
    members = (
        rows * heads * (WIDE if packed else row_bytes),
        stages * TOKENS * row_bytes,
        4 * rows * heads,
        4 * stages * TOKENS,
        *((stages * TOKENS // 8,) if lists else ()),
    )
    small = [arch for arch in kernels.arch if sum(members) + STATIC > architecture(arch).block_shared]
    if small:
        limit = min(architecture(arch).block_shared for arch in small) >> 10
        raise ValueError(
            f"rows: got {rows} for indexer_scores with {heads} heads; q and the keys' tiles take {sum(members) >> 10} KB of "
            f"shared memory, of which {', '.join(small)} ha{'s' if len(small) == 1 else 've'} {limit} KB; use fewer rows"
        )
    together = max((n for n in range(1, rows + 1) if rows % n == 0 and n * heads in COLUMNS), default=0)
    return IndexerShape(stages, row_bytes, quant is not None, packed, together, members)


def _row_bytes(cache: Cache) -> int:
    """Bytes of a key's elements."""
    if cache.kv_heads != 1 or cache.latent_part:
        raise ValueError(
            f"ops: got indexer_scores with {type(cache).__name__} of {cache.kv_heads} heads; an indexer has one head of keys; "
            "use a cache with kv_heads=1, such as presets.vllm_indexer()"
        )
    if lower(cache).table.window or cache.page_table.separate_kv or cache.page_tokens is None:
        raise ValueError(
            f"ops: got indexer_scores with {type(cache).__name__} and table={type(cache.page_table).__name__}(); it scores all "
            "keys of a request, in pages; use Dense, CSR, Indirect or Mapped"
        )
    (segment, *more), quant = cache.storage.roles["k"], cache.quants["k"]
    region, kind = segment.region, segment.region.dtype
    if kind.name not in ("e4m3", "e2m1", "bf16", "f16") or more:
        raise ValueError(
            f"ops: got indexer_scores with keys of {kind.name}; it multiplies on tensor cores; use bf16 or f16, "
            "Quant(dtype='e4m3', scale_dtype='f32'), or e2m1 with e8m0 scales"
        )
    nbytes = segment.size * kind.bits // 8
    if (
        nbytes not in STAGES
        or (kind.bits == 4) != (nbytes == min(STAGES))
        or region.run != segment.size
        or region.vector * kind.bits != 128
    ):
        raise ValueError(
            f"ops: got indexer_scores with {segment.size} dims of {kind.name} in the layout {region.text!r}; it copies rows of "
            "128 or 256 bytes, or 128 dims of e2m1, in pieces of 16; use such a head_dim, and a layout whose last axis is dim"
        )
    if quant is None:
        return nbytes
    scales, wanted = segment.scales, ("e8m0", (1, 1, 32)) if kind.packed else ("f32", (1, 1, segment.size))
    if (
        scales is None
        or scales.array
        or scales.zero
        or (scales.dtype.name, scales.block) != wanted
        or cache.storage.residual
        or segment.global_scale
    ):
        raise ValueError(
            "ops: got indexer_scores with keys whose scales it does not take; they are computed, without zero points: one of f32 "
            "a key of e4m3, one of e8m0 for 32 dims of e2m1; use Quant(dtype='e4m3', scale_dtype='f32', "
            "block=Block(dim=head_dim))"
        )
    base = cache.storage.base(scales.base)
    if cache.storage.tensor(base.tensor).align % _SCALE or (scales.region and scales.region.byte_offset % _SCALE):
        raise ValueError(
            f"ops: got indexer_scores with scales of {scales.dtype.name} in {base.tensor}, which may begin anywhere; the scales "
            f"of a key are copied as {_SCALE} bytes; use place='page'"
        )
    return nbytes
