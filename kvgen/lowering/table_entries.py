"""Entries of page tables, one by one: where a kernel that makes a new table finds the old ones and puts the new ones."""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.layout.dtypes import dtype
from kvgen.plan.params import Access, Array, Param, Size
from kvgen.spec.cache import Cache, Continuous
from kvgen.spec.tables import CSR, Indirect, PerKV, Ring


@dataclass(frozen=True)
class EntryList:
    """The entries that a request's pages have in one table, as C: `old` of logical page `i` of request `b`, `new` in the
    table that the call brings, `fresh[at]` the free page that request `b` may have for it, `id` its name in PageIds, `size`
    how many pages every layer has."""

    array: str
    new_array: str
    old: str
    new: str
    fresh: str
    at: str
    id: str
    size: str


def table_name(cache: Cache) -> str:
    """The argument of the cache that has the page ids."""
    table = cache.page_table
    return "page_indices" if isinstance(table, CSR) else "req_to_token" if isinstance(table, Indirect) else "page_table"


def new_table(
    cache: Cache, doc: str, *, scales: bool = False, in_place: bool = False, access: Access = "inout"
) -> tuple[Param, ...]:
    """The new table that a call brings, of the form of the old one, and its stride; `in_place`: it may be the old one."""
    table = cache.page_table
    index = dtype(table.dtype)
    field = "table_dtype" if isinstance(cache, Continuous) else "table.dtype"
    name = f"new_{table_name(cache)}"
    shape: tuple[int | str, ...] = ("B", "M")
    if scales:
        name, shape = "new_scales_page_table", ("B", "MS")
    elif isinstance(cache, Continuous):
        shape = ("B",)
    elif isinstance(table, CSR):
        shape = ("I",)
    elif isinstance(table, PerKV):
        shape = ("B", 2, "M")
    elif isinstance(table, Indirect):
        shape = ("R", "M")
    strided = len(shape) > 1
    same = (table_name(cache),) if in_place else ()
    found: list[Param] = [
        Array(
            name, index.name, shape, access=access, strided=strided, untrusted=True, doc=doc, field=field, in_place=same
        )
    ]
    if strided:
        found.append(Size(f"{name}_stride", "i64", f"{name}.stride"))
    return tuple(found)


def entry_lists(cache: Cache) -> tuple[EntryList, ...]:
    """Where entries lie: one list, or two where K and V, or scales, have ids of their own."""
    table, name = cache.page_table, table_name(cache)
    row, column = "b", "i"
    if isinstance(table, CSR):
        place = "load_index(cache.page_indptr, b) + i"
        return (EntryList(f"cache.{name}", f"new_{name}", place, place, "", "", "id", "pages.num_pages"),)
    if isinstance(table, Indirect):
        row = "load_index(cache.request_ids, b)"
    if isinstance(table, Ring):
        column, at = "i % cache.table_pages", "(uint64_t)b * cache.table_pages + i % cache.table_pages"
    else:
        at = "2 * (uint64_t)b" if isinstance(table, PerKV) else "b"

    def of(stride: str, more: str = "") -> str:
        return f"(int64_t){row} * {stride} + {column}{more}"

    block = isinstance(cache, Continuous)
    found = [
        EntryList(
            f"cache.{name}",
            f"new_{name}",
            "b" if block else of("cache.table_stride"),
            "b" if block else of(f"new_{name}_stride"),
            "fresh",
            at,
            "k_id" if isinstance(table, PerKV) else "id",
            "pages.num_pages",
        )
    ]
    if isinstance(table, PerKV):
        v = " + cache.kv_table_stride"
        found.append(
            EntryList(
                f"cache.{name}",
                f"new_{name}",
                of("cache.table_stride", v),
                of(f"new_{name}_stride", v),
                "fresh",
                "2 * (uint64_t)b + 1",
                "v_id",
                "pages.num_pages",
            )
        )
    elif cache.storage.own_table:
        name = "scales_page_table"
        found.append(
            EntryList(
                f"cache.{name}",
                f"new_{name}",
                of("cache.scales_table_stride"),
                of(f"new_{name}_stride"),
                "fresh_scales",
                "b",
                "scale_id",
                "pages.num_scale_pages",
            )
        )
    return tuple(found)
