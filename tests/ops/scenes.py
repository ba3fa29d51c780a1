"""A batch as memory: pools with canaries, page tables with poison, lengths; and the oracle's view of the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen import CSR, Continuous, Indirect, KernelSet, PerKV, Ring
from kvgen.dtypes import dtype
from kvgen.ops import Decode
from kvgen.reference import Rows, TableView, cache_rows
from tests.ops.batches import OPEN_TOKENS, Batch

Raw = NDArray[Any]
POISON = 0x7FFFFFFF
GUARD = 256  # bytes before and after every tensor
LAYERS = 2


def aligned(nbytes: int) -> NDArray[np.uint8]:
    """`nbytes` bytes of 0xEE at an address divisible by 256."""
    raw = np.full(nbytes + 256, 0xEE, np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start : start + nbytes]


def rows_array(rows: int, width: Sequence[int], element: str, *, strided: bool, guard: int = 1) -> tuple[Raw, Raw]:
    """(array `[rows, *width]`, all memory around it): canaries, `guard` rows before and after, gaps if `strided`."""
    kind = dtype(element).numpy()
    stride = math.prod(width) * kind.itemsize
    if strided:
        stride = -(-stride // 16) * 16 + 32
    base = -(-guard * stride // 16) * 16
    memory = aligned(base + (rows + guard) * stride)
    inner = np.cumprod((kind.itemsize, *width[:0:-1]))[::-1]
    return np.ndarray((rows, *width), kind, memory.data, base, (stride, *(int(s) for s in inner))), memory


class Tensor:
    """One tensor of the pool in memory of its own: padded pages and layers, canaries around it."""

    def __init__(self, axes: str, extents: dict[str, int], element: str, fill: str) -> None:
        kind = dtype(element).numpy()
        words = axes.replace("block", "page").split()
        shape, names = [], []
        for word in words:
            name, _, modulo = word.partition("%")
            name, _, divide = name.partition("/")
            shape.append(int(modulo) if modulo else extents[name] // int(divide or 1))
            names.append(name)
        strides, step = [0] * len(shape), 1
        outer = next(i for i, n in enumerate(names) if n not in ("page", "kv", "layer"))
        for i in reversed(range(len(shape))):
            strides[i] = step
            step *= shape[i]
            if i <= outer:  # from here outwards strides are free: pages and layers lie apart
                step = -(-step // 8) * 8 + 16
        self.shape, self.strides, self.kind = tuple(shape), tuple(s * kind.itemsize for s in strides), kind
        reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
        self.memory = aligned(2 * GUARD + reach * kind.itemsize)
        if fill != "bytes":
            self.memory.view(kind)[...] = np.nan if fill == "nan" else np.inf

    def view(self, memory: NDArray[np.uint8]) -> Raw:
        """The tensor in `memory`, its own or a copy."""
        return np.ndarray(self.shape, self.kind, memory.data, GUARD, self.strides)


class Scene:
    """A set's cache with a batch in it.

    `tables` are the table arguments of the generated Cache, `view` the oracle's reading of them. `fill` writes tokens.
    """

    def __init__(self, kernels: KernelSet, batch: Batch, counts: Sequence[int]) -> None:
        """`counts[b]` is what lengths say of request b; batch.totals says how many tokens its table must hold."""
        self.kernels, self.batch, self.cache = kernels, batch, kernels.cache
        self.rng = np.random.default_rng(batch.seed)
        self.tokens = self.cache.page_tokens or OPEN_TOKENS
        self.layer = int(self.rng.integers(LAYERS))
        self._lay_pages()
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
        counts = [-(-n // self.tokens) for n in batch.totals]
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
                whole = min((batch.totals[i] - batch.new[i]) // self.tokens for i in (0, b))
                self.entries[b][:whole] = self.entries[0][:whole]

    def _lay_tensors(self) -> None:
        cache, layout = self.cache, self.cache.layout
        texts = [t for t in (layout.kv, layout.k, layout.v) if t]
        extents = {"page": self.pages, "layer": LAYERS, "token": self.tokens, "head": cache.kv_heads, "kv": 2}
        if cache.stores == "k":
            extents["kv"] = 1
        copies = LAYERS if layout.layers == "pointers" else 1
        self.tensors = []
        for i, text in enumerate(texts):
            sizes = extents | {"dim": cache.v_dim if i else cache.head_dim}
            self.tensors.append([Tensor(text, sizes, cache.dtype, self.batch.fill) for _ in range(copies)])

    def pools(self, memory: Sequence[Sequence[NDArray[np.uint8]]] | None = None) -> list[Any]:
        """The pool arguments of the generated Cache, over `memory` (None: the scene's own)."""
        found: list[Any] = []
        for i, tensors in enumerate(self.tensors):
            views = [t.view(t.memory if memory is None else memory[i][j]) for j, t in enumerate(tensors)]
            found.append(views if self.cache.layout.layers == "pointers" else views[0])
        return found

    def snapshot(self) -> list[list[NDArray[np.uint8]]]:
        """A copy of all pool memory, guards and gaps included."""
        return [[t.memory.copy() for t in tensors] for tensors in self.tensors]

    def rows(self, memory: Sequence[Sequence[NDArray[np.uint8]]] | None = None) -> tuple[Rows, ...]:
        """The oracle's K and V of the scene's layer."""
        return cache_rows(self.cache, self.pools(memory), self.layer)

    # Tables ------------------------------------------------------------------------------------------------------

    def _index(self, values: Any, kind: str) -> Raw:
        return np.array(values, dtype(kind).numpy())

    def _matrix(self, rows: list[list[int]], columns: int, kind: str) -> Raw:
        """Rows of ids, poison after their end and, where strided, between them."""
        wide = self._index(np.full((len(rows), columns + 3 * self.batch.strided), POISON), kind)
        for row, ids in zip(wide, rows, strict=True):
            row[: len(ids)] = ids
        return wide[:, :columns]

    def _tables(self, counts: Sequence[int]) -> dict[str, Raw]:
        cache, table, batch = self.cache, self.cache.page_table, len(self.batch.totals)
        ids = [[e[0] for e in pages] for pages in self.entries]
        columns = max(map(len, ids), default=0) + int(self.rng.integers(3))
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
        if isinstance(table, Indirect):
            places = self.rng.permutation(batch + 2)[:batch]
            matrix: list[list[int]] = [[] for _ in range(batch + 2)]
            for place, request in zip(places, ids, strict=True):
                matrix[place] = request
            requests = self._index(places, table.request_dtype)
            return lengths | {"req_to_token": self._matrix(matrix, columns, table.dtype), "request_ids": requests}
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

    def trim(self, pages: int) -> None:
        """Cut tables with columns down to `pages` of them, rows packed: past a row's end lies the next one."""
        for name in ("page_table", "req_to_token"):
            if name in self.tables and self.tables[name].ndim > 1:
                self.tables[name] = self.tables[name][..., :pages].copy()

    @property
    def view(self) -> TableView:
        """The oracle's reading of the tables as they are now."""
        return TableView(self.cache, self.tables, self.pages, self.tokens)

    # Content -----------------------------------------------------------------------------------------------------

    def values(self, *shape: int) -> Raw:
        """Random values of the cache's dtype, of about unit size."""
        return self.rng.standard_normal(shape).astype(dtype(self.cache.dtype).numpy())

    def write(self, b: int, position: int, values: Sequence[Raw]) -> None:
        """Put K and V rows of one token of request b in the pool, through the oracle."""
        page, token = divmod(position, self.tokens)
        ids = self.view.page(b, page)
        assert isinstance(ids, tuple), (b, position, ids)
        for rows, place, value in zip(self.rows(), ids, values, strict=False):
            rows.write(place, token, value)

    def fill(self, counts: Sequence[int]) -> None:
        """Write the living ones of the first counts[b] tokens of every request."""
        for b, count in enumerate(counts):
            for position in range(self.view.first_token(count), count):
                self.write(b, position, [self.values(r.heads, r.dim) for r in self.rows()])
