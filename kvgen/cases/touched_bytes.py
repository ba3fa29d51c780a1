"""Which bytes of a cache an operation must touch: every element that it reads or writes is marked once.

Marks are arrays of the memory's shape and type, whose bytes become 0xFF. Where elements, codes and scales lie is what the
oracle's own view of a pool says (kvgen.reference). No kernel has a part in it.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.scene import LAYER, LAYERS, Scene
from kvgen.reference import Place, Rows, TableView, cache_rows
from kvgen.reference.elements import Elements
from kvgen.reference.pages import own_scales, pages_of
from kvgen.reference.segments import Coded, Part
from kvgen.runtime.faults import Fault

SECTOR: Final = 32  # bytes
Marks = NDArray[np.bool_]
Raw = NDArray[Any]
# In a residual cache append writes the tokens that are in no full group; seal reads them and writes full groups.
Way = Literal["append", "seal", "read"]
WHOLE: Final = slice(None)


class Token(NamedTuple):
    """Token `position` of request `b`, which holds `after` tokens; row `row` of the step's, None for older ones."""

    b: int
    position: int
    row: int | None
    after: int


class Marked:
    """Which bytes of pools and tables have been touched, in one layer or in `every_layer`. `raw`: codes and scales are taken as
    they are, so that what dequantizes them beside the scales in pages is not needed."""

    def __init__(self, scene: Scene, tables: dict[str, Raw], *, raw: bool = False, every_layer: bool = False) -> None:
        self._scene, self._raw = scene, raw
        self._view: TableView = scene.view(tables)
        self._tables: dict[str, Marks] = {name: np.zeros(array.shape, np.bool_) for name, array in tables.items()}
        self._pools = {
            name: [np.zeros_like(p) for p in pool] if isinstance(pool, list) else np.zeros_like(pool)
            for name, pool in scene.pools.items()
        }
        self._layers = tuple(range(LAYERS)) if every_layer else (LAYER,)
        self._rows: tuple[tuple[Rows, ...], ...] = ()
        if not scene.cache.states:
            arrays = {**self._pools, **self._view.arrays}
            self._rows = tuple(cache_rows(scene.kv, arrays, layer) for layer in self._layers)

    def row(self, places: tuple[Place, ...], token: int) -> None:
        """K and V of one token, whose pages are `places`."""
        for layer in self._rows:
            for rows, place in zip(layer, places, strict=False):
                for part in rows.parts:
                    self._part(part, place, token)

    def _part(self, part: Part, place: Place, token: int, dims: slice = WHOLE, heads: slice = WHOLE) -> None:
        """A token's dims that are stored one way: elements, or codes and what scales they have, of some heads. `dims` are
        enough where others have no scale in common with them."""
        if not isinstance(part, Coded):
            _touch(part.elements, place.page, token, dims, heads)
            return
        _touch(part.codes, place.page, token, WHOLE if part.scales is not None else dims, heads)
        if part.scales is not None:
            _touch(part.scales, place.scales, token // part.block[0], heads=_blocks(heads, part.block[1]))
        if self._raw:
            return
        if part.given is not None:
            part.given[...] = _ones(part.given)
        self._global_scales()

    def _global_scales(self) -> None:
        for name, pool in self._pools.items():
            if name.endswith("_global_scale"):
                for layer in self._layers:
                    mine = pool[layer] if isinstance(pool, list) or pool.ndim > 1 else pool
                    mine[...] = _ones(mine)

    def token(
        self, token: Token, way: Way = "read", roles: str = "kv", dims: slice = WHOLE, heads: slice = WHOLE
    ) -> set[str]:
        """One token as an operation touches it, and the table's entries that lead there; of `roles` alone, of a head's `dims`
        alone, and of `heads` alone.

        Returns the roles that it touches.
        """
        b, page = token.b, token.position // self._scene.tokens
        places = self._view.places(b, page)
        if isinstance(places, Fault):
            raise AssertionError(f"request {b}, token {token.position}: {places.name} in a table of kvgen bench's own")
        touched = set[str]()
        roles_of_layers = [
            (name, rows, place) for layer in self._rows for name, rows, place in zip("kv", layer, places, strict=False)
        ]
        for name, rows, place in roles_of_layers:
            end = 0
            for part in rows.parts if name in roles else ():
                begin, end = end, end + part.dim
                mine = _within(dims, begin, end)
                if mine is None:
                    continue
                in_page, in_tail = _where(rows, part, token, way)
                if in_page:
                    self._part(part, place, token.position % self._scene.tokens, mine, heads)
                    self._lead(b, page)
                if in_tail:
                    assert rows.tail is not None
                    slot = rows.tail[b, token.position % rows.residual, heads]
                    slot[...] = _ones(slot)
                if (in_page or in_tail) and rows.residual and way != "append":
                    self._tables[f"{name}_sealed"][b] = True
                touched |= {name} if in_page or in_tail else set()
        return touched

    def _lead(self, b: int, page: int) -> None:
        """The entries of the table that say where a page of request b is."""
        for name, at in (*self._view.form.read_first(b), *self._view.entry_places(b, page)):
            self._tables[name][at] = True

    def lengths(self) -> None:
        """The lengths of all requests."""
        for name in self._view.form.lengths_in:
            self._tables[name][...] = True

    def pages(self, entries: NDArray[np.int64], *, scales: bool = False, layers: slice = WHOLE) -> None:
        """Whole pages, in every layer or some: those of these entries of a page table, or of the one for scales."""
        cache = self._scene.cache
        own = cache.storage.own_table
        for name, each in pages_of(cache, self._pools).items():
            if own and own_scales(cache, name) != scales:
                continue
            for pages in each[layers]:
                pages[entries * cache.page_table.id_multiplier] = _ones(pages)

    def sectors(self) -> dict[str, int]:
        """By buffer; tensors of one layer are called `name[layer]`, as launches call them."""
        found = dict[str, int]()
        for name, marks in self._pools.items():
            if isinstance(marks, list):
                found |= {f"{name}[{i}]": sectors_of(marks[i].view(np.uint8)) for i in range(LAYERS)}
            else:
                found[name] = sectors_of(marks.view(np.uint8))
        for name, entries in self._tables.items():
            found[name] = sectors_of(np.repeat(entries.reshape(-1), self._view.arrays[name].itemsize))
        return found


def _where(rows: Rows, part: Part, token: Token, way: Way) -> tuple[bool, bool]:
    """(True where an operation touches these dims of a token in its page, True where it does in the tail)."""
    if rows.tail is None or not isinstance(part, Coded):
        return way != "seal", False
    sealed = token.position < token.after // rows.residual * rows.residual
    if way == "append":
        return False, not sealed  # seal has stored the others
    return (True, token.row is None) if way == "seal" else (sealed, not sealed)


def _ones(like: Raw) -> Any:
    """An element of the same type whose bytes are all 0xFF."""
    return np.full(like.dtype.itemsize, 0xFF, np.uint8).view(like.dtype)[0]


def _within(dims: slice, begin: int, end: int) -> slice | None:
    """The dims among `dims` of a head that a part has, counted in it; the part has dims `begin` to `end`; None without any."""
    if dims == WHOLE:
        return WHOLE
    first, last = max(dims.start - begin, 0), min(dims.stop, end) - begin
    return slice(first, last) if first < last else None


def _blocks(heads: slice, sharing: int) -> slice:
    """The blocks of `sharing` heads that some heads lie in."""
    return WHOLE if heads == WHOLE else slice(heads.start // sharing, -(-heads.stop // sharing))


def _touch(elements: Elements, page: int, token: int, dims: slice = WHOLE, heads: slice = WHOLE) -> None:
    """Mark a token's row of values, codes or scales."""
    row = elements.read(page, token)
    row[heads, dims] = 2**elements.packed - 1 if elements.packed else _ones(row)
    elements.write(page, token, row)


def sectors_of(touched: NDArray[Any]) -> int:
    """Sectors with a marked byte, of a packed array that begins with a sector."""
    flat = touched.reshape(-1)
    padded = np.zeros(-(-flat.size // SECTOR) * SECTOR, np.bool_)
    padded[: flat.size] = flat
    return int(padded.reshape(-1, SECTOR).any(axis=1).sum())
