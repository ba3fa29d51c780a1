"""The cache as its kernels see it: the context of cache.cuh and the fields of the struct that every kernel takes first."""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.layout.dtypes import dtype
from kvgen.layout.regions import Region
from kvgen.layout.storage import Base, Scales
from kvgen.lowering.cache_kinds import cache_kind
from kvgen.lowering.segments import SegmentContext, segments
from kvgen.lowering.tables import table_form
from kvgen.plan.params import Array, Field, Pool, Size
from kvgen.spec.cache import Cache
from kvgen.spec.kernel_set import KernelSet

# Of caches without pages, where a request's tokens are one run of rows: more than one has (kRunTokens of kv_cache.cuh).
RUN_TOKENS = 2**31


@dataclass(frozen=True)
class BaseContext:
    """A page pointer: its name in PageRef and in Cache, and the C type it points to."""

    name: str
    type: str


@dataclass(frozen=True)
class RoleContext:
    """K or V in cache.cuh: what the surface of device/kv_cache.cuh is built on.

    `row` and `scale_row` are the steps from a token's row to the next, in elements of their page pointers; 0 where a
    token's heads are no row.
    """

    name: str
    title: str
    struct: str
    rope: str
    dim: int
    scaled: bool
    granularity: int
    row: int
    id: str
    base: str
    scale_row: int
    scale_id: str
    scale_base: str
    scales_begin: str


@dataclass(frozen=True)
class CacheContext:
    """Everything cache/cache.cuh.j2 reads; `opens` and `closes` are the namespace around it, if any, and `space` leads
    into it."""

    title: str
    opens: str
    closes: str
    space: str
    summary: str
    elem: str
    heads: int
    bases: tuple[BaseContext, ...]
    segments: tuple[SegmentContext, ...]
    roles: tuple[RoleContext, ...]
    has_v: bool
    is_mla: bool
    page_size: int
    page_tokens: int
    fields: tuple[str, ...]
    has_lengths: bool
    lengths: str
    table_template: str
    table_type: str
    table_vector: int
    multiplier: str
    window: int
    pages_are: str
    ids: tuple[str, ...]
    id_args: str
    id_values: str
    id_checks: str
    no_ids: str
    id_type: str
    nulls: str
    pointers: str
    own_table: bool
    residual: int


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
    return stride * region.dtype.bits // max(base.element.bits, 8)


def roles(cache: Cache) -> tuple[RoleContext, ...]:
    """The template's view of K and V."""
    storage, found = cache.storage, []
    for name, parts in storage.roles.items():
        main = parts[0]
        shown = [s for s in segments(cache) if s.role == name]
        scales = main.scales
        places = storage.base(scales.base) if scales is not None and scales.base else None
        value_id = f"{name}_id" if cache.page_table.separate_kv else "id"
        found.append(
            RoleContext(
                name=name,
                title=name.upper(),
                struct=shown[0].struct,
                rope=shown[1].struct if len(shown) > 1 else "void",
                dim=cache.head_dim if name == "k" else cache.v_dim,
                scaled=scales is not None,
                granularity=scales.block[2] if scales is not None else 1,
                row=row_of(main.region, storage.base(main.base)),
                id=value_id,
                base=main.base,
                scale_row=row_of(scales.region, places) if scales is not None and _in_pool(cache, scales) else 0,
                scale_id="scale_id" if places is not None and places.table == "scales" else value_id,
                scale_base=scales.base if scales is not None else "",
                scales_begin=shown[0].scales[0].place.replace("page.", "cache.") if scales is not None else "",
            )
        )
    return tuple(found)


def _in_pool(cache: Cache, scales: Scales) -> bool:
    """Whether scales lie in a tensor of their own, a scale a token at least."""
    return bool(scales.base) and cache.storage.base(scales.base).tensor.endswith("scales") and scales.block[0] == 1


def _scale_fields(cache: Cache) -> list[Field]:
    """What quantization adds: scales of the caller's, the tail of newest tokens."""
    storage = cache.storage
    found: list[Field] = []
    found += [Pool(t.name, t.dtypes[0]) for t in storage.tensors if t.given]
    if storage.residual:
        doc = "tokens of each request that are quantized"
        found += [
            Pool("k_tail", cache.dtype),
            Size("k_tail_stride", "i64", "k_tail_stride"),
            Array("k_sealed", "u32", ("B",), access="inout", untrusted=True, doc=doc),
        ]
    return found


def cache_fields(cache: Cache) -> tuple[Field, ...]:
    """The fields of `Cache`, the struct that the cache object packs for every kernel, in their order."""
    bases = cache.storage.bases
    found: list[Field] = [Pool(b.name, b.element.name) for b in bases]
    found += [Size(f"{b.name}_page_stride", "i64", f"{b.name}_page_stride") for b in bases]
    found.append(Size("num_pages", "u32", "rows" if cache.ragged else "pages"))
    if any(t.name.endswith("scales") for t in cache.storage.tensors):
        found.append(Size("num_scale_pages", "u32", "rows" if cache.ragged else "scale_pages"))
    if cache.page_tokens is None and not cache.ragged:
        found.append(Size("page_tokens", "u32", "tokens"))
    if not cache.page_table.counts_tokens:
        doc = f"tokens of each request {cache.lengths} this step"
        lengths = dtype(cache.lengths_dtype)
        found.append(Array("lengths", lengths.name, ("B",), untrusted=True, doc=doc, field="lengths_dtype"))
    found.append(Size("batch", "u32", "B"))
    longest = [Size(name, "u32", name) for name in ("max_seq_length", "max_cache_length")]
    return (*found, *table_form(cache).fields, *_scale_fields(cache), *longest)


def _summary(cache: Cache) -> str:
    dims = f"{cache.head_dim}" if cache.v_dim == cache.head_dim else f"{cache.head_dim}/{cache.v_dim}"
    place = cache_kind(cache).place
    kinds: list[str] = []
    for segment in cache.storage.segments:
        text: str = segment.region.dtype.name
        if segment.scales is not None:
            text += f" with {segment.scales.dtype.name} scales"
        kinds.append(text)
    return (
        f"{' and '.join(dict.fromkeys(kinds))}, {cache.kv_heads} heads x {dims}, {place}, {cache.page_table.kind} table"
    )


def cache_context(cache: Cache, title: str, namespace: str = "") -> CacheContext:
    """The context of `cache.cuh`, whose first line calls it `title`; in a namespace, a second cache beside the set's."""
    storage, table, form, kind = cache.storage, cache.page_table, table_form(cache), cache_kind(cache)
    ids = form.ids

    def id_of(base: Base) -> str:
        if base.table == "scales":
            return "scale_id"
        return "v_id" if table.separate_kv and base.name.startswith("v") else ids[0]

    checks = [f"{i} >= {'num_scale_pages' if i == 'scale_id' else 'num_pages'}" for i in ids]
    id_type = "uint64_t" if table.id_multiplier > 1 else "uint32_t"
    pointers = [f"valid ? {b.name} + (int64_t){id_of(b)} * {b.name}_page_stride : nullptr" for b in storage.bases]
    return CacheContext(
        title=title,
        opens=f"\n\nnamespace {namespace} {{" if namespace else "",
        space=f"{namespace}::" if namespace else "",
        closes=f"\n}}  // namespace {namespace}\n" if namespace else "",
        summary=_summary(cache),
        elem=dtype(cache.dtype).c,
        heads=cache.kv_heads,
        bases=tuple(BaseContext(b.name, b.element.c) for b in storage.bases),
        segments=segments(cache),
        roles=roles(cache),
        has_v="v" in storage.roles,
        is_mla=cache.stores == "k",
        page_size=kind.page_size,
        page_tokens=RUN_TOKENS if cache.ragged else cache.page_tokens or 0,
        fields=tuple(p.declaration for p in cache_fields(cache)),
        has_lengths=not table.counts_tokens,
        lengths=cache.lengths,
        table_template=form.template,
        table_type=dtype(table.dtype).c,
        table_vector=form.vector,
        multiplier=f" * {table.id_multiplier}ull" if table.id_multiplier > 1 else "",
        window=form.window,
        pages_are=kind.unit,
        ids=ids,
        id_args=", ".join(f"Id {i}" for i in ids),
        id_values=", ".join(f"found.{i}" for i in ids),
        id_checks=" || ".join(checks),
        no_ids=", ".join("kU32Max" if id_type == "uint32_t" else "~0ull" for _ in ids),
        id_type=id_type,
        nulls=", ".join(["nullptr"] * len(storage.bases)),
        pointers=", ".join(pointers),
        own_table=storage.own_table,
        residual=storage.residual,
    )


def rows_per_block(cache: Cache, threads: int, more: int = 0) -> int:
    """Rows of K and V that a block of a copying kernel takes: about four vectors a thread, and few rows to look up.

    `more` are vectors that a row has besides."""
    rows = max(1, min(32, 4 * threads // (sum(s.vectors for s in segments(cache)) + more)))
    return 1 << rows.bit_length() - 1  # sectors that neighbouring rows share are then one block's


def entry_name(kernels: KernelSet, kernel: str) -> str:
    """The C name of a kernel: `<set>_<kernel>`."""
    return f"{kernels.name}_{kernel}"


ERRORS = Array(
    "errors",
    "u64",
    (1,),
    access="inout",
    optional=True,
    doc="sticky error word, 0 if nothing happened: a kvgen.ErrorWord, or an array that kvgen.runtime.describe() reads",
)
