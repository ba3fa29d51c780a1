"""Page tables of every form around the same ids, in buffers that end with their last entry, and what they say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen.layout.dtypes import dtype
from kvgen.schema.cache import Cache
from kvgen.schema.tables import CSR, Dense, Indirect, Mapped, PerKV, Ring

Array = NDArray[Any]
BAD: Final = 2**31 - 1


def exact(values: Sequence[int], kind: str, align: int = 64) -> Array:
    """A flat array, aligned, and nothing behind it."""
    size = dtype(kind).bytes
    memory = np.zeros(len(values) * size + align, np.uint8)
    start = -memory.ctypes.data % align
    out = memory[start : start + len(values) * size].view(dtype(kind).numpy())
    out[...] = values
    return out


def dense(rows: Sequence[Sequence[int]], kind: str, stride: int) -> Array:
    """`[B, M]` whose rows are `stride` entries apart; the last one ends with its last entry."""
    columns = len(rows[0])
    flat = [entry for row in rows for entry in (*row, *[BAD] * (stride - columns))]
    memory = exact(flat[: (len(rows) - 1) * stride + columns], kind)
    unit = memory.itemsize
    return np.lib.stride_tricks.as_strided(memory, (len(rows), columns), (stride * unit, unit))


def bind(cache: Cache, ids: Sequence[Sequence[int]], v_ids: Sequence[Sequence[int]]) -> dict[str, Array]:
    """The arguments of `Cache(...)` for these ids, one list a request; lengths are all 0."""
    table = cache.page_table
    lengths = {"lengths": exact([0] * len(ids), cache.lengths_dtype)}
    if isinstance(table, CSR):
        flat = [i for row in ids for i in row]
        ends = np.cumsum([0, *map(len, ids)]).tolist()
        return lengths | {"page_indices": exact(flat, table.dtype), "page_indptr": exact(ends, table.dtype)}
    if isinstance(table, PerKV):
        both = exact([i for k, v in zip(ids, v_ids, strict=True) for i in (*k, *v)], table.dtype)
        return lengths | {"page_table": both.reshape(len(ids), 2, -1)}
    if isinstance(table, Indirect | Mapped):
        rows = [*reversed(ids)]
        found = dense(rows, table.dtype, len(ids[0]))
        requests = exact([*reversed(range(len(ids)))], table.request_dtype)
        if isinstance(table, Mapped):
            return lengths | {"page_table": found, "idx_mapping": requests}
        return lengths | {"req_to_token": found, "request_ids": requests}
    if cache.page_tokens is None:
        return lengths | {"page_table": exact([row[0] for row in ids], table.dtype)}
    stride = -(-len(ids[0]) // 8) * 8 if isinstance(table, Dense) and table.align > 1 else len(ids[0])
    return lengths | {"page_table": dense(ids, table.dtype, stride)}


def page_of(cache: Cache, ids: Sequence[int], page: int, count: int) -> int | None:
    """The page in the pool of logical page `page`; None where there is none."""
    if isinstance(cache.page_table, Ring):
        page %= len(ids)
    if cache.page_tokens is None:
        ids = ids[:1]
    if page >= len(ids) or ids[page] < 0:
        return None
    found = ids[page] * cache.page_table.id_multiplier
    return found if found < count else None
