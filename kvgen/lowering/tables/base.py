"""A form of page table to its kernels: a part of the cache's struct, a device type, a file of macros, lists of entries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Literal

from kvgen.plan.params import Array, Size


@dataclass(frozen=True)
class EntryList:
    """The entries that a request's pages have in one table, by names; where they lie say the macros of its template.

    `array` is the field of the cache, `stride` the one of its rows ("" where each request has one entry), `fresh` the array of
    free pages for them, `id` their name in PageIds and `size` how many pages every layer has; `second` of two rows a request.
    """

    array: str
    stride: str = ""
    fresh: str = "fresh"
    id: str = "id"
    size: str = "num_pages"
    second: bool = False

    @property
    def struct(self) -> str:
        """The struct that says where they lie: IdList, KIdList ..."""
        return "".join(word.title() for word in self.id.split("_")) + "List"

    @property
    def new_array(self) -> str:
        """The table that the call brings."""
        return f"new_{self.array}"

    @property
    def new_stride(self) -> str:
        """The stride of its rows."""
        return f"new_{self.array}_stride"


@dataclass(frozen=True)
class TableForm:
    """A cache's page table as its kernels see it.

    `template` is the file of templates/cache/ with the macros of its entries; `policy` is the device type that finds pages, which
    `header` in device/cache/ has ("" of states, which have no pages). `fields` is its part of the cache's struct, `array` the
    field that has the page ids, `ids` are their names in PageIds and `entries` where they lie. `vector` entries are read at
    once, `window` tokens of a request stay (0: all), in a ring whose columns pages take in turn (`wraps`).

    For operations that make tables: `slices` of one list say how many pages a request has; `copied_whole`: requests share
    no page, not even a full one; `fresh` is the shape of the free pages that they are given then; `rewritten_as` are the
    forms its ids can be copied to, as to_csr and to_dense do.
    """

    template: str
    fields: tuple[Array | Size, ...]
    array: str
    entries: tuple[EntryList, ...]
    policy: str = ""
    ids: tuple[str, ...] = ("id",)
    vector: int = 1
    window: int = 0
    wraps: bool = False
    slices: bool = False
    copied_whole: bool = False
    fresh: tuple[int | str, ...] = ("B",)
    rewritten_as: tuple[Literal["csr", "dense"], ...] = ()

    @property
    def header(self) -> str:
        """The header of `policy`."""
        return f"tables/{PurePath(self.template).stem}.cuh"

    def new_table(self, doc: str, *, scales: bool = False, in_place: bool = False) -> tuple[Array | Size, ...]:
        """The new table that a call brings, of the form of the old one, and its stride; `in_place`: it may be the old one."""
        array = "scales_page_table" if scales else self.array
        old = next(f for f in self.fields if isinstance(f, Array) and f.name == array)
        name, same = f"new_{old.name}", (old.name,) if in_place else ()
        new = replace(old, name=name, access="inout", align=1, doc=doc, in_place=same)
        return (new, Size(f"{name}_stride", "i64", f"{name}.stride")) if old.strided else (new,)
