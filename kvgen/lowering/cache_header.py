"""The cache as its kernels see it: the context of cache.cuh."""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.layout.dtypes import dtype
from kvgen.layout.regions import Region
from kvgen.layout.storage import Base, Scales
from kvgen.lowering.lowered import LoweredCache, lower, lower_pages
from kvgen.lowering.page_runs import page_runs
from kvgen.lowering.segments import BookContext, ScaleContext, SegmentContext, books
from kvgen.lowering.tables import TableForm
from kvgen.schema.any_cache import AnyCache
from kvgen.schema.cache import Cache

# Of caches without pages, where a request's tokens are one run of rows: more than one has (kRunTokens of kv_cache.cuh).
RUN_TOKENS = 2**31


@dataclass(frozen=True)
class BaseContext:
    """A page pointer: its name in PageRef and in Cache, the C type it points to, and the id that finds its page."""

    name: str
    type: str
    id: str


@dataclass(frozen=True)
class RoleContext:
    """K or V in cache.cuh: what the surface of device/cache/kv_cache.cuh is built on.

    `struct` is its segment, `rope` that of a RoPE part of another type, or void. `row` and `scale_row` are the steps from a
    token's row to the next, in elements of their page pointers; 0 where a token's heads are no row.
    """

    struct: str
    rope: str
    row: int
    id: str
    base: str
    scale_row: int
    scale_id: str
    scale_base: str
    scales: tuple[ScaleContext, ...]


@dataclass(frozen=True)
class CacheContext:
    """Everything cache/cache.cuh.j2 reads: `space` is the namespace around it, if any; `id_sizes` are what ids are below."""

    title: str
    space: str
    summary: str
    elem: str
    heads: int
    bases: tuple[BaseContext, ...]
    segments: tuple[SegmentContext, ...]
    books: tuple[BookContext, ...]
    strided: bool
    roles: tuple[RoleContext, ...]
    has_v: bool
    is_mla: bool
    page_size: int
    page_tokens: int
    rate: int
    fields: tuple[str, ...]
    lengths: str
    table: str
    table_header: str
    table_vector: int
    pages_are: str
    ids: tuple[str, ...]
    ids_type: str
    id_sizes: tuple[str, ...]
    residual: int


@dataclass(frozen=True)
class StatesContext:
    """Everything cache/states.cuh.j2 reads."""

    title: str
    summary: str
    bytes: int
    align: int
    element: str
    fields: tuple[str, ...]
    table_type: str


def row_of(region: Region | None, base: Base | None) -> int:
    """The step from a token's row to the next, in elements of the page pointer; 0 where its heads are no row."""
    if region is None or base is None or region.swizzle is not None or "token" not in [a.name for a in region.axes]:
        return 0
    at = [a.name for a in region.axes].index("token")
    inner = region.axes[at + 1 :]
    # Without a head axis behind token there is one head, or heads lie apart.
    one_head = dict(region.extents)["head"] == 1
    if any(str(a) != a.name for a in region.axes[at:]) or [a.name for a in inner] not in (
        ["head", "dim"],
        *([["dim"]] if one_head else []),
    ):
        return 0
    stride = region.strides[at]
    assert stride is not None
    return stride * region.dtype.place // max(base.element.bits, 8)


def roles(cache: LoweredCache) -> tuple[RoleContext, ...]:
    """The template's view of K and V."""
    spec, storage, found = cache.spec, cache.spec.storage, []
    for name, parts in storage.roles.items():
        main = parts[0]
        shown = cache.segments_of(name)
        scales = main.scales
        places = storage.base(scales.base) if scales is not None and scales.base else None
        value_id = f"{name}_id" if spec.page_table.separate_kv else "id"
        found.append(
            RoleContext(
                struct=shown[0].struct,
                rope=shown[1].struct if len(shown) > 1 else "void",
                row=row_of(main.region, storage.base(main.base)),
                id=value_id,
                base=main.base,
                scale_row=row_of(scales.region, places) if scales is not None and _in_pool(spec, scales) else 0,
                scale_id="scale_id" if places is not None and places.table == "scales" else value_id,
                scale_base=scales.base if scales is not None else "",
                scales=shown[0].scales,
            )
        )
    return tuple(found)


def _in_pool(cache: Cache, scales: Scales) -> bool:
    """True where scales lie in a tensor of their own, a scale a token at least."""
    return bool(scales.base) and cache.storage.base(scales.base).tensor.endswith("scales") and scales.block[0] == 1


def _heads(cache: Cache) -> str:
    """The number of KV heads in a sentence."""
    return "1 head" if cache.kv_heads == 1 else f"{cache.kv_heads} heads"


def _summary(cache: Cache) -> str:
    dims = f"{cache.head_dim}" if cache.v_dim == cache.head_dim else f"{cache.head_dim}/{cache.v_dim}"
    place = lower(cache).allocation.place
    kinds: list[str] = []
    for segment in cache.storage.segments:
        text: str = segment.region.dtype.name
        if segment.scales is not None:
            text += f" with {segment.scales.dtype.name} scales"
        kinds.append(text)
    return f"{' and '.join(dict.fromkeys(kinds))}, {_heads(cache)} x {dims}, {place}, {cache.page_table.kind} table"


def _ids_type(ids: tuple[str, ...], multiplier: int) -> str:
    """The device type of a page's ids (device/cache/paged.cuh); several pages an entry make ids of 64 bits."""
    names = {("id",): "PageId", ("k_id", "v_id"): "KvPageIds", ("id", "scale_id"): "ScaledPageIds"}
    return f"{names[ids]}<uint64_t, {multiplier}>" if multiplier > 1 else f"{names[ids]}<uint32_t>"


def _table_type(cache: Cache, form: TableForm) -> str:
    """The device type of the page table; that of a ring knows its window, and whether lengths come before the step."""
    ring = (str(form.window), "true" if cache.lengths == "before" else "false") if form.window else ()
    return f"{form.policy}<{', '.join(('PageIds', *ring))}>"


def cache_context(lowered: LoweredCache, title: str, namespace: str = "") -> CacheContext:
    """The context of `cache.cuh`, whose first line calls it `title`; in a namespace, a second cache beside the set's."""
    cache, form, allocation = lowered.spec, lowered.table, lowered.allocation
    storage, table = cache.storage, cache.page_table
    ids = form.ids

    def id_of(base: Base) -> str:
        if base.table == "scales":
            return "scale_id"
        return "v_id" if table.separate_kv and base.name.startswith("v") else ids[0]

    return CacheContext(
        title=title,
        space=namespace,
        summary=_summary(cache),
        elem=dtype(cache.dtype).c,
        heads=cache.kv_heads,
        bases=tuple(BaseContext(b.name, b.element.c, id_of(b)) for b in storage.bases),
        segments=lowered.segments,
        books=books(cache),
        strided=any(s.region.strided for s in storage.segments),
        roles=roles(lowered),
        has_v="v" in storage.roles,
        is_mla=cache.stores == "k",
        page_size=allocation.page_size,
        page_tokens=RUN_TOKENS if cache.ragged else cache.page_tokens or 0,
        rate=cache.entry_tokens,
        fields=tuple(p.declaration for p in lowered.fields),
        lengths=cache.lengths,
        table=_table_type(cache, form),
        table_header=form.header,
        table_vector=form.vector,
        pages_are=allocation.unit,
        ids=ids,
        ids_type=_ids_type(form.ids, table.id_multiplier),
        id_sizes=tuple("num_scale_pages" if i == "scale_id" else "num_pages" for i in ids),
        residual=storage.residual,
    )


def states_context(cache: AnyCache, title: str) -> StatesContext:
    """The context of `cache.cuh` of a cache of states."""
    lowered, (base,), (run,) = lower_pages(cache), cache.storage.bases, page_runs(cache)
    return StatesContext(
        title=title,
        summary=f"states of {run.nbytes} bytes, one a request",
        bytes=run.nbytes,
        align=run.align,
        element=base.element.c,
        fields=tuple(p.declaration for p in lowered.fields),
        table_type=dtype(cache.page_table.dtype).c,
    )
