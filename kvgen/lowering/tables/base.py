"""What a form of page table is to its kernels: a part of the cache's struct, a file of macros, lists of entries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from kvgen.plan.params import Array, Size


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


@dataclass(frozen=True)
class TableForm:
    """A cache's page table as its kernels see it.

    `template` is the file of templates/cache/ that holds its macros, `fields` is its part of the cache's struct, `array` the
    field that has the page ids, `ids` are their names in PageIds and `entries` where they lie. `vector` entries are read at
    once, `window` tokens of a request stay (0: all), in a ring whose columns pages take in turn (`wraps`).

    For operations that make tables: `slices` of one list say how many pages a request has; `copied_whole`: requests share
    no page, not even a full one; `fresh` is the shape of the free pages that they are given then; `row_exists` says of
    request `b`, as C, whether the table has a place for it; `rewritten_as` are the forms its ids can be copied to, as
    to_csr and to_dense do.
    """

    template: str
    fields: tuple[Array | Size, ...]
    array: str
    entries: tuple[EntryList, ...]
    ids: tuple[str, ...] = ("id",)
    vector: int = 1
    window: int = 0
    wraps: bool = False
    slices: bool = False
    copied_whole: bool = False
    fresh: tuple[int | str, ...] = ("B",)
    row_exists: str = "true"
    rewritten_as: tuple[Literal["csr", "dense"], ...] = ()

    def new_table(self, doc: str, *, scales: bool = False, in_place: bool = False) -> tuple[Array | Size, ...]:
        """The new table that a call brings, of the form of the old one, and its stride; `in_place`: it may be the old one."""
        array = "scales_page_table" if scales else self.array
        old = next(f for f in self.fields if isinstance(f, Array) and f.name == array)
        name, same = f"new_{old.name}", (old.name,) if in_place else ()
        new = replace(old, name=name, access="inout", align=1, doc=doc, in_place=same)
        return (new, Size(f"{name}_stride", "i64", f"{name}.stride")) if old.strided else (new,)


def row_entries(
    array: str,
    stride: str,
    *,
    row: str = "b",
    column: str = "i",
    fresh: str = "fresh",
    at: str = "b",
    id: str = "id",
    size: str = "pages.num_pages",
) -> EntryList:
    """The entries of an array whose rows are `stride` apart."""
    old, new = (f"(int64_t){row} * {s} + {column}" for s in (f"cache.{stride}", f"new_{array}_stride"))
    return EntryList(f"cache.{array}", f"new_{array}", old, new, fresh, at, id, size)
