"""Prepared cases: what a kernel is given and what must lie in memory afterwards, as bytes.

A case is a set of memories (canaries and gaps included), views into them that are the call's arguments, and
expectations. The oracle ran when the file was made, so running a case takes NumPy and ml_dtypes and nothing else.
Memories are kept as chunks, each distinct chunk of a file once: a pool before and after differs in a few of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen.verify.memory import Bytes as Bytes
from kvgen.verify.memory import View as View

SCHEMA = 3
CHUNK = 1024
FLOATS: Final = {"f32": np.float32, "f64": np.float64}


@dataclass(frozen=True)
class Close:
    """What an output may be: within `slack + relative * |wanted|` of `wanted`; NaN exactly where it is NaN.

    `wanted` names a blob of `kind` ("f32" or "f64"), `slack` one of float64 with one number an element, or a row
    and head.
    """

    kind: str
    wanted: str
    slack: str
    relative: float


@dataclass(frozen=True)
class Case:
    """One launch of one operation. Memories without an entry in `after` must not change."""

    set: str
    op: str
    name: str
    golden: bool
    layer: int
    memories: dict[str, str]
    after: dict[str, str]
    pools: dict[str, tuple[View, ...]]
    """The cache's tensors by name, one array or one a layer; what counts sealed tokens is among them."""
    tables: dict[str, View]
    arguments: dict[str, View]
    nan_rows: dict[str, tuple[int, ...]] = field(default_factory=dict)
    close: dict[str, Close] = field(default_factory=dict)
    got: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    """Arguments on the host."""
    near: dict[str, str] = field(default_factory=dict)
    """Memories whose numbers, of this dtype (or "nibbles"), may be neighbours of those expected, a few of them."""
    source: str = ""
    """The class of the cache that convert reads, if it is one."""
    source_pools: dict[str, tuple[View, ...]] = field(default_factory=dict)
    source_tables: dict[str, View] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    """The classes of the other caches that lists name rows of, by argument."""
    keys_pools: dict[str, dict[str, tuple[View, ...]]] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str]:
        """(set, operation, case)."""
        return self.set, self.op, self.name


@dataclass(frozen=True)
class Facts:
    """What a generated package does not say of its set, and timings need to know."""

    name: str
    dtype: str
    q_heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    stores: str
    layers: str
    table: str
    id_multiplier: int
    window: int
    lengths: str
    ops: tuple[tuple[str, str, str], ...]
    """(name, kind, rows) of each operation; rows is "slots" for an append by slots, else ""."""
    scales: dict[str, float]
    """The score scale of each decode and extend."""
    token_bytes: int
    """Bytes of one token in one layer as it is stored: K and V, scales included."""
    key_bytes: int
    """Those of K."""
    loss: float
    """What quantization may take from values below 1; 0 where they are stored as they are."""
    residual: int
    """Tokens of K that are quantized together; 0: each on its own."""
    changed: dict[str, str] = field(default_factory=dict)
    """The roles ("k", "kv") whose rows an append stores as others than they come, by the append's name."""
    rows: dict[str, int] = field(default_factory=dict)
    """Query rows of a request, of each decode operation."""
    sees: dict[str, int] = field(default_factory=dict)
    """Tokens that a row of a causal decode or extend sees at most, 0: all; only of those without score, sinks or another mask."""
    apart: str = ""
    """The append that the prepared folder has separate kernels for, if any."""


def _view(fields: dict[str, Any]) -> View:
    fields["shape"], fields["strides"] = tuple(fields["shape"]), tuple(fields["strides"])
    return View(**fields)


def _pools(found: dict[str, Any]) -> dict[str, tuple[View, ...]]:
    return {n: tuple(_view(v) for v in tensors) for n, tensors in found.items()}


def _case(fields: dict[str, Any]) -> Case:
    for name in ("pools", "source_pools"):
        fields[name] = _pools(fields[name])
    fields["keys_pools"] = {name: _pools(found) for name, found in fields.get("keys_pools", {}).items()}
    for name in ("tables", "arguments", "source_tables"):
        fields[name] = {k: _view(v) for k, v in fields[name].items()}
    fields["nan_rows"] = {k: tuple(v) for k, v in fields["nan_rows"].items()}
    fields["close"] = {k: Close(**v) for k, v in fields["close"].items()}
    return Case(**fields)


class Blobs:
    """Byte strings by name, as rows of one table of chunks."""

    def __init__(self) -> None:
        self._chunks: dict[bytes, int] = {}
        self._rows: dict[str, NDArray[np.uint32]] = {}
        self._sizes: dict[str, int] = {}
        self._table: NDArray[np.uint8] | None = None

    def add(self, name: str, data: Bytes) -> str:
        """Keep `data` under `name`; returns the name."""
        padded = np.zeros(-(-len(data) // CHUNK) * CHUNK, np.uint8)
        padded[: len(data)] = data
        rows = [self._chunks.setdefault(c.tobytes(), len(self._chunks)) for c in padded.reshape(-1, CHUNK)]
        self._rows[name], self._sizes[name], self._table = np.array(rows, np.uint32), len(data), None
        return name

    def floats(self, name: str, values: NDArray[Any], kind: str = "f64") -> str:
        """Keep values as "f32" or "f64"."""
        return self.add(name, np.frombuffer(values.astype(FLOATS[kind]).tobytes(), np.uint8))

    def get(self, name: str) -> Bytes:
        """A copy of what was added."""
        if self._table is None:
            joined = np.frombuffer(b"".join(self._chunks), np.uint8)
            self._table = joined.reshape(-1, CHUNK)
        flat: Bytes = self._table[self._rows[name]].reshape(-1)
        return flat[: self._sizes[name]].copy()

    def arrays(self) -> dict[str, NDArray[Any]]:
        """What a file holds: the chunks, and each blob's rows of them."""
        table = np.frombuffer(b"".join(self._chunks), np.uint8).reshape(-1, CHUNK)
        return {"chunks": table, **{f"blob/{name}": rows for name, rows in self._rows.items()}}

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each blob."""
        return dict(self._sizes)

    @classmethod
    def from_file(cls, arrays: Any, sizes: dict[str, int]) -> Blobs:
        """The blobs of a file."""
        found = cls()
        table = arrays["chunks"]
        found._chunks = {row.tobytes(): i for i, row in enumerate(table)}
        found._rows = {name: arrays[f"blob/{name}"] for name in sizes}
        found._sizes = dict(sizes)
        return found


@dataclass(frozen=True)
class CaseFile:
    """The cases of one set."""

    facts: Facts
    cases: tuple[Case, ...]
    blobs: Blobs


def save(path: Path, facts: Facts, cases: Iterable[Case], blobs: Blobs) -> None:
    """Write one set's cases; the same bytes for the same cases."""
    index = {
        "schema": SCHEMA,
        "facts": asdict(facts),
        "cases": [asdict(c) for c in cases],
        "sizes": blobs.sizes,
    }
    text = np.frombuffer(json.dumps(index, sort_keys=True).encode(), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = blobs.arrays()
    with path.open("wb") as file:
        np.savez_compressed(file, index=text, **arrays)


def load(path: Path) -> CaseFile:
    """Read what `save` wrote; ValueError for another schema."""
    with np.load(path) as arrays:
        index = json.loads(arrays["index"].tobytes())
        if index["schema"] != SCHEMA:
            raise ValueError(f"{path}: got schema {index['schema']}; this script reads {SCHEMA}; run --prepare again")
        facts = index["facts"]
        facts["ops"] = tuple(tuple(op) for op in facts["ops"])
        return CaseFile(
            Facts(**facts), tuple(_case(c) for c in index["cases"]), Blobs.from_file(arrays, index["sizes"])
        )
