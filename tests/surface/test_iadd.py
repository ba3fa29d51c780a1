"""kv_cache_2m_iadd_dispatch: the reference's own example, and what its arguments are here."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from kvgen import KernelSet, ops, presets
from kvgen.errors import ArgumentError
from kvgen.runtime import describe
from kvgen.runtime.cpu import machine
from tests.support.harness import package
from tests.surface.marks import proves

I = "kv_cache_2m_iadd_dispatch"  # noqa: E741
HEADS, DIM, PAGE, LAYERS, LAYER = 2, 32, 16, 2, 1
PROMPTS, CACHED = (10, 20, 30, 40), (40, 30, 20, 10)
CACHE = presets.max_paged(dtype="f32", kv_heads=HEADS, head_dim=DIM, page_size=PAGE)
SETS = {
    end: KernelSet(name=f"iadd_{end}", q_heads=HEADS, cache=CACHE, ops=(ops.LoraAdd(end=end),))
    for end in ("host", "device")
}


def batch() -> tuple[np.ndarray[Any, Any], dict[str, Any], np.ndarray[Any, Any]]:
    """A pool of ones, its tables, and row offsets of the prompts; pages all over the pool, 50 tokens a request."""
    pages = -(-50 // PAGE)
    table = np.random.default_rng(5).permutation(4 * pages).reshape(4, pages).astype(np.uint32)
    pool = np.ones((4 * pages, 2, LAYERS, PAGE, HEADS, DIM), np.float32)
    offsets = np.cumsum([0, *PROMPTS]).astype(np.uint32)
    return pool, {"page_table": table, "lengths": np.array(CACHED, np.uint32)}, offsets


@proves(I, "kv_cache_2m_iadd_dispatch", "cache", "kv", "input_row_offsets", "lora_end_idx", "layer_idx")
@pytest.mark.parametrize("end", SETS)
def test_the_first_two_requests_have_adapters(end: str) -> None:
    """Rows [0, m) go to K, rows [m, 2m) to V of the first m tokens; nothing else changes; one launch."""
    pool, tables, offsets = batch()
    m, made = sum(PROMPTS[:2]), package(SETS[end])
    kv = np.arange(2 * m * HEADS * DIM, dtype=np.float32).reshape(2 * m, HEADS * DIM)
    expected, token = pool.copy(), 0
    for b, count in enumerate(PROMPTS[:2]):
        for t in range(count):
            page, place = divmod(CACHED[b] + t, PAGE)
            for role, row in ((0, token), (1, m + token)):
                expected[tables["page_table"][b, page], role, LAYER, place] += kv[row].reshape(HEADS, DIM)
            token += 1
    word = np.zeros(1, np.uint64)
    with machine(mode="check") as log:
        layer = made.Cache(pool, **tables)[LAYER]
        made.lora_add(layer, kv, row_offsets=offsets, lora_end_idx=np.array([m], np.int64), errors=word)
    np.testing.assert_array_equal(pool, expected)
    assert (pool != 1).sum() == 2 * m * HEADS * DIM - 1  # all but the row whose first element is 0
    assert len(log.launches) == 1 and describe(word) is None


@proves(I, "dtype", "collection_t")
def test_rows_are_of_the_cache_s_type_and_width() -> None:
    """What upstream asserts when it compiles: kv's type is the cache's, its width heads * head size."""
    pool, tables, offsets = batch()
    made = package(SETS["host"])
    layer = made.Cache(pool, **tables)[LAYER]
    for kv in (np.zeros((2, HEADS * DIM), np.float16), np.zeros((2, HEADS * DIM + 1), np.float32)):
        with pytest.raises(ArgumentError, match="kv: got "):
            made.lora_add(layer, kv, row_offsets=offsets, lora_end_idx=1)
    with pytest.raises(ArgumentError, match="cache: got "):
        made.lora_add(pool, np.zeros((2, HEADS * DIM), np.float32), row_offsets=offsets, lora_end_idx=1)


@proves(I, "target", "ctx")
def test_it_runs_where_the_cache_is() -> None:
    """No argument says where: the arrays do; the stream is the last one of every launcher."""
    parameters = list(inspect.signature(package(SETS["host"]).lora_add.__call__).parameters)
    assert parameters == ["cache", "kv", "row_offsets", "lora_end_idx", "errors", "stream"]


@proves(I, "lora_end_idx")
def test_no_rows_return_before_the_end_is_read() -> None:
    pool, tables, offsets = batch()
    made = package(SETS["host"])
    with machine(mode="check") as log:
        layer = made.Cache(pool, **tables)[LAYER]
        made.lora_add(layer, np.zeros((0, HEADS * DIM), np.float32), offsets, np.zeros(0, np.int64))
    assert not log.launches and (pool == 1).all()
