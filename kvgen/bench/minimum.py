"""The fewest 32-byte sectors an operation can touch: those that hold what it must read or write, by its semantics.

Every element that must be touched is marked in an array of the memory's shape, once; where the elements lie is what the
oracle's own view of a pool says (kvgen.reference). No kernel has a part in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen.bench.scene import LAYER, LAYERS, Call, Scene
from kvgen.dtypes import dtype
from kvgen.reference import Rows, TableView, cache_rows
from kvgen.runtime.faults import Fault
from kvgen.spec.table import CSR, Indirect, Ring

SECTOR: Final = 32  # bytes
Marks = NDArray[np.bool_]


def minimum_sectors(scene: Scene, call: Call) -> dict[str, int]:
    """By the name of a launch's buffer, the sectors that `call` must touch; a buffer that it need not touch is left out.

    Tables count the entries that say where the tokens are: a page's entry once, a request's length and offsets once.
    """
    tables = scene.tables(call.kind)
    marked = _Marked(scene, tables)
    slots = call.arrays.get("slots")
    taken = np.ones(call.rows, np.bool_)  # rows of the inputs and outputs
    if slots is not None:
        taken = slots >= 0
        for slot in slots[taken].tolist():
            page, token = divmod(slot, scene.tokens)
            marked.row((page, page), token)
    else:
        if call.kind == "append":
            taken[...] = False
        for b, token, row in _tokens(scene, call):
            marked.token(b, token)
            if call.kind == "append":
                taken[row] = True
        if call.kind != "gather" or isinstance(scene.cache.page_table, Ring):
            marked.lengths()
    found = marked.sectors()
    for name, array in call.arrays.items():
        if array.ndim == 3:
            found[name] = _count(np.broadcast_to(taken[:, None, None], array.shape), array.itemsize)
        elif name != "errors":
            found[name] = -(-array.nbytes // SECTOR)
    return {name: n for name, n in found.items() if n}


def planning_sectors(scene: Scene) -> dict[str, int]:
    """What a planner must read to divide the work: every request's length."""
    marked = _Marked(scene, scene.tables("decode"))
    marked.lengths()
    return {name: n for name, n in marked.sectors().items() if n}


def _tokens(scene: Scene, call: Call) -> Iterator[tuple[int, int, int]]:
    """(request, position, row of the new tokens) of every token that is read or written."""
    end = 0
    for b, (total, new) in enumerate(zip(scene.workload.totals, scene.workload.new, strict=True)):
        first = total - scene.alive(b)
        end += new
        if call.kind == "append":
            # In a ring, pages that later rows of the same step take over are not written.
            first = max(total - new, (-(-total // scene.tokens) - len(scene.ids[b])) * scene.tokens)
        yield from ((b, token, end - total + token) for token in range(first, total))


class _Marked:
    """Which elements of pools and tables have been touched."""

    def __init__(self, scene: Scene, tables: dict[str, NDArray[Any]]) -> None:
        self._scene = scene
        self._view: TableView = scene.view(tables)
        self._tables: dict[str, Marks] = {name: np.zeros(array.shape, np.bool_) for name, array in tables.items()}
        self._pools: dict[str, Marks | list[Marks]] = {}
        for name, pool in scene.pools.items():
            blank = [np.zeros(a.shape, np.bool_) for a in (pool if isinstance(pool, list) else [pool])]
            self._pools[name] = blank if isinstance(pool, list) else blank[0]
        self._rows: tuple[Rows, ...] = cache_rows(scene.cache, list(self._pools.values()), LAYER)
        self._full = [np.ones((r.heads, r.dim), np.bool_) for r in self._rows]

    def row(self, pages: tuple[int, int], token: int) -> None:
        """K and V of one token."""
        for rows, full, page in zip(self._rows, self._full, pages, strict=False):
            rows.write(page, token, full)

    def token(self, b: int, position: int) -> None:
        """One token of a request, and the table's entries that lead to it."""
        page, token = divmod(position, self._scene.tokens)
        ids = self._view.page(b, page)
        if isinstance(ids, Fault):
            raise AssertionError(f"request {b}, token {position}: {ids.name} in a table of kvgen bench's own")
        self.row(ids, token)
        table, marks, arrays = self._scene.cache.page_table, self._tables, self._view.arrays
        if isinstance(table, CSR):
            marks["page_indptr"][b : b + 2] = True
            marks["page_indices"][int(arrays["page_indptr"][b]) + page] = True
        elif isinstance(table, Indirect):
            marks["request_ids"][b] = True
            marks["req_to_token"][int(arrays["request_ids"][b]), page] = True
        elif marks["page_table"].ndim == 1:
            marks["page_table"][b] = True
        else:
            column = page % marks["page_table"].shape[-1] if isinstance(table, Ring) else page
            marks["page_table"][b, ..., column] = True

    def lengths(self) -> None:
        """The lengths of all requests."""
        names = ("lengths",) if "lengths" in self._tables else ("page_indptr", "last_page_len")
        for name in names:
            self._tables[name][...] = True

    def sectors(self) -> dict[str, int]:
        """By buffer; tensors of one layer are called `name[layer]`, as launches call them."""
        size, found = dtype(self._scene.cache.dtype).bytes, dict[str, int]()
        for name, marks in self._pools.items():
            if isinstance(marks, list):
                found |= {f"{name}[{i}]": _count(marks[i], size) for i in range(LAYERS)}
            else:
                found[name] = _count(marks, size)
        for name, entries in self._tables.items():
            found[name] = _count(entries, self._view.arrays[name].itemsize)
        return found


def _count(marks: Marks, itemsize: int) -> int:
    """Sectors with a marked element, of a packed array that begins with a sector."""
    per_sector = SECTOR // itemsize
    flat = marks.reshape(-1)
    padded = np.zeros(-(-flat.size // per_sector) * per_sector, np.bool_)
    padded[: flat.size] = flat
    return int(padded.reshape(-1, per_sector).any(axis=1).sum())
