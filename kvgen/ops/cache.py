"""The cache as its kernels see it: the context of cache.cuh and the fields of the struct that every kernel takes first."""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.dtypes import dtype
from kvgen.expr import U32_MAX, c
from kvgen.layout import Region
from kvgen.plan import Param
from kvgen.spec.cache import Cache, Paged
from kvgen.spec.kernel_set import KernelSet
from kvgen.spec.table import CSR, Indirect, PerKV, Ring


@dataclass(frozen=True)
class RoleContext:
    """K or V in a template: its dimension, access width and offset expression."""

    name: str
    title: str
    dim: int
    vector: int
    axes: str
    offset: str
    offset_bits: int
    field: str


@dataclass(frozen=True)
class CacheContext:
    """Everything cache/cache.cuh.j2 reads."""

    set: str
    summary: str
    elem: str
    heads: int
    roles: tuple[RoleContext, ...]
    page_tokens: int
    fields: tuple[str, ...]
    lengths: str
    table_template: str
    multiplier: str
    window: int
    pages_are: str
    ids_per_role: bool
    nulls: str
    bases: str


def role_regions(cache: Cache) -> tuple[tuple[str, Region], ...]:
    """("k", its region) and, where V is stored, ("v", its region)."""
    keys, values = cache.regions[0], cache.regions[-1]
    return (("k", keys),) if cache.stores == "k" else (("k", keys), ("v", values))


def roles(cache: Cache) -> tuple[RoleContext, ...]:
    """The template's view of K and V."""
    result = []
    for name, region in role_regions(cache):
        dims = {"k": cache.head_dim, "v": cache.v_dim}
        offset = region.offset()
        result.append(
            RoleContext(
                name=name,
                title=name.upper(),
                dim=dims[name],
                vector=region.vector,
                axes=f"{name.upper()}: {region.text}",
                offset=c(offset),
                offset_bits=32 if offset.upper <= U32_MAX else 64,
                field="v_head_dim" if name == "v" and cache.v_head_dim else "head_dim",
            )
        )
    return tuple(result)


def table_template(cache: Cache) -> str:
    """Which file of templates/cache/ holds the table's macros."""
    table = cache.page_table
    return f"cache/{'csr_last' if isinstance(table, CSR) and table.last_page_len else table.kind}.j2"


def _table_fields(cache: Cache) -> tuple[Param, ...]:
    table = cache.page_table
    field = "table.dtype" if isinstance(cache, Paged) else "table_dtype"
    index, u32, i64 = dtype(table.dtype), dtype("u32"), dtype("i64")
    if isinstance(table, CSR):
        found = [
            Param(
                "page_indices",
                index,
                ("I",),
                untrusted=True,
                doc="page ids of all requests",
                field=field,
            ),
            Param(
                "page_indptr",
                index,
                ("B+1",),
                untrusted=True,
                doc="where each request's ids begin",
                field=field,
            ),
            Param("num_indices", u32, value="I"),
        ]
        if table.last_page_len:
            doc = "tokens in each request's last page"
            found.append(Param("last_page_len", index, ("B",), untrusted=True, doc=doc, field=field))
        return tuple(found)
    if isinstance(table, Indirect):
        ids = dtype(table.request_dtype)
        return (
            Param(
                "req_to_token",
                index,
                ("R", "M"),
                strided=True,
                untrusted=True,
                doc="slot of each token",
                field=field,
            ),
            Param(
                "request_ids",
                ids,
                ("B",),
                untrusted=True,
                doc="row of req_to_token of each request",
                field="table.request_dtype",
            ),
            Param("table_stride", i64, value="req_to_token.stride"),
            Param("table_pages", u32, value="M"),
            Param("table_rows", u32, value="R"),
        )
    if isinstance(cache, Paged):
        shape: tuple[int | str, ...] = ("B", 2, "M") if isinstance(table, PerKV) else ("B", "M")
        found = [
            Param(
                "page_table",
                index,
                shape,
                strided=True,
                untrusted=True,
                doc="page ids of each request",
                field=field,
            ),
            Param("table_stride", i64, value="page_table.stride"),
            Param("table_pages", u32, value="M"),
        ]
        if isinstance(table, PerKV):
            found.insert(2, Param("kv_table_stride", i64, value="M"))
        return tuple(found)
    return (
        Param("page_table", index, ("B",), untrusted=True, doc="block of each request", field=field),
        Param("table_stride", i64, value="one"),
        Param("table_pages", u32, value="one"),
    )


def cache_fields(cache: Cache) -> tuple[Param, ...]:
    """The fields of `Cache`, the struct that the cache object packs for every kernel, in their order.

    The pools are written or not as the kernel goes: they are "inout" since the struct is one for all of them.
    """
    elem, u32, i64 = dtype(cache.dtype), dtype("u32"), dtype("i64")
    names = [name for name, _ in role_regions(cache)]
    found = [Param(n, elem, ("pool",), access="inout") for n in names]
    found += [Param(f"{n}_page_stride", i64, value=f"{n}_page_stride") for n in names]
    found.append(Param("num_pages", u32, value="pages"))
    if cache.page_tokens is None:
        found.append(Param("page_tokens", u32, value="tokens"))
    if not (isinstance(cache.page_table, CSR) and cache.page_table.last_page_len):
        doc = f"tokens of each request {cache.lengths} this step"
        lengths = dtype(cache.lengths_dtype)
        found.append(Param("lengths", lengths, ("B",), untrusted=True, doc=doc, field="lengths_dtype"))
    found.append(Param("batch", u32, value="B"))
    return (*found, *_table_fields(cache))


def cache_context(cache: Cache, set_name: str) -> CacheContext:
    """The context of `cache.cuh`."""
    multiplier = cache.page_table.id_multiplier
    names = [name for name, _ in role_regions(cache)]
    dims = f"{cache.head_dim}" if cache.v_dim == cache.head_dim else f"{cache.head_dim}/{cache.v_dim}"
    place = f"pages of {cache.page_size} tokens" if isinstance(cache, Paged) else "a block a request"
    return CacheContext(
        set=set_name,
        summary=f"{cache.dtype}, {cache.kv_heads} heads x {dims}, {place}, {cache.page_table.kind} table",
        elem=dtype(cache.dtype).c,
        heads=cache.kv_heads,
        roles=roles(cache),
        page_tokens=cache.page_tokens or 0,
        fields=tuple(p.declaration for p in cache_fields(cache)),
        lengths=cache.lengths,
        table_template=table_template(cache),
        multiplier=f" * {multiplier}" if multiplier > 1 else "",
        window=cache.page_table.window if isinstance(cache.page_table, Ring) else 0,
        pages_are="pages" if isinstance(cache, Paged) else "blocks",
        ids_per_role=isinstance(cache.page_table, PerKV),
        nulls=", ".join("nullptr" for _ in names),
        bases=", ".join(f"{n} + (int64_t)id * {n}_page_stride" for n in names),
    )


def rows_per_block(cache: Cache, threads: int) -> int:
    """Rows of K and V that a block of a copying kernel takes: about four vectors a thread, and few rows to look up."""
    vectors = sum(cache.kv_heads * r.dim // r.vector for r in roles(cache))
    return max(1, min(32, 4 * threads // vectors))


def entry_name(kernels: KernelSet, kernel: str) -> str:
    """The C name of a kernel: `<set>_<kernel>`."""
    return f"{kernels.name}_{kernel}"


ERRORS = Param(
    "errors",
    dtype("u64"),
    (1,),
    access="inout",
    optional=True,
    doc="sticky error word; kvgen.runtime.describe() reads it",
)
