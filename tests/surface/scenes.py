"""A filled cache of every variant, and where its elements and scales lie: axes written out, strides NumPy's."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from ml_dtypes import float8_e4m3fn

from tests.surface.harness import BF16, CACHES, FLOATS, NUMBERS, PAGE, Array, filled, package, run
from tests.surface.tables import exact

COUNT: Final = 5
LAYERS: Final = 2
LAYER: Final = 1
SLOTS: Final = 40  # tokens of a continuous block
MOST: Final = {"max_seq_length": 7, "max_cache_length": 44}
LENGTHS: Final = (33, 18)
IDS: Final = ((3, 0, COUNT - 1), (1, 2, COUNT + 9))  # the last page of request 1 is none
SCALE_IDS: Final = ((6, 2, 0), (5, 1, 3))
AXES: Final = dict.fromkeys(CACHES, ("page", "kv", "layer", "token", "head", "dim")) | {
    "hnd": ("kv", "page", "head", "token", "dim"),
    "csr_last": ("page", "kv", "token", "head", "dim"),
}
STORED: Final = {"scaled": float8_e4m3fn, "own": np.int8, "given": float8_e4m3fn, "mixed": float8_e4m3fn}
KV: Final = {"latent": 1, "mixed": 1}
SCALES: Final = {"scaled": 2, "own": 1}
ROWS: Final = tuple(n for n in CACHES if n != "hnd")


class Scene:
    """The arrays of a set, its bound cache, and the answers of its kernel."""

    def __init__(self, name: str, **most: int) -> None:
        self.name, self.cache, self.axes = name, CACHES[name], AXES[name]
        self.tokens = PAGE if self.cache.page_tokens else SLOTS
        self.heads = self.cache.kv_heads
        self.roles = KV.get(name, 2)
        self.dims = 640 if name == "mixed" else self.cache.head_dim
        self.kind: Any = STORED.get(name, BF16)
        sizes = {
            "page": COUNT,
            "kv": self.roles,
            "layer": LAYERS,
            "token": self.tokens,
            "head": self.heads,
            "dim": self.dims,
        }
        shape = tuple(sizes[a] for a in self.axes)
        raw = np.uint8 if name in STORED else BF16
        self.pools = [filled(shape, raw, seed) for seed in range(1 if "layer" in self.axes else LAYERS)]
        self.scales: Array | None = None
        self.given: list[Array] = []
        more: dict[str, Any] = {}
        if name in SCALES:
            self.scales = filled((8, 2, LAYERS, PAGE, self.heads, SCALES[name]), np.float32, 9)
            more["scales"] = self.scales
        if name == "given":
            self.given = [filled((LAYERS, self.heads, 1), np.float32, seed) for seed in (3, 4)]
            more |= {"k_scale": self.given[0], "v_scale": self.given[1]}
        self.tables = self._tables()
        self.collection = package(name).Cache(
            self.pools if "layer" not in self.axes else self.pools[0], **more, **self.tables, **(most or MOST)
        )

    def _tables(self) -> dict[str, Array]:
        if self.name == "csr_last":
            last = [(n - 1) % PAGE + 1 for n in LENGTHS]
            flat = [i for row in IDS for i in row[:2]] + [IDS[0][2]]
            flat = [*IDS[0], *IDS[1][:2]]
            return {
                "page_indices": exact(flat, "i32"),
                "page_indptr": exact([0, 3, 5], "i32"),
                "last_page_len": exact(last, "i32"),
            }
        found = {"lengths": exact(LENGTHS, self.cache.lengths_dtype)}
        ids = [row[:1] for row in IDS] if self.name == "continuous" else list(IDS)
        table = exact([i for row in ids for i in row], self.cache.page_table.dtype)
        found["page_table"] = table if self.name == "continuous" else table.reshape(2, -1)
        if self.name == "own":
            found["scales_page_table"] = exact([i for row in SCALE_IDS for i in row], "i32").reshape(2, -1)
        return found

    def page(self, b: int, token: int) -> int | None:
        """The page of a token; None for a bad one, or none."""
        i = token // self.tokens
        row = IDS[b][: 1 if self.name == "continuous" else 2 if self.name == "csr_last" and b else 3]
        return row[i] if i < len(row) and row[i] < COUNT else None

    def pool(self) -> Array:
        """The tensor that holds the layer."""
        return self.pools[0 if "layer" in self.axes else LAYER]

    def at(self, role: int, page: int, token: int, head: int, dim: int) -> tuple[int, ...]:
        """The place of an element in `pool()`."""
        index = {"page": page, "kv": role, "layer": LAYER, "token": token % self.tokens, "head": head, "dim": dim}
        return tuple(index[a] for a in self.axes)

    def address(self, role: int, page: int, token: int, head: int, dim: int) -> int:
        pool = self.pool()
        return pool.ctypes.data + sum(
            i * s for i, s in zip(self.at(role, page, token, head, dim), pool.strides, strict=True)
        )

    def scale_at(self, role: int, b: int, token: int, head: int, dim: int) -> tuple[Array, tuple[int, ...]] | None:
        """Where a scale lies: the array and the place in it; None without scales."""
        if self.given:
            return self.given[role], (LAYER, head, 0)
        if self.scales is None:
            return None
        ids = SCALE_IDS if self.name == "own" else IDS
        group = dim // (self.cache.head_dim // SCALES[self.name])
        return self.scales, (ids[b][token // PAGE], role, LAYER, token % PAGE, head, group)

    def ask(
        self, queries: list[tuple[int, int, int, int]], *, stores: bool = False
    ) -> list[tuple[dict[str, int], dict[str, float]]]:
        """What K, then V, say about each query."""
        asked = np.array(queries, np.uint32)
        numbers = np.zeros((len(queries), 2, len(NUMBERS)), np.uint64)
        floats = np.zeros((len(queries), 2, len(FLOATS)), np.float32)
        run(
            package(self.name).probe,
            self.collection[LAYER],
            queries=asked,
            numbers=numbers,
            floats=floats,
            stores=int(stores),
        )
        return [
            (
                dict(zip(NUMBERS, numbers[i, r].tolist(), strict=True)),
                dict(zip(FLOATS, floats[i, r].tolist(), strict=True)),
            )
            for i in range(len(queries))
            for r in range(self.roles)
        ]

    def queries(self) -> list[tuple[int, int, int, int]]:
        """(request, token, head, dim): good pages and bad ones, every head, dims near both ends of the first part."""
        last = 510 if self.name in ("latent", "mixed") else 62
        tokens = (0, 1, 15, 16, 17, 31, 32, 39, 47, 48, 4000)
        return [(b, t, h, d) for b in (0, 1) for t in tokens for h in range(self.heads) for d in (0, 32, last)]
