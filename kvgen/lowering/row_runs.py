"""Rows as copying kernels see them: runs of a token's values, codes or scales that lie side by side in the caller's arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvgen.layout.dtypes import DType, dtype
from kvgen.layout.regions import Region
from kvgen.layout.storage import Scales, Segment
from kvgen.lowering.lowered import LoweredCache
from kvgen.lowering.segments import SegmentContext, check_whole_bytes
from kvgen.plan.params import Access, Array
from kvgen.schema.cache import Cache

_SECTOR: Final = 32  # bytes that memory moves at once


@dataclass(frozen=True)
class RunContext:
    """One kind of what a token stores, as device/cache/copy_rows.cuh reads it: the struct `name` with the view `stored` of
    device/cache/stored.cuh, `vectors` accesses of `width` elements a token, and `head_dims` elements of a head in a row of
    the parameter `array`. `across`: neighbouring tokens share a sector of the pages."""

    name: str
    array: str
    title: str
    stored: str
    width: int
    vectors: int
    head_dims: int
    across: bool = False


@dataclass(frozen=True)
class View:
    """A type of device/cache/stored.cuh: the struct of a segment or role that it is of, and its other arguments."""

    policy: str
    struct: str
    args: tuple[str | int, ...] = ()

    @property
    def type(self) -> str:
        """Its name, of the set's own cache."""
        return f"{self.policy}<{', '.join(str(a) for a in (self.struct, *self.args))}>"


@dataclass(frozen=True)
class StoredRun:
    """What a segment stores, for `raw` operations: codes or plain values (`scales` None), or the scales of its blocks."""

    struct: str
    name: str
    title: str
    view: View
    pointer: str
    element: DType
    array: DType
    region: Region
    shape: tuple[int, int]
    vector: int
    fields: tuple[str | None, ...]

    @property
    def row(self) -> int:
        """Elements of a token."""
        return self.shape[0] * self.shape[1]

    @property
    def across(self) -> bool:
        """Whether neighbouring tokens share a sector of the pages."""
        return across(self.region, self.row * (8 if self.element.packed else self.element.bits) // 8)


def token_step(region: Region) -> int:
    """Bytes between tokens that are nearest to each other in a page."""
    steps = [s for a, s in zip(region.axes, region.strides, strict=True) if a.name == "token" and s is not None]
    return min(steps, default=2**31) * region.dtype.place // 8


def across(region: Region, row_bytes: int) -> bool:
    """Whether neighbouring tokens share a sector in which a token's own elements, of so many bytes, do not lie side by side, so
    that lanes that walk tokens first fill it."""
    return token_step(region) < min(_SECTOR, row_bytes)


def name_of(role: str, segment: Segment) -> str:
    """What a raw array of this segment is called, without suffix."""
    if segment.quant is not None:
        return f"{role}_codes"
    return f"{role}_rope" if segment.begin else role


def stored_runs(cache: LoweredCache) -> tuple[StoredRun, ...]:
    """What every segment stores, K's first: its codes (or plain values), then its scales where a write computes them."""
    found, shown = [], iter(cache.segments)
    for role, parts in cache.spec.storage.roles.items():
        dims = "v_head_dim" if role == "v" and cache.spec.v_head_dim else "head_dim"
        for segment in parts:
            s, element = next(shown), segment.region.dtype
            row, vector = segment.size, segment.vector
            if element.packed:
                row, vector = element.size_of(row), segment.region.bytes_of(vector)
            found.append(
                StoredRun(
                    struct=s.struct,
                    name=name_of(role, segment),
                    title=f"{s.title}, {'codes' if segment.quant else 'values'} as stored",
                    view=View("Codes", s.struct),
                    pointer=s.pointer,
                    element=element,
                    array=dtype("u8") if segment.quant is not None else element,
                    region=segment.region,
                    shape=(cache.spec.kv_heads, row),
                    vector=max(1, vector),
                    fields=("kv_heads", dims),
                )
            )
            if segment.scales is not None and segment.scales.region is not None:
                found.append(_scale_run(cache, s, segment.scales))
    return tuple(found)


def _scale_run(cache: LoweredCache, s: SegmentContext, scales: Scales) -> StoredRun:
    assert scales.region is not None
    # The tensor's pages are aligned for no wider accesses than attention's.
    aligned = cache.spec.storage.tensor(cache.spec.storage.base(scales.base).tensor).align // scales.dtype.bytes
    row, vector = scales.groups * (1 + scales.zero), min(scales.region.vector, aligned)
    while row % vector:
        vector //= 2
    return StoredRun(
        struct=s.struct,
        name=f"{s.role}_scales",
        title=f"{s.title}, scales{' and zero points' if scales.zero else ''}",
        view=View("ScaleRow", s.struct, (vector,)),
        pointer=scales.base,
        element=scales.dtype,
        array=scales.dtype,
        region=scales.region,
        shape=(scales.heads, row),
        vector=vector,
        fields=(None, None),
    )


def raw_runs(cache: LoweredCache, suffix: str) -> tuple[RunContext, ...]:
    """Every stored run in an array of its own, `<name><suffix>`."""
    return tuple(
        RunContext(
            name=r.struct + r.view.policy,
            array=r.name + suffix,
            title=r.title,
            stored=r.view.type,
            width=r.vector,
            vectors=r.row // r.vector,
            head_dims=r.shape[1],
            across=r.across,
        )
        for r in stored_runs(cache)
    )


def raw_params(cache: LoweredCache, suffix: str, doc: str, *, access: Access = "in") -> tuple[Array, ...]:
    """The arrays of `raw_runs`: `[T, heads, elements]`, codes as bytes, two packed ones each."""
    return tuple(
        Array(
            r.name + suffix,
            r.array.name,
            ("T", *r.shape),
            access=access,
            align=(r.vector & -r.vector) * r.array.bytes,
            strided=True,
            doc=doc.format(r.title),
            field="dtype" if r.array.name == cache.spec.dtype else None,
            fields=(None, *r.fields),
        )
        for r in stored_runs(cache)
    )


def _together(s: SegmentContext) -> tuple[int, ...]:
    """How many lanes load a row at once, where they need all of its codes: its norm is corrected."""
    lanes = s.size // s.width
    whole = s.corrected and s.scales[0].heads == 1 and s.scales[0].dims == s.size
    return (lanes,) if whole and lanes in (2, 4, 8, 16, 32) else ()


def value_runs(cache: LoweredCache, suffix: str, roles: tuple[str, ...] = ("k", "v")) -> tuple[RunContext, ...]:
    """The segments of these roles as values of the cache's dtype, side by side in `k<suffix>` and `v<suffix>`."""
    return tuple(
        RunContext(
            name=f"{s.struct}Values",
            array=s.role + suffix,
            title=s.title,
            stored=View("Values", s.struct, (s.value, *_together(s))).type,
            width=s.width,
            vectors=s.vectors,
            head_dims=s.row,
        )
        for s in cache.segments
        if s.role in roles
    )


def check_raw(op: str, cache: Cache) -> None:
    """Raise ValueError where tokens are not stored one by one."""
    if cache.storage.residual:
        raise ValueError(
            f"raw: got True for {op} with residual={cache.storage.residual}, where tokens share scales and the newest wait in a "
            "tail; gather without raw, which dequantizes"
        )


def check_writes(op: str, cache: Cache) -> None:
    """Raise ValueError where an operation that stores whole tokens cannot quantize them."""
    if cache.storage.residual:
        raise ValueError(
            f"ops: got {op} into a cache with residual={cache.storage.residual}, whose keys are quantized in groups of tokens as "
            "they complete; give the rows to seal and append"
        )
    for segment in cache.storage.segments:
        if segment.quant is not None and segment.quant.computed:
            check_whole_bytes(op, segment)


def row_params(cache: LoweredCache, suffix: str, doc: str, *, access: Access = "in") -> tuple[Array, ...]:
    """The rows of K and V that a call brings: `k<suffix>` and, where V is stored, `v<suffix>`, `[T, kv_heads, dims]`."""
    found = []
    for role in cache.spec.roles:
        parts = cache.segments_of(role)
        dims = "v_head_dim" if role == "v" and cache.spec.v_head_dim else "head_dim"
        shape = ("T", cache.spec.kv_heads, parts[0].row)
        align = max(s.width for s in parts) * dtype(cache.spec.dtype).bytes
        found.append(
            Array(
                f"{role}{suffix}",
                cache.spec.dtype,
                shape,
                access=access,
                align=align,
                strided=True,
                doc=doc.format(role.upper()),
                field="dtype",
                fields=(None, "kv_heads", dims),
            )
        )
    return tuple(found)


def rows_per_block(cache: LoweredCache, threads: int, more: int = 0) -> int:
    """Rows of K and V that a block of a copying kernel takes: about four vectors a thread, and few rows to look up.

    `more` are vectors that a row has besides."""
    rows = max(1, min(32, 4 * threads // (sum(s.vectors for s in cache.segments) + more)))
    return 1 << rows.bit_length() - 1  # sectors that neighbouring rows share are then one block's
