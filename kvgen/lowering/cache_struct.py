"""The cache as its kernels see it: the context of cache.cuh and the fields of the struct that every kernel takes first."""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.layout.dtypes import dtype
from kvgen.layout.regions import Region
from kvgen.layout.storage import Base, Scales
from kvgen.lowering.segments import SegmentContext, segments
from kvgen.plan.params import Array, Field, Pool, Size
from kvgen.spec.cache import Cache, Paged
from kvgen.spec.kernel_set import KernelSet
from kvgen.spec.tables import CSR, Dense, Indirect, Offsets, PerKV, Ring

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
        both = isinstance(cache.page_table, PerKV)
        value_id = f"{name}_id" if both else "id"
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


def table_template(cache: Cache) -> str:
    """Which file of templates/cache/ holds the table's macros."""
    table = cache.page_table
    return f"cache/{'csr_last' if isinstance(table, CSR) and table.last_page_len else table.kind}.j2"


def _table_fields(cache: Cache) -> tuple[Array | Size, ...]:
    table = cache.page_table
    field = "table.dtype" if isinstance(cache, Paged) else "table_dtype"
    index = dtype(table.dtype)
    if isinstance(table, Offsets):
        doc = "first row of each request, and where the last one ends"
        return (Array("kv_offsets", index.name, ("B+1",), untrusted=True, doc=doc, field="lengths_dtype"),)
    if isinstance(table, CSR):
        found: list[Array | Size] = [
            Array("page_indices", index.name, ("I",), untrusted=True, doc="page ids of all requests", field=field),
            Array(
                "page_indptr", index.name, ("B+1",), untrusted=True, doc="where each request's ids begin", field=field
            ),
            Size("num_indices", "u32", "I"),
        ]
        if table.last_page_len:
            doc = "tokens in each request's last page"
            found.append(Array("last_page_len", index.name, ("B",), untrusted=True, doc=doc, field=field))
        return tuple(found)
    if isinstance(table, Indirect):
        ids = dtype(table.request_dtype)
        return (
            Array(
                "req_to_token",
                index.name,
                ("R", "M"),
                strided=True,
                untrusted=True,
                doc="slot of each token",
                field=field,
            ),
            Array(
                "request_ids",
                ids.name,
                ("B",),
                untrusted=True,
                doc="row of req_to_token of each request",
                field="table.request_dtype",
            ),
            Size("table_stride", "i64", "req_to_token.stride"),
            Size("table_pages", "u32", "M"),
            Size("table_rows", "u32", "R"),
        )
    if isinstance(cache, Paged):
        shape: tuple[int | str, ...] = ("B", 2, "M") if isinstance(table, PerKV) else ("B", "M")
        found = [
            Array(
                "page_table",
                index.name,
                shape,
                strided=True,
                untrusted=True,
                align=table.align * index.bytes if isinstance(table, Dense) else 1,
                doc="page ids of each request",
                field=field,
            ),
            Size("table_stride", "i64", "page_table.stride"),
            Size("table_pages", "u32", "M"),
        ]
        if isinstance(table, PerKV):
            found.insert(2, Size("kv_table_stride", "i64", "M"))
        return tuple(found)
    return (
        Array("page_table", index.name, ("B",), untrusted=True, doc="block of each request", field=field),
        Size("table_stride", "i64", "one"),
        Size("table_pages", "u32", "one"),
    )


def _scale_fields(cache: Cache) -> list[Field]:
    """What quantization adds: a second table, scales of the caller's, the tail of newest tokens."""
    storage = cache.storage
    found: list[Field] = []
    if storage.own_table:
        table = cache.page_table
        index = dtype(table.dtype)
        doc = "page ids of each request's scales"
        found += [
            Array(
                "scales_page_table", index.name, ("B", "MS"), strided=True, untrusted=True, doc=doc, field="table.dtype"
            ),
            Size("scales_table_stride", "i64", "scales_page_table.stride"),
            Size("scales_table_pages", "u32", "MS"),
        ]
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
    if _has_lengths(cache):
        doc = f"tokens of each request {cache.lengths} this step"
        lengths = dtype(cache.lengths_dtype)
        found.append(Array("lengths", lengths.name, ("B",), untrusted=True, doc=doc, field="lengths_dtype"))
    found.append(Size("batch", "u32", "B"))
    longest = [Size(name, "u32", name) for name in ("max_seq_length", "max_cache_length")]
    return (*found, *_table_fields(cache), *_scale_fields(cache), *longest)


def _has_lengths(cache: Cache) -> bool:
    return not (cache.ragged or (isinstance(cache.page_table, CSR) and cache.page_table.last_page_len))


def _summary(cache: Cache) -> str:
    dims = f"{cache.head_dim}" if cache.v_dim == cache.head_dim else f"{cache.head_dim}/{cache.v_dim}"
    place = f"pages of {cache.page_size} tokens" if isinstance(cache, Paged) else "a block a request"
    place = "requests one after another" if cache.ragged else place
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
    storage, table = cache.storage, cache.page_table
    ids = ("k_id", "v_id") if isinstance(table, PerKV) else ("id", "scale_id") if storage.own_table else ("id",)

    def id_of(base: Base) -> str:
        if base.table == "scales":
            return "scale_id"
        return "v_id" if len(ids) == 2 and ids[0] == "k_id" and base.name.startswith("v") else ids[0]

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
        page_size=cache.page_size if isinstance(cache, Paged) else 0,
        page_tokens=RUN_TOKENS if cache.ragged else cache.page_tokens or 0,
        fields=tuple(p.declaration for p in cache_fields(cache)),
        has_lengths=_has_lengths(cache),
        lengths=cache.lengths,
        table_template=table_template(cache),
        table_type=dtype(table.dtype).c,
        table_vector=table.align if isinstance(table, Dense) else 1,
        multiplier=f" * {table.id_multiplier}ull" if table.id_multiplier > 1 else "",
        window=table.window if isinstance(table, Ring) else 0,
        pages_are="pages" if isinstance(cache, Paged) else "rows" if cache.ragged else "blocks",
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
