"""A cache as memory: every byte 0xEE until somebody writes it, page tables with wrong entries, and the oracle's view."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen import CSR, Continuous, Dense, Indirect, Mapped, PerKV, Ring
from kvgen.layout.dtypes import dtype
from kvgen.layout.storage import PoolTensor
from kvgen.reference import Place, Rows, TableView, cache_rows
from kvgen.runtime.faults import Fault
from tests.accessor.grid import Config

Raw = NDArray[Any]
Bytes = NDArray[np.uint8]
CANARY: Final = 0xEE
GUARD: Final = 256  # bytes before and after every tensor
LAYERS, LAYER, REQUESTS = 2, 1, 3
OPEN_TOKENS: Final = 21  # what a block of a continuous cache holds where only the pool says so
POISON: Final = 0x7FFFFFFF


def aligned(nbytes: int) -> Bytes:
    """Canaries at an address divisible by 256."""
    raw = np.full(nbytes + 256, CANARY, np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start : start + nbytes]


def reached(n: int, token: int, window: int, page: int, columns: int, *, before: bool) -> bool:
    """Whether a ring of n tokens reaches `token`: it is not older than the window, and every page from the oldest living
    token's to the newest one's has a column of its own, or at least the token's has."""
    if token < n - window or columns == 0:
        return False
    mine, newest = token // page, (n - 1) // page
    # What comes first this step pushes the oldest out of the window.
    oldest = max(0, n + before - window) // page
    others = range(mine + 1, newest + 1) if token < n else range(oldest, mine)
    return all(i % columns != mine % columns for i in others)


class Tensor:
    """One tensor in memory of its own, whose pages, layers and K and V lie as far apart as `pad` says."""

    def __init__(self, spec: PoolTensor, sizes: dict[str, int], pad: str) -> None:
        self.kind = dtype(spec.dtypes[-1]).numpy()
        self.shape = tuple(sizes[s] if isinstance(s, str) else s for s in spec.shape)
        item, strides, step = self.kind.itemsize, [0] * len(self.shape), 1
        inner = [i for i, s in enumerate(spec.strides) if s is not None]
        row = max((s or 0 for a, s in zip(spec.axes, spec.strides, strict=True) if a == "token"), default=0)
        for i in reversed(range(len(self.shape))):
            fixed = spec.strides[i]
            free = fixed is None and all(j > i for j in inner)
            if free:
                step = -(-step * item // 16) * 16 // item
                if row and -step % row:  # pages of whole rows, but for "part"
                    step += -step % row if pad != "part" else 0
                if spec.axes[i] == "page" and pad != "tight":
                    step += 2 * row if pad == "rows" and row else 48 // item
            strides[i] = step if fixed is None else fixed
            step = max(step, strides[i] * self.shape[i])
        self.strides = tuple(s * item for s in strides)
        reach = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + item
        self.memory = aligned(2 * GUARD + reach)

    @property
    def array(self) -> Raw:
        """The tensor."""
        return self.of(self.memory)

    def of(self, memory: Bytes) -> Raw:
        """The tensor in a copy of its memory."""
        return np.ndarray(self.shape, self.kind, memory, GUARD, self.strides)


class Scene:
    """A configuration's tensors and tables. A token has a place, or why it has none: a page id outside of the pool,
    negative or past 32 bits, a position past the table or out of the window."""

    def __init__(self, config: Config) -> None:
        self.config, self.cache = config, config.cache
        self.rng = np.random.default_rng(zlib.crc32(config.name.encode()))
        self.page_tokens = self.cache.page_tokens or OPEN_TOKENS
        self.own = self.cache.storage.own_table
        self._tables()
        self._tensors()

    # --- tables -----------------------------------------------------------------------------------------------------------

    def _entries(self) -> list[list[int]]:
        """Page ids of each request before scaling; POISON, and what the index type can hold of worse, for wrong ones."""
        table = self.cache.page_table
        counts = [1] * REQUESTS if isinstance(self.cache, Continuous) else [3, 2, 2]
        if isinstance(table, Indirect):
            counts = [11, 6, 7]
        if self.page_tokens >= 128:
            counts = [2, 1, 1]
        if isinstance(table, Ring):
            counts = [-(-(table.window - 1) // self.page_tokens) + 1] * REQUESTS
        both = 2 if isinstance(table, PerKV) else 1
        self.count = both * sum(counts) + 2
        ids = iter(self.rng.permutation(self.count))
        return [[int(next(ids)) for _ in range(both * n)] for n in counts]

    def _tables(self) -> None:
        cache, table = self.cache, self.cache.page_table
        ids = self._entries()
        self.pages = self.count * table.id_multiplier
        kind = dtype(table.dtype).numpy()
        bad = [
            self.count,
            POISON,
            2**31 if table.dtype != "i32" else -2,
            *({"i32": [-1], "i64": [-1, 2**32 + 1, 2**63 - 1]}.get(table.dtype, [2**32 - 1])),
        ]
        # The last request ends in an id that is none; with a row to spare the first one has another behind its pages.
        ids[-1][-1] = bad[int(self.rng.integers(len(bad)))]
        columns = max(map(len, ids))
        most = [len(pages) * self.page_tokens for pages in ids]
        self.lengths = [max(0, m - int(self.rng.integers(0, self.page_tokens))) for m in most]
        self.tables: dict[str, Raw] = {"lengths": np.array(self.lengths, dtype(cache.lengths_dtype).numpy())}
        if isinstance(cache, Continuous):
            self.tables["page_table"] = np.array([pages[0] for pages in ids], kind)
        elif isinstance(table, CSR):
            self.tables["page_indices"] = np.array([i for pages in ids for i in pages] + [POISON], kind)
            self.tables["page_indptr"] = np.cumsum([0, *map(len, ids)]).astype(kind)
            if table.last_page_len:
                del self.tables["lengths"]
                self.lengths = [m - self.page_tokens // 2 for m in most]
                last = [n - (len(i) - 1) * self.page_tokens for n, i in zip(self.lengths, ids, strict=True)]
                self.tables["last_page_len"] = np.array(last, kind)
        elif isinstance(table, PerKV):
            wide = np.full((REQUESTS, 2, columns // 2 + 1), self.count, kind)
            for b, pages in enumerate(ids):
                wide[b, :, : len(pages) // 2] = np.array(pages, np.int64).reshape(-1, 2).T.astype(kind)
            self.tables["page_table"] = wide
        elif isinstance(table, Indirect | Mapped):
            rows = self.rng.permutation(REQUESTS + 1)[:REQUESTS]
            matrix = self._matrix(ids, columns + 1, kind, REQUESTS + 1, rows)
            names = ("page_table", "idx_mapping") if isinstance(table, Mapped) else ("req_to_token", "request_ids")
            self.tables |= zip(names, (matrix, rows.astype(dtype(table.request_dtype).numpy())), strict=True)
        elif isinstance(table, Ring):
            self.lengths = [n + b * self.page_tokens for b, n in enumerate(self.lengths)]
            self.tables["lengths"] = np.array(self.lengths, dtype(cache.lengths_dtype).numpy())
            self.tables["page_table"] = self._matrix(ids, columns, kind, REQUESTS, np.arange(REQUESTS))
        else:
            self.tables["page_table"] = self._matrix(ids, columns + 1, kind, REQUESTS, np.arange(REQUESTS))
        self.scale_pages = self.pages
        if self.own:
            self.scale_pages = self.pages + 3 * table.id_multiplier
            order = self.rng.permutation(self.count + 3)[: REQUESTS * columns].reshape(REQUESTS, columns)
            rows = [[int(i) for i in row] for row in order]
            if columns > 1:
                rows[0][-1] = self.count + 3
            align = table.align if isinstance(table, Dense) else 1
            wide_rows = -(-(columns + 1) // align) * align
            self.tables["scales_page_table"] = self._matrix(rows, wide_rows, kind, REQUESTS, np.arange(REQUESTS))

    def _matrix(self, ids: list[list[int]], columns: int, kind: Any, rows: int, places: Raw) -> Raw:
        """Rows of ids, wrong ones behind them and between the rows."""
        table = self.cache.page_table
        step = table.align if isinstance(table, Dense) else 1
        memory = aligned(rows * (-(-columns // step) * step + step) * np.dtype(kind).itemsize).view(kind)
        wide = memory.reshape(rows, -1)
        wide[...] = POISON
        for place, request in zip(places, ids, strict=True):
            wide[place, : len(request)] = np.array(request, np.int64).astype(kind)
        return wide[:, :columns]

    @property
    def view(self) -> TableView:
        """The oracle's reading of the tables."""
        return TableView(self.cache, self.tables, self.pages, self.page_tokens, self.scale_pages)

    def reaches(self, b: int, token: int) -> bool:
        """Whether no other page took the column of a ring that holds this token."""
        table, n = self.cache.page_table, self.view.length(b)
        if not isinstance(table, Ring) or n is None:
            return not isinstance(table, Ring)
        columns = self.tables["page_table"].shape[1]
        return reached(n, token, table.window, self.page_tokens, columns, before=self.cache.lengths == "before")

    @property
    def tokens(self) -> int:
        """Tokens to ask each request for: some more than any table has."""
        return (max(self.lengths) // self.page_tokens + 1) * self.page_tokens + 3

    def places(self) -> Iterator[tuple[int, int, tuple[Place, Place] | None]]:
        """(request, token, where K and V are) of every token asked for; None where it is nowhere."""
        view = self.view
        for b in range(REQUESTS):
            for token in range(self.tokens):
                found = view.places(b, token // self.page_tokens) if self.reaches(b, token) else Fault.POSITION
                yield b, token, None if isinstance(found, Fault) else found

    # --- tensors ----------------------------------------------------------------------------------------------------------

    def _tensors(self) -> None:
        cache = self.cache
        sizes = {"pages": self.pages, "scale_pages": self.scale_pages, "layers": LAYERS, "B": REQUESTS}
        sizes["tokens"] = self.page_tokens
        copies = LAYERS if cache.layout.layers == "pointers" else 1
        self.tensors: dict[str, list[Tensor]] = {}
        for spec in cache.storage.tensors:
            pad = self.config.pad if spec.holds_values or spec.name.endswith("scales") else "tight"
            self.tensors[spec.name] = [Tensor(spec, sizes, pad) for _ in range(copies)]
            if spec.given or spec.name.endswith("_tail"):
                for tensor in self.tensors[spec.name]:
                    tensor.array[...] = self.scales(math.prod(tensor.shape), spec.dtypes[0]).reshape(tensor.shape)
        if cache.storage.residual:
            full = [n // 8 * 8 for n in self.lengths]
            self.tables["k_sealed"] = np.array([max(0, full[0] - 8), full[1], 0], dtype(cache.lengths_dtype).numpy())

    def scales(self, count: int, kind: str) -> Raw:
        """Numbers as scales may be: of any size that keeps products finite, and some 0, infinity and NaN."""
        found = self.rng.standard_normal(count) * 2.0 ** self.rng.integers(-4, 5, count)
        odd = self.rng.random(count) < 0.05
        found[odd] = self.rng.choice([0.0, -0.0, np.nan] + [np.inf] * (kind != "e4m3"), odd.sum())
        return found.astype(dtype(kind).numpy())

    def snapshot(self) -> dict[str, list[Bytes]]:
        """A copy of all memory, guards and gaps included."""
        return {name: [t.memory.copy() for t in tensors] for name, tensors in self.tensors.items()}

    def arrays(self, memory: dict[str, list[Bytes]] | None = None) -> dict[str, Any]:
        """The tensors, of the scene's memory or of a copy, as `Cache(...)` takes them."""
        found: dict[str, Any] = {}
        for name, tensors in self.tensors.items():
            views = [t.of(memory[name][i] if memory else t.memory) for i, t in enumerate(tensors)]
            found[name] = views if self.cache.layout.layers == "pointers" else views[0]
        return found

    def rows(self, memory: dict[str, list[Bytes]] | None = None) -> tuple[Rows, ...]:
        """The oracle's K and V of the layer that is looked at."""
        arrays = self.arrays(memory)
        if "k_sealed" in self.tables:
            arrays["k_sealed"] = self.tables["k_sealed"]
        return cache_rows(self.cache, arrays, LAYER)
