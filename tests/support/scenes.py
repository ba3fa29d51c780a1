"""A batch as memory: pools with canaries, page tables with poison, lengths; and the oracle's view of the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvgen import CSR, Continuous, Indirect, KernelSet, Mapped, PerKV, Ragged, Ring
from kvgen.layout.dtypes import dtype
from kvgen.ops import Decode
from kvgen.reference import Place, Rows, TableView, cache_rows
from tests.support.batches import OPEN_TOKENS, Batch
from tests.support.memory import Bytes, Raw, Tensor

POISON = 0x7FFFFFFF
LAYERS = 2
# Tables of every request there is, and what says which row is whose.
BY_ROW = {Indirect: ("req_to_token", "request_ids"), Mapped: ("page_table", "idx_mapping")}
Memory = Mapping[str, Sequence[Bytes]]


class Scene:
    """A set's cache with a batch in it.

    `tables` are the table arguments of the generated Cache, `view` the oracle's reading of them. `fill` writes tokens.
    """

    layers = LAYERS

    def __init__(self, kernels: KernelSet, batch: Batch, counts: Sequence[int]) -> None:
        """`counts[b]` is what lengths say of request b; batch.totals says how many tokens its table must hold."""
        self.kernels, self.batch, self.cache = kernels, batch, kernels.cache
        self.rng = np.random.default_rng(batch.seed)
        self.tokens = 1 if self.cache.ragged else self.cache.page_tokens or OPEN_TOKENS
        self.residual = self.cache.storage.residual
        self.layer = int(self.rng.integers(self.layers))
        self._waiting: dict[tuple[int, int, int], Raw] = {}  # rows of K by layer, request and position
        self._rows: dict[int, tuple[Rows, ...]] = {}  # views of the scene's own memory, by layer
        self._lay_pages()
        self._lay_scale_pages()
        self._lay_tensors()
        self.tables = self._tables(counts)

    @property
    def scale(self) -> float:
        """The factor of the set's decode: its own, or 1 / sqrt(head_dim)."""
        given = [op.scale for op in self.kernels.ops if isinstance(op, Decode)]
        return given[0] if given and given[0] is not None else 1 / math.sqrt(self.cache.head_dim)

    # Pages -------------------------------------------------------------------------------------------------------

    @property
    def ring_pages(self) -> int:
        """Columns of a ring's table: just what the window needs."""
        table = self.cache.page_table
        assert isinstance(table, Ring)
        return -(-(table.window - 1) // self.tokens) + 1

    def _lay_pages(self) -> None:
        """Give every logical page of every request an id, all over the pool."""
        batch, table = self.batch, self.cache.page_table
        if isinstance(self.cache, Ragged):
            return self._lay_rows(self.cache)
        rate = self.cache.entry_tokens
        counts = [-(-(n // rate) // self.tokens) for n in batch.totals]
        if isinstance(self.cache, Continuous):
            counts = [1] * len(counts)
        if isinstance(table, Ring):
            counts = [min(n, self.ring_pages) for n in counts]
        per_page = 2 if isinstance(table, PerKV) else 1
        entries = per_page * sum(counts) + 2
        order = iter(self.rng.permutation(entries))
        self.entries = [[[int(next(order)) for _ in range(per_page)] for _ in range(n)] for n in counts]
        self.pages = entries * table.id_multiplier
        if batch.shared and not isinstance(table, Ring | Indirect) and not isinstance(self.cache, Continuous):
            for b in range(1, len(counts)):
                whole = min((batch.totals[i] - batch.new[i]) // rate // self.tokens for i in (0, b))
                self.entries[b][:whole] = self.entries[0][:whole]

    def _lay_rows(self, cache: Ragged) -> None:
        """Requests one after another, rows of nobody before and after them."""
        before, after = (int(self.rng.integers(3)) for _ in range(2))
        self.offsets = [before + sum(self.batch.totals[:b]) for b in range(len(self.batch.totals) + 1)]
        self.pages = min(self.offsets[-1] + after, cache.total_tokens or 2**31)
        self.entries = [
            [[first + i] for i in range(n)] for first, n in zip(self.offsets, self.batch.totals, strict=False)
        ]

    def _lay_scale_pages(self) -> None:
        """Pages of scales: at least those of the values, or, with a table of their own, as many or few as it names.

        Ids of values then often name other scales, of this request or another one: whoever takes them gets it wrong.
        """
        more = 0 if self.cache.ragged else int(self.rng.integers(3))
        if not self.cache.storage.own_table:
            self.scale_pages = self.pages + more
            return
        multiplier = self.cache.page_table.id_multiplier
        quants = [q for q in self.cache.quants.values() if q is not None and q.computed]
        least = 0 if all(q.own_table for q in quants) else self.pages // multiplier
        counts = [len(request) for request in self.entries]
        entries = max(sum(counts) + more, least)
        order = iter(self.rng.permutation(entries))
        self.scale_entries = [[int(next(order)) for _ in range(n)] for n in counts]
        self.scale_pages = entries * multiplier

    def _lay_tensors(self) -> None:
        """Every tensor of the storage, in a dtype that it may have; given scales are numbers, the rest is `fill`."""
        cache, batch = self.cache, self.batch
        sizes = {"pages": self.pages, "scale_pages": self.scale_pages, "layers": self.layers, "tokens": self.tokens}
        sizes |= {"B": len(batch.totals), "rows": self.pages}
        copies = self.layers if cache.layout.layers == "pointers" else 1
        self.tensors: dict[str, list[Tensor]] = {}
        for tensor in cache.storage.tensors:
            element = tensor.dtypes[int(self.rng.integers(len(tensor.dtypes)))]
            if tensor.name.endswith("scales") and self.pages % 2:  # other pools have pages that no copy can begin at
                tensor = replace(tensor, align=max(16, tensor.align))
            self.tensors[tensor.name] = [Tensor.of(tensor, sizes, element, batch.fill) for _ in range(copies)]
            for found in self.tensors[tensor.name] if tensor.given else ():
                array = found.view(found.memory)
                array[...] = (2.0 ** self.rng.integers(-4, 3, array.shape) * (1 + self.rng.random(array.shape))).astype(
                    array.dtype
                )
        if self.residual:
            sealed = self.tensors["k_sealed"] = [
                Tensor((len(batch.totals),), (1,), dtype(cache.lengths_dtype).numpy(), "bytes")
            ]
            sealed[0].view(sealed[0].memory)[...] = 0

    def arrays(self, memory: Memory | None = None) -> dict[str, Any]:
        """The tensors by name, over `memory` (None: the scene's own): an array, or one a layer."""
        found: dict[str, Any] = {}
        for name, tensors in self.tensors.items():
            views = [t.view(t.memory if memory is None else memory[name][j]) for j, t in enumerate(tensors)]
            found[name] = views if self.cache.layout.layers == "pointers" and name != "k_sealed" else views[0]
        return found

    def arguments(self) -> dict[str, Any]:
        """Everything that the generated Cache takes."""
        return self.arrays() | self.tables

    def snapshot(self) -> dict[str, list[Bytes]]:
        """A copy of all memory of the cache, guards and gaps included."""
        return {name: [t.memory.copy() for t in tensors] for name, tensors in self.tensors.items()}

    def rows(self, memory: Memory | None = None) -> tuple[Rows, ...]:
        """The oracle's K and V of the scene's layer, over `memory` (None: the scene's own)."""
        if memory is not None:
            return cache_rows(self.cache, self.arrays(memory), self.layer)
        if self.layer not in self._rows:
            self._rows[self.layer] = cache_rows(self.cache, self.arrays(), self.layer)
        return self._rows[self.layer]

    # Tables ------------------------------------------------------------------------------------------------------

    def _index(self, values: Any, kind: str) -> Raw:
        return np.array(values, dtype(kind).numpy())

    def _matrix(self, rows: list[list[int]], columns: int, kind: str) -> Raw:
        """Rows of ids, poison after their end and, where strided, between them."""
        align = getattr(self.cache.page_table, "align", 1)
        width = -(-(columns + 3 * self.batch.strided) // align) * align if len(rows) > 1 else columns
        memory = np.full(max(len(rows), 1) * width + 64, POISON).astype(dtype(kind).numpy())
        start = -memory.ctypes.data // memory.itemsize % 8
        wide = memory[start : start + len(rows) * width].reshape(len(rows), width)
        for row, ids in zip(wide, rows, strict=True):
            row[: len(ids)] = ids
        return wide[:, :columns]

    def _tables(self, counts: Sequence[int]) -> dict[str, Raw]:
        found = self._value_tables(counts)
        if self.cache.storage.own_table:
            columns = max(map(len, self.scale_entries), default=0) + int(self.rng.integers(3))
            found["scales_page_table"] = self._matrix(self.scale_entries, columns, self.cache.page_table.dtype)
        return found

    def _value_tables(self, counts: Sequence[int]) -> dict[str, Raw]:
        cache, table, batch = self.cache, self.cache.page_table, len(self.batch.totals)
        ids = [[e[0] for e in pages] for pages in self.entries]
        columns = max(map(len, ids), default=0) + int(self.rng.integers(3))
        if isinstance(cache, Ragged):
            return {"kv_offsets": self._index(self.offsets, cache.lengths_dtype)}
        lengths = {"lengths": self._index(counts, cache.lengths_dtype)}
        if isinstance(cache, Continuous):
            return lengths | {"page_table": self._index([i[0] for i in ids], table.dtype)}
        if isinstance(table, CSR):
            flat = [i for request in ids for i in request] + [POISON, POISON]
            found = {
                "page_indices": self._index(flat, table.dtype),
                "page_indptr": self._index(np.cumsum([0, *map(len, ids)]), table.dtype),
            }
            if not table.last_page_len:
                return lengths | found
            last = [n - max(len(i) - 1, 0) * self.tokens for n, i in zip(counts, ids, strict=True)]
            return found | {"last_page_len": self._index(last, table.dtype)}
        if isinstance(table, PerKV):
            wide = self._index(np.full((batch, 3 if self.batch.strided else 2, columns), POISON), table.dtype)
            for b, pages in enumerate(self.entries):
                for i, pair in enumerate(pages):
                    wide[b, :2, i] = pair
            return lengths | {"page_table": wide[:, :2]}
        if isinstance(table, Indirect | Mapped):
            array, rows = BY_ROW[type(table)]
            places = self.rng.permutation(batch + 2)[:batch]
            matrix: list[list[int]] = [[] for _ in range(batch + 2)]
            for place, request in zip(places, ids, strict=True):
                matrix[place] = request
            requests = self._index(places, table.request_dtype)
            return lengths | {array: self._matrix(matrix, columns, table.dtype), rows: requests}
        if isinstance(table, Ring):
            ring: list[list[int]] = []
            for n, request in zip(self.batch.totals, ids, strict=True):
                pages = -(-n // self.tokens)
                row = [POISON] * self.ring_pages
                for i in range(pages - len(request), pages):
                    row[i % self.ring_pages] = request[i - pages + len(request)]
                ring.append(row)
            return lengths | {"page_table": self._matrix(ring, self.ring_pages, table.dtype)}
        return lengths | {"page_table": self._matrix(ids, columns, table.dtype)}

    def row(self, b: int) -> int:
        """The row of request b in a table with columns."""
        by_row = BY_ROW.get(type(self.cache.page_table))
        return int(self.tables[by_row[1]][b]) if by_row else b

    def trim(self, pages: int) -> None:
        """Cut tables with columns down to `pages` of them, rows packed: past a row's end lies the next one."""
        for name in ("page_table", "req_to_token", "scales_page_table"):
            if name in self.tables and self.tables[name].ndim > 1:
                self.tables[name] = self.tables[name][..., :pages].copy()

    @property
    def view(self) -> TableView:
        """The oracle's reading of the tables as they are now."""
        return TableView(self.cache, self.tables, self.pages, self.tokens, self.scale_pages)

    # Content -----------------------------------------------------------------------------------------------------

    def values(self, *shape: int) -> Raw:
        """Random values of the cache's dtype, of about unit size."""
        return self.rng.standard_normal(shape).astype(dtype(self.cache.dtype).numpy())

    def wild(self, *shape: int) -> Raw:
        """Rows `[T, heads, dim]` of many sizes: among them all zero, all alike, none negative, hardly any."""
        x = self.rng.standard_normal(shape)
        if any(q is not None for q in self.cache.quants.values()):
            sizes = 2.0 ** self.rng.choice((0, 0, 0, -14, 5), shape[:2])[..., None]
            kinds = self.rng.integers(0, 12, shape[:2])[..., None]
            x = np.select([kinds == 0, kinds == 1, kinds == 2], [0 * x, 0 * x + x[..., :1], np.abs(x)], x) * sizes
        return x.astype(dtype(self.cache.dtype).numpy())

    def write(self, b: int, position: int, values: Sequence[Raw]) -> None:
        """Put K and V rows of one token of request b in the pool, through the oracle.

        Of tokens that are quantized together, the group is written once all of it is known.
        """
        self._write(b, position, self._places(b, position // self.tokens), values)

    def _places(self, b: int, page: int) -> tuple[Place, Place]:
        places = self.view.places(b, page)
        assert isinstance(places, tuple), (b, page, places)
        return places

    def _write(self, b: int, position: int, places: tuple[Place, Place], values: Sequence[Raw]) -> None:
        for rows, place, value in zip(self.rows(), places, values, strict=False):
            if rows.residual:
                self._write_waiting(rows, b, position, place, value)
            else:
                rows.write(place.page, position % self.tokens, value, place.scales)

    def _write_waiting(self, rows: Rows, b: int, position: int, place: Place, value: Raw) -> None:
        assert rows.sealed is not None
        sealed, size = int(rows.sealed[b]), self.residual
        rows.put(b, position, place, value, sealed)
        self._waiting[self.layer, b, position] = value.copy()
        first = position // size * size
        group = [self._waiting.get((self.layer, b, p)) for p in range(first, first + size)]
        known = [row for row in group if row is not None]
        if position < sealed and len(known) == size:
            rows.seal(b, first, place, np.stack(known), first)

    def fill(self, counts: Sequence[int]) -> None:
        """Write the living ones of the first counts[b] tokens of every request, or their entries; full groups are sealed."""
        for b, count in enumerate(n // self.cache.entry_tokens for n in counts):
            first = self.view.first_token(count)
            if self.residual:
                self.arrays()["k_sealed"][b] = count // self.residual * self.residual
                first = first // self.residual * self.residual
            for page in range(first // self.tokens, -(-count // self.tokens)):
                places, begin = self._places(b, page), max(first, page * self.tokens)
                end = min(count, (page + 1) * self.tokens)
                values = [self.values(end - begin, r.heads, r.dim) for r in self.rows()]
                if not self.residual:
                    for rows, place, value in zip(self.rows(), places, values, strict=False):
                        rows.write_run(place.page, begin % self.tokens, value, place.scales)
                    continue
                for position in range(begin, end):
                    self._write(b, position, places, [v[position - begin] for v in values])
