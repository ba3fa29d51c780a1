"""convert: move tokens, or some of their heads, from a cache of another spec into this one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from pydantic import Field, SerializeAsAny

from kvgen.expr.nodes import ceil_div, const, var
from kvgen.layout.dtypes import DTYPES, dtype
from kvgen.layout.storage import Scales, Segment
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.lowered import LoweredCache, lower
from kvgen.lowering.row_runs import StoredRun, View, across, check_writes, stored_runs
from kvgen.lowering.row_tiling import scales_by_token
from kvgen.lowering.segments import STRUCTS, ScaleContext, SegmentContext, lane_accesses
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import OtherCache, Param, Scalar, Size
from kvgen.schema.cache import Cache
from kvgen.schema.kernel_set import KernelSet, Op

THREADS: Final = 256
_MOST_ROWS: Final = 32
_WAITING_BYTES: Final = 24 << 10  # of scales, in shared memory
_MOST_WAITING: Final = 47 << 10  # of a row, where no fewer bytes are possible
_SIZES: Final = {d.c: d.bytes for d in DTYPES.values() if d.bits % 8 == 0}


@dataclass(frozen=True)
class CopyContext:
    """A run that is copied element by element, `load` and `store` being views of device/cache/stored.cuh with the same type.

    `across`: neighbouring threads take neighbouring tokens, which share a sector of this cache.
    """

    name: str
    title: str
    load: View
    store: View
    type: str
    width: int
    vectors: int
    across: bool


@dataclass(frozen=True)
class BlockContext:
    """A segment whose scales are chosen anew, block by block, from values of C type `value`."""

    segment: SegmentContext
    scales: ScaleContext
    load: View
    value: str
    across: bool
    scales_across: bool


@dataclass(frozen=True)
class ConvertContext:
    """Everything ops/convert.cu.j2 reads."""

    entry: str
    header: str
    params: tuple[str, ...]
    copies: tuple[CopyContext, ...]
    blocks: tuple[BlockContext, ...]
    threads: int
    rows: int
    heads: int
    moves_heads: bool
    from_head: bool
    to_head: bool


class Convert(Op):
    """Copy all tokens from a cache of another spec into this one: other layout, dtype, quantization, page table or heads.

    `source` is that spec; the call takes a layer of such a cache. Of every request it copies the tokens that the source
    holds by the source's lengths: [0, length), or the last `window` where either cache is a ring. This cache's lengths are
    not read; its page table must have the pages. The launch has room for the source's `max_cache_length` tokens a request.
    The two caches share no memory. A request whose length the source's table cannot hold, and tokens without a valid page on
    either side, are skipped and reported.

    Unquantized elements of one dtype are copied bit for bit, of two dtypes through f32, rounded once. Segments that both
    caches quantize alike (code, block, recipe) keep their codes and scales. Codes under scales of the caller's, and "global"
    factors, are kept with `same_scales=True` alone (default False), which says that both caches are given the same scales.
    Everything else is dequantized in f32 and quantized as append does. A source with residual is read, its tail included; a
    target with residual is refused.

    With `heads` the caches may have different kv heads, as ranks of different tensor-parallel sizes do: of every token so
    many neighbouring heads move. `source_head` is the first of them in the source, `target_head` the one that it becomes here;
    each is an argument where its cache has more heads than move. This cache's other heads stay as they are. Where
    neighbouring heads share scales that are stored, whole blocks of heads move.
    """

    kind: ClassVar[str] = "convert"
    source: SerializeAsAny[Cache]
    """Cache whose tokens are read, as a spec; the generated module has a class `SourceCache` for it."""
    same_scales: bool = False
    """True: the caller's given scales are the same in both caches, of the heads that move, so codes under them are copied as
    they are.
    """
    heads: int | None = Field(default=None, ge=1)
    """kv heads of each token that a call moves. None: all, and both caches have as many."""

    def check(self, kernels: KernelSet) -> None:
        cache, source = kernels.kv, self.source
        for name, mine, other in (
            ("stores", cache.stores, source.stores),
            ("head_dim", cache.head_dim, source.head_dim),
            ("v_head_dim", cache.v_dim, source.v_dim),
        ):
            if mine != other:
                raise ValueError(
                    f"source: got {name}={other!r} for a cache with {name}={mine!r}; tokens keep their shape; give a source "
                    f"with {name}={mine!r}"
                )
        self._check_heads(cache)
        check_writes(self.name, cache)
        _, blocks = _plan_segments(lower(cache), lower(self.source), self._moved(cache), same_scales=self.same_scales)
        if _waiting(blocks) > _MOST_WAITING:
            raise ValueError(
                f"ops: got {self.name} into a cache with {_waiting(blocks)} bytes of scales a token; they wait in shared "
                f"memory, of which a block has {_MOST_WAITING}; use scales of larger blocks, or a narrower scale_dtype"
            )

    def _moved(self, cache: Cache) -> int:
        """Heads of a token that move."""
        return cache.kv_heads if self.heads is None else self.heads

    def _check_heads(self, cache: Cache) -> None:
        """Raise ValueError where the heads that move are not all there in both caches, or share scales with others."""
        mine, other = cache.kv_heads, self.source.kv_heads
        if self.heads is None and mine != other:
            raise ValueError(
                f"source: got kv_heads={other} for a cache with kv_heads={mine}; all heads of a token move; give a source with "
                f"kv_heads={mine}, or say how many heads move, as heads={min(mine, other)}"
            )
        if self.heads is None:
            return
        if self.heads > min(mine, other):
            raise ValueError(
                f"heads: got {self.heads} with kv_heads={mine} here and kv_heads={other} in source; a call moves heads that both "
                f"caches have; give at most {min(mine, other)}"
            )
        for segment in cache.storage.segments:
            shared = _sharers(segment)
            if self.heads % shared:
                raise ValueError(
                    f"heads: got {self.heads} for a cache in which {shared} heads share a scale (block.head); new values of some "
                    f"would change it for the others; give a multiple of {shared}, or a quant with block.head=1"
                )

    def _first_heads(self, cache: Cache) -> tuple[Scalar, ...]:
        """The arguments that say which heads move, and where they go."""
        moved, source = self._moved(cache), self.source
        from_step, to_step = _head_steps(cache, source, same_scales=self.same_scales)
        found = []
        for name, whole, step, doc in (
            ("source_head", source.kv_heads, from_step, "the first head of the source that moves"),
            ("target_head", cache.kv_heads, to_step, "the head of this cache that it becomes"),
        ):
            if whole > moved:
                most = (whole - moved) // step * step
                steps = f"a multiple of {step}, " if step > 1 else ""
                found.append(Scalar(name, "u32", doc=f"{doc}: {steps}{most} at most", most=most, multiple=step))
        return tuple(found)

    def other_caches(self) -> dict[str, Cache]:
        return {self.source_class: self.source}

    @property
    def source_class(self) -> str:
        """The class of the source in the generated module."""
        return "".join(part.title() for part in self.name.split("_")) + "Source"

    def _window(self, cache: Cache) -> int:
        """Tokens of a request that are moved at most; 0: all."""
        windows = (lower(c).table.window for c in (cache, self.source))
        return min((w for w in windows if w), default=0)

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache, moved = kernels.kv, self._moved(kernels.kv)
        heads = self._first_heads(cache)
        params: tuple[Param, ...] = (
            OtherCache(
                "source",
                self.source_class,
                window=self._window(cache),
                doc=f"of a {self.source_class}, which is read",
            ),
            Size("max_tokens", "u32", "source_tokens"),
            *heads,
            ERRORS,
        )
        copies, blocks = _plan_segments(lower(cache), lower(self.source), moved, same_scales=self.same_scales)
        rows = _rows(copies, blocks)
        context = ConvertContext(
            entry=entry_name(kernels, self.name),
            header=f"{self.name}_source.cuh",
            params=tuple(p.declaration for p in params),
            copies=copies,
            blocks=blocks,
            threads=THREADS,
            rows=rows,
            heads=moved,
            moves_heads=bool(heads),
            from_head=any(p.name == "source_head" for p in heads),
            to_head=any(p.name == "target_head" for p in heads),
        )
        grid = (ceil_div(var("source_tokens"), rows) * var("B"), const(1), const(1))
        plan = KernelPlan(
            self.name, context.entry, "ops/convert.cu.j2", context, params, grid, THREADS, writes_pool=True
        )
        return (plan,)


def _rows(copies: tuple[CopyContext, ...], blocks: tuple[BlockContext, ...]) -> int:
    """Tokens of a block: a power of two, as many as give a thread four accesses; at least as share sectors."""
    vectors = sum(c.vectors for c in copies) + sum(b.scales.blocks * b.scales.lanes for b in blocks)
    rows = max(1, min(_MOST_ROWS, 1 << (4 * THREADS // vectors).bit_length() - 1 if vectors <= 4 * THREADS else 1))
    if any(c.across for c in copies) or any(b.across for b in blocks):
        rows = max(rows, 16)
    while rows > 1 and rows * _waiting(blocks) > _WAITING_BYTES:
        rows //= 2
    return rows


def _waiting(blocks: tuple[BlockContext, ...]) -> int:
    """Bytes of a token's scales in shared memory."""
    return sum(b.scales.blocks * b.scales.each * _SIZES[b.scales.type] for b in blocks)


def _sharers(segment: Segment) -> int:
    """Neighbouring heads that share scales which are stored."""
    return segment.scales.block[1] if segment.scales is not None and segment.scales.region is not None else 1


def _head_steps(cache: Cache, source: Cache, *, same_scales: bool) -> tuple[int, int]:
    """Steps of the first head that moves, in the source and here, by which whole blocks of scales move."""
    from_step = to_step = 1
    for role, parts in cache.storage.roles.items():
        for segment in parts:
            to_step = math.lcm(to_step, _sharers(segment))
            if any(
                _alike(segment, other, (cache.kv_heads, source.kv_heads), same_scales=same_scales)
                for other in source.storage.roles[role]
            ):
                from_step = math.lcm(from_step, _sharers(segment))
    return from_step, to_step


def _heads_alike(mine: Scales, other: Scales, whole: tuple[int, int]) -> bool:
    """True: scales are those of as many heads; of the caller's also whether they are those of all heads, `whole` here and
    there."""
    all_heads = (mine.block[1], other.block[1]) == whole
    return mine.block[1] == other.block[1] or (all_heads and bool(mine.array and other.array))


def _alike(mine: Segment, other: Segment, whole: tuple[int, int], *, same_scales: bool) -> bool:
    """True: the other segment's codes and scales mean the same here; `whole`: heads of this cache and of the other."""
    if (mine.begin, mine.size) != (other.begin, other.size) or mine.quant is None or other.quant is None:
        return False
    a, b = mine.quant, other.quant
    if (a.dtype, a.zero, a.scale_dtype, a.recipe, a.scale) != (b.dtype, b.zero, b.scale_dtype, b.recipe, b.scale):
        return False
    if (a.codebook, a.norm_correction, a.strided) != (b.codebook, b.norm_correction, b.strided):
        return False
    if mine.scales is None or other.scales is None:
        return mine.scales is other.scales
    mine_block, block = mine.scales.block, other.scales.block
    if (mine_block[0], mine_block[2]) != (block[0], block[2]) or b.residual:
        return False
    if not _heads_alike(mine.scales, other.scales, whole):
        return False
    return same_scales or (a.scale == "computed" and a.recipe != "global")


def _plan_segments(
    cache: LoweredCache, source: LoweredCache, heads: int, *, same_scales: bool
) -> tuple[tuple[CopyContext, ...], tuple[BlockContext, ...]]:
    """How so many heads of each segment of the cache come about."""
    whole = (cache.spec.kv_heads, source.spec.kv_heads)
    copies: list[CopyContext] = []
    blocks: list[BlockContext] = []
    shown = iter(cache.segments)
    for role, parts in cache.spec.storage.roles.items():
        others = source.spec.storage.roles[role]
        for segment in parts:
            s = next(shown)
            same = [o for o in others if (o.begin, o.size) == (segment.begin, segment.size)]
            if same and _alike(segment, same[0], whole, same_scales=same_scales):
                copies += _stored_copies(cache, source, s, heads)
                continue
            other = same[0] if same else None
            plain = all(o.quant is None for o in others) or (other is not None and other.quant is None)
            value = dtype(source.spec.dtype) if plain else dtype("f32")
            struct = s.struct if other is not None else ""
            load = (
                View("Values", struct, (value.c,))
                if struct
                else View("RoleValues", f"{STRUCTS[role]}Role", (value.c, segment.begin, segment.size))
            )
            # Accesses begin and end with the source's segments.
            edges = math.gcd(segment.begin, segment.size, *(n for o in others for n in (o.begin, o.size)))
            if s.computed:
                scales = _narrowed(s, s.scales[0], edges, heads)
                by_token = scales_by_token(cache, role, segment.begin)
                blocks.append(
                    BlockContext(s, scales, load, value.c, across(segment.region, _row_bytes(segment, heads)), by_token)
                )
                continue
            is_across = across(segment.region, _row_bytes(segment, heads))
            bits = max(segment.region.dtype.bits, *(o.region.dtype.bits for o in others))
            width = min(min(o.vector for o in others) if is_across else segment.vector, 128 // bits)
            while edges % width:
                width //= 2
            width = max(width, segment.region.dtype.together)
            copies.append(
                CopyContext(
                    name=f"{s.struct}Values",
                    title=s.title,
                    load=load,
                    store=View("Values", s.struct, (value.c,)),
                    type=value.c,
                    width=width,
                    vectors=heads * s.size // width,
                    across=is_across,
                )
            )
    return tuple(copies), tuple(blocks)


def _row_bytes(segment: Segment, heads: int) -> int:
    """Bytes of so many heads of a token."""
    return segment.region.dtype.size_of(heads * segment.size)


def _narrowed(s: SegmentContext, q: ScaleContext, edges: int, heads: int) -> ScaleContext:
    """The walk over a block in accesses that also end where the source's segments do, and the blocks of so many heads."""
    width = q.width
    while edges % width:
        width //= 2
    block = q.heads * q.dims
    lanes, chunks = lane_accesses(block, width, q.byte_codes)
    return replace(
        q,
        blocks=q.blocks * heads // s.heads,
        lanes=lanes,
        width=width,
        chunks=chunks,
        whole=block % (width * lanes) == 0 and s.size % q.dims == 0,
    )


def _stored_copies(cache: LoweredCache, source: LoweredCache, s: SegmentContext, heads: int) -> list[CopyContext]:
    """Codes of so many heads, and scales where writes compute them, as they are."""
    mine, others = (_runs_of(stored_runs(c), s.struct) for c in (cache, source))
    found = []
    for run, other in zip(mine, others, strict=True):
        is_across = run.across
        width = other.vector if is_across else min(run.vector, other.vector)
        found.append(
            CopyContext(
                name=s.struct + run.view.policy,
                title=run.title,
                load=other.view,
                store=run.view,
                type=run.element.c,
                width=width,
                vectors=run.row * heads // (s.heads * width),
                across=is_across,
            )
        )
    return found


def _runs_of(runs: tuple[StoredRun, ...], struct: str) -> list[StoredRun]:
    """Runs of one segment."""
    return [r for r in runs if r.struct == struct]
