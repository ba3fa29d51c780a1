"""A cache without pages on the device: rows, addresses and values of any request, whose first row may be any."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvgen import KernelSet, Ragged
from tests.support.harness import package
from tests.surface.harness import BF16, FLOATS, NUMBERS, filled, probe, run

OFFSETS, ROWS, NONE = (3, 8, 8, 40), 45, 2**64 - 1
BAD = (3, 8, 2, 46)
CACHES: dict[str, Any] = {
    "surface_ragged": Ragged(dtype="bf16", kv_heads=2, head_dim=64, layout="layer kv token head dim"),
    "surface_ragged_heads": Ragged(
        dtype="bf16", kv_heads=2, head_dim=64, layout="layer kv head token dim", total_tokens=ROWS
    ),
}


def ask(name: str, offsets: tuple[int, ...], queries: list[tuple[int, int, int, int]]) -> tuple[Any, Any, Any]:
    """(the pool as layer, kv, token, head, dim; K's and V's numbers; their floats)."""
    cache = CACHES[name]
    generated = package(KernelSet(name=name, q_heads=2, cache=cache, ops=(probe(cache),), arch=("sm_90a",)))
    heads_first = name.endswith("heads")
    pool = filled((2, 2, 2, ROWS, 64) if heads_first else (2, 2, ROWS, 2, 64), BF16)
    bound = generated.Cache(pool, kv_offsets=np.array(offsets, np.int32))
    numbers = np.zeros((len(queries), 2, len(NUMBERS)), np.uint64)
    floats = np.zeros((len(queries), 2, len(FLOATS)), np.float32)
    run(generated.probe, bound[1], queries=np.array(queries, np.uint32), numbers=numbers, floats=floats, stores=0)
    keys = bound.get_key_cache(1)
    assert keys.shape == (1, ROWS, 2, 64)
    view = keys.page_view()
    assert (view.pages, view.tokens, view.token_stride) == (1, ROWS, 64 if heads_first else 128)
    if not heads_first:
        assert keys.num_kv_rows == ROWS
    return pool.transpose(0, 1, 3, 2, 4) if heads_first else pool, numbers, floats


@pytest.mark.parametrize("name", CACHES)
def test_tokens(name: str) -> None:
    """Every request's first and last tokens and the one past them; an empty request has none."""
    queries = [
        (b, token, head, dim)
        for b, n in enumerate((5, 0, 32))
        for token in sorted({0, max(n - 1, 0), n, n + 9})
        for head, dim in ((0, 0), (1, 62))
    ]
    pool, numbers, floats = ask(name, OFFSETS, queries)
    for (b, token, head, dim), both, values in zip(queries, numbers, floats, strict=True):
        n, row = OFFSETS[b + 1] - OFFSETS[b], OFFSETS[b] + token
        for kv in range(2):
            found = dict(zip(NUMBERS, both[kv].tolist(), strict=True))
            place = pool[1, kv, row, head, dim:] if token < n else None
            assert found["cache_length"] == n and found["max_tile"] == NONE
            assert found["pointer"] == (0 if place is None else place.ctypes.data)
            wanted = [0.0, 0.0] if place is None else place[:2].astype(np.float32).tolist()
            assert values[kv, :2].tolist() == values[kv, 2:4].tolist() == wanted
            if n:
                assert (found["coords_row"], found["coords_block"], found["coords_valid"]) == (row, 0, 1)
            if not name.endswith("heads"):
                assert found["num_kv_rows"] == ROWS
                assert found["row_idx"] == (row if n else NONE)


@pytest.mark.parametrize("name", CACHES)
def test_bad_offsets(name: str) -> None:
    """Offsets that decrease, or leave the tensors: no length, no row, no address."""
    _, numbers, floats = ask(name, BAD, [(b, token, 0, 0) for b in (1, 2) for token in (0, 1)])
    for both, values in zip(numbers, floats, strict=True):
        for kv in range(2):
            found = dict(zip(NUMBERS, both[kv].tolist(), strict=True))
            assert found["cache_length"] == 2**32 - 1
            assert (found["pointer"], found["coords_valid"]) == (0, 0) and not values[kv, :4].any()
            assert name.endswith("heads") or found["row_idx"] == NONE
