"""decode: attention of one query row per request over its cached tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field, field_validator

from kvgen.dtypes import dtype
from kvgen.expr import const, var
from kvgen.ops.cache import ERRORS, entry_name
from kvgen.ops.segments import SegmentContext, segments
from kvgen.plan import KernelPlan, Param
from kvgen.spec.kernel_set import KernelSet, Op
from kvgen.spec.table import IndexName

WARPS = 4
PLAN_THREADS = 256
# Tokens below which splitting a request further costs more than it gains.
MIN_CHUNK = 128
# Query and accumulator elements a thread keeps in registers as f32, each; twice this plus addresses stays below 255.
REGISTER_BUDGET = 64
# The same where accesses are wider than rows of q need.
WIDE_BUDGET = 32
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class DecodeContext:
    """Everything ops/decode.cu.j2 reads.

    A row of K or V is split over `lanes` lanes, `width` elements each at a time, in `k_chunks` or `v_chunks` steps; a warp
    thus works on `32 / lanes` tokens at once. Rows of q are read `row_width` elements at a time.
    `tile` query heads share a block's reads of K and V.
    """

    entry: str
    params: tuple[str, ...]
    elem: str
    k: SegmentContext
    v: SegmentContext
    kv_heads: int
    group: int
    tile: int
    tiles: int
    warps: int
    lanes: int
    width: int
    row_width: int
    k_chunks: int
    v_chunks: int
    scale: str
    lengths: str
    splits: int


@dataclass(frozen=True)
class DecodePlanContext:
    """Everything ops/decode_plan.cu.j2 reads."""

    entry: str
    params: tuple[str, ...]
    threads: int
    min_chunk: int
    splits: int
    lengths: str
    counters_per_row: int


def _walk(width: int, k: SegmentContext, v: SegmentContext, group: int) -> tuple[int, int, int]:
    """(width, lanes of a token, blocks that share a group's heads) where a lane reads `width` elements at once."""
    pieces = max(k.size, v.size) // width
    lanes = min(32, 2 ** (pieces - 1).bit_length())
    chunks = math.ceil(max(k.size, v.size) / (width * lanes))
    tile = max(1, min(8, REGISTER_BUDGET // (width * chunks), group))
    return width, lanes, math.ceil(group / tile)


class Decode(Op):
    """Attend with q `[T, q_heads, head_dim]`, one row a request, to the request's tokens, the newest included.

    Row t belongs to request t, or, with `row_offsets`, to the request whose rows it is in (one row at most). `out` is
    softmax(scale * q . k) . v per head in f32, rounded once; `lse` (optional) is the natural logarithm of the softmax's
    denominator. Rows of no request and requests without tokens give 0 and -inf; a request with invalid pages or
    lengths gives NaN. `scale` defaults to 1 / sqrt(head_dim).

    `splits` > 1 lets up to so many blocks share a request's tokens. The launcher then takes a workspace, which
    `decode.plan` prepares on the device once per step, for all layers; the last block of a request merges the parts in
    token order, so the result does not depend on which block that is.
    """

    kind: ClassVar[str] = "decode"
    scale: float | None = None
    splits: int = Field(default=1, ge=1, le=32)
    index_dtype: IndexName | None = None

    @field_validator("scale")
    @classmethod
    def _usable_scale(cls, value: float | None) -> float | None:
        if value is not None and not 1e-30 <= value <= 1e30:
            raise ValueError(f"scale: got {value!r}; a softmax scale lies in [1e-30, 1e30]; None is 1 / sqrt(head_dim)")
        return value

    def kernel_names(self) -> tuple[str, ...]:
        return (self.name, f"{self.name}_plan") if self.splits > 1 else (self.name,)

    def check(self, kernels: KernelSet) -> None:
        if kernels.cache.stores == "k":
            raise ValueError(
                "ops: decode needs V, but the cache has stores='k'; use ops.Gather(), or a cache that stores both"
            )

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache = kernels.cache
        k, v = segments(cache)
        elem, f32 = dtype(cache.dtype), dtype("f32")
        index = dtype(self.index_dtype or cache.lengths_dtype)
        row_width = math.gcd(16 // elem.bytes, k.size, v.size)
        width, lanes, tiles = _walk(row_width, k, v, kernels.group)
        # Codes are narrower than rows of q: whole accesses leave fewer lanes to a token. Not where it costs so many registers
        # that a multiprocessor has fewer bytes on their way.
        codes = math.gcd(k.vector, v.vector, k.size, v.size)
        while width < codes:
            wider, wider_lanes, wider_tiles = _walk(2 * width, k, v, kernels.group)
            held = math.ceil(kernels.group / tiles) * math.ceil(max(k.size, v.size) / wider_lanes)
            if wider_tiles > tiles or held > WIDE_BUDGET:
                break
            width, lanes, tiles = wider, wider_lanes, wider_tiles
        k_chunks, v_chunks = (math.ceil(d / (width * lanes)) for d in (k.size, v.size))
        tile = math.ceil(kernels.group / tiles)
        q_shape: tuple[int | str, ...] = ("T", kernels.q_heads, k.size)
        out_shape: tuple[int | str, ...] = ("T", kernels.q_heads, v.size)
        align = row_width * elem.bytes
        params = (
            Param(
                "q",
                elem,
                q_shape,
                align=align,
                strided=True,
                doc="query rows",
                field="dtype",
                fields=(None, "q_heads", "head_dim"),
            ),
            Param(
                "out",
                elem,
                out_shape,
                access="out",
                align=align,
                strided=True,
                doc="attention output",
                field="dtype",
                fields=(None, "q_heads", "v_head_dim" if cache.v_head_dim else "head_dim"),
            ),
            Param(
                "lse",
                f32,
                ("T", kernels.q_heads),
                access="out",
                optional=True,
                doc="natural log-sum-exp",
                fields=(None, "q_heads"),
            ),
            Param(
                "row_offsets",
                index,
                ("B+1",),
                optional=True,
                untrusted=True,
                doc="first row of each request",
                field="index_dtype",
            ),
            *((WORKSPACE,) if self.splits > 1 else ()),
            Param("q_stride", dtype("i64"), value="q.stride"),
            Param("out_stride", dtype("i64"), value="out.stride"),
            *((Param("max_rows", dtype("u32"), value="max_rows"),) if self.splits > 1 else ()),
            ERRORS,
        )
        context = DecodeContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            elem=elem.c,
            k=k,
            v=v,
            kv_heads=cache.kv_heads,
            group=kernels.group,
            tile=tile,
            tiles=tiles,
            warps=WARPS,
            lanes=lanes,
            width=width,
            row_width=row_width,
            k_chunks=k_chunks,
            v_chunks=v_chunks,
            # Softmax in base 2: the scale carries log2(e).
            scale=f"{(self.scale if self.scale is not None else 1 / math.sqrt(k.size)) * LOG2E!r}f",
            lengths=cache.lengths,
            splits=self.splits,
        )
        grid = (var("T") * (cache.kv_heads * tiles * self.splits), const(1), const(1))
        attend = KernelPlan(self.name, context.entry, "ops/decode.cu.j2", context, params, grid, WARPS * 32)
        if self.splits == 1:
            return (attend,)
        return (attend, self._planner(kernels, cache.kv_heads * tiles))

    def workspace_bytes(self, kernels: KernelSet) -> tuple[int, int]:
        """(fixed, per row) bytes of a workspace: the chunk, then counters and partial (max, sum, out) of each split."""
        if self.splits == 1:
            return (0, 0)
        attend = self.plan(kernels)[0].context
        assert isinstance(attend, DecodeContext)
        counters = 4 * kernels.cache.kv_heads * attend.tiles
        return 16, counters + 4 * kernels.q_heads * self.splits * (kernels.cache.v_dim + 2)

    def _planner(self, kernels: KernelSet, counters_per_row: int) -> KernelPlan:
        cache = kernels.cache
        params = (
            WORKSPACE,
            Param("max_rows", dtype("u32"), value="max_rows"),
        )
        context = DecodePlanContext(
            entry=entry_name(kernels, f"{self.name}_plan"),
            params=tuple(p.declaration for p in params),
            threads=PLAN_THREADS,
            min_chunk=MIN_CHUNK,
            splits=self.splits,
            lengths=cache.lengths,
            counters_per_row=counters_per_row,
        )
        name = f"{self.name}_plan"
        return KernelPlan(
            name, context.entry, "ops/decode_plan.cu.j2", context, params, (const(1), const(1), const(1)), PLAN_THREADS
        )


WORKSPACE = Param(
    "workspace",
    dtype("u8"),
    ("W",),
    access="inout",
    align=16,
    doc="from `workspace()`, planned for this step by `plan()`",
)
