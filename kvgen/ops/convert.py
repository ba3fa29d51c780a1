"""convert: move tokens from a cache of another spec into this one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from pydantic import SerializeAsAny

from kvgen.expr.nodes import ceil_div, const, var
from kvgen.layout.dtypes import DTYPES, dtype
from kvgen.layout.storage import Segment
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.lowered import LoweredCache, lower
from kvgen.lowering.row_runs import StoredRun, View, across, check_writes, stored_runs
from kvgen.lowering.row_tiling import scales_by_token
from kvgen.lowering.segments import STRUCTS, ScaleContext, SegmentContext
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import OtherCache, Size
from kvgen.spec.cache import Cache
from kvgen.spec.kernel_set import KernelSet, Op

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


class Convert(Op):
    """Copy all tokens from a cache of another spec into this one: other layout, dtype, quantization or page table.

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
    """

    kind: ClassVar[str] = "convert"
    source: SerializeAsAny[Cache]
    """Cache whose tokens are read, as a spec; the generated module has a class `SourceCache` for it."""
    same_scales: bool = False
    """True: the caller's given scales are the same in both caches, so codes under them are copied as they are."""

    def check(self, kernels: KernelSet) -> None:
        cache, source = kernels.cache, self.source
        for name, mine, other in (
            ("stores", cache.stores, source.stores),
            ("kv_heads", cache.kv_heads, source.kv_heads),
            ("head_dim", cache.head_dim, source.head_dim),
            ("v_head_dim", cache.v_dim, source.v_dim),
        ):
            if mine != other:
                raise ValueError(
                    f"source: got {name}={other!r} for a cache with {name}={mine!r}; tokens keep their shape; give a source "
                    f"with {name}={mine!r}"
                )
        check_writes(self.name, cache)
        _, blocks = _plan_segments(lower(cache), lower(self.source), same_scales=self.same_scales)
        if _waiting(blocks) > _MOST_WAITING:
            raise ValueError(
                f"ops: got {self.name} into a cache with {_waiting(blocks)} bytes of scales a token; they wait in shared "
                f"memory, of which a block has {_MOST_WAITING}; use scales of larger blocks, or a narrower scale_dtype"
            )

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
        cache = kernels.cache
        params = (
            OtherCache(
                "source",
                self.source_class,
                window=self._window(cache),
                doc=f"of a {self.source_class}, which is read",
            ),
            Size("max_tokens", "u32", "source_tokens"),
            ERRORS,
        )
        copies, blocks = _plan_segments(lower(cache), lower(self.source), same_scales=self.same_scales)
        rows = _rows(copies, blocks)
        context = ConvertContext(
            entry=entry_name(kernels, self.name),
            header=f"{self.name}_source.cuh",
            params=tuple(p.declaration for p in params),
            copies=copies,
            blocks=blocks,
            threads=THREADS,
            rows=rows,
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


def _alike(mine: Segment, other: Segment, *, same_scales: bool) -> bool:
    """Whether the other segment's codes and scales mean the same here."""
    if (mine.begin, mine.size) != (other.begin, other.size) or mine.quant is None or other.quant is None:
        return False
    a, b = mine.quant, other.quant
    if (a.dtype, a.zero, a.scale_dtype, a.recipe, a.scale) != (b.dtype, b.zero, b.scale_dtype, b.recipe, b.scale):
        return False
    if mine.scales is None or other.scales is None:
        return mine.scales is other.scales
    if mine.scales.block != other.scales.block or b.residual:
        return False
    return same_scales or (a.scale == "computed" and a.recipe != "global")


def _plan_segments(
    cache: LoweredCache, source: LoweredCache, *, same_scales: bool
) -> tuple[tuple[CopyContext, ...], tuple[BlockContext, ...]]:
    """How each segment of the cache comes about."""
    copies: list[CopyContext] = []
    blocks: list[BlockContext] = []
    shown = iter(cache.segments)
    for role, parts in cache.spec.storage.roles.items():
        others = source.spec.storage.roles[role]
        for segment in parts:
            s = next(shown)
            same = [o for o in others if (o.begin, o.size) == (segment.begin, segment.size)]
            if same and _alike(segment, same[0], same_scales=same_scales):
                copies += _stored_copies(cache, source, s)
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
                scales = _narrowed(s, s.scales[0], edges)
                by_token = scales_by_token(cache, role, segment.begin)
                blocks.append(BlockContext(s, scales, load, value.c, across(segment.region), by_token))
                continue
            is_across = across(segment.region)
            bits = max(segment.region.dtype.bits, *(o.region.dtype.bits for o in others))
            width = min(min(o.vector for o in others) if is_across else segment.vector, 128 // bits)
            while edges % width:
                width //= 2
            width = max(width, 2 if segment.region.dtype.packed else 1)
            copies.append(
                CopyContext(
                    name=f"{s.struct}Values",
                    title=s.title,
                    load=load,
                    store=View("Values", s.struct, (value.c,)),
                    type=value.c,
                    width=width,
                    vectors=s.heads * s.size // width,
                    across=is_across,
                )
            )
    return tuple(copies), tuple(blocks)


def _narrowed(s: SegmentContext, q: ScaleContext, edges: int) -> ScaleContext:
    """The walk over a block in accesses that also end where the source's segments do."""
    width = q.width
    while edges % width:
        width //= 2
    block = q.heads * q.dims
    lanes = min(32, 1 << (-(-block // width) - 1).bit_length())
    chunks = -(-block // (width * lanes))
    return replace(
        q,
        lanes=lanes,
        width=width,
        chunks=chunks,
        whole=block % (width * lanes) == 0 and s.size % q.dims == 0,
    )


def _stored_copies(cache: LoweredCache, source: LoweredCache, s: SegmentContext) -> list[CopyContext]:
    """Codes, and scales where writes compute them, as they are."""
    mine, others = (_runs_of(stored_runs(c), s.struct) for c in (cache, source))
    found = []
    for run, other in zip(mine, others, strict=True):
        is_across = across(run.region)
        width = other.vector if is_across else min(run.vector, other.vector)
        found.append(
            CopyContext(
                name=s.struct + run.view.policy,
                title=run.title,
                load=other.view,
                store=run.view,
                type=run.element.c,
                width=width,
                vectors=run.row // width,
                across=is_across,
            )
        )
    return found


def _runs_of(runs: tuple[StoredRun, ...], struct: str) -> list[StoredRun]:
    """Those of one segment."""
    return [r for r in runs if r.struct == struct]
