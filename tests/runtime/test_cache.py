"""Every bad pool or table of a cache: the error names the argument, what it got, and the rule."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.calls import Call, Change, inside, pool, refused, shifted, table, with_strides
from tests.support.launching import DeviceArray, Raw, i32, on_device, zeros

pytestmark = pytest.mark.usefixtures("driver")


def second_gpu(call: Call) -> None:
    """Everything on the first GPU but V, which is on the second."""
    call.tables = {name: on_device(array, 1 << 16) for name, array in call.tables.items()}
    for name, address in (("k_pool", 1 << 20), ("v_pool", 1 << 40)):
        call.pools[name] = [on_device(array, address) for array in call.pools[name]]


POOLS: dict[str, tuple[str, Change, str]] = {
    "dtype": ("paged", pool(lambda p: p.view(np.float16)), "pool: got dtype f16; it must be bf16, dtype of the spec"),
    "rank": (
        "paged",
        pool(lambda p: p[0]),
        "pool: got shape (2, 2, 4, 2, 16); it must have 6 dimensions; pass shape (",
    ),
    "kv": (
        "paged",
        pool(lambda p: zeros(5, 3, 2, 4, 2, 16)),
        "pool: got shape (5, 3, 2, 4, 2, 16); dimension 1 must be 2; pass shape (",
    ),
    "page_size": (
        "paged",
        pool(lambda p: zeros(5, 2, 2, 8, 2, 16)),
        "pool: got shape (5, 2, 2, 8, 2, 16); dimension 3 must be 4, page_size of the spec; pass shape (",
    ),
    "kv_heads": (
        "paged",
        pool(lambda p: zeros(5, 2, 2, 4, 3, 16)),
        "pool: got shape (5, 2, 2, 4, 3, 16); dimension 4 must be 2, kv_heads of the spec; pass shape (",
    ),
    "head_dim": (
        "paged",
        pool(lambda p: zeros(5, 2, 2, 4, 2, 32)),
        "pool: got shape (5, 2, 2, 4, 2, 32); dimension 5 must be 16, head_dim of the spec; pass shape (",
    ),
    "max_tokens": (
        "blocks",
        pool(lambda p: p[:, :, :, :5]),
        "pool: got shape (5, 2, 2, 5, 1, 8); dimension 3 must be 6, max_tokens of the spec; pass shape (",
    ),
    "v_head_dim": (
        "apart",
        pool(lambda p: [zeros(5, 4, 2, 8, dtype=np.float32)] * 2, "v_pool"),
        "v_pool[0]: got shape (5, 4, 2, 8); dimension 3 must be 4, v_head_dim of the spec; pass shape (5, 4, 2, 4)",
    ),
    "token_stride": (
        "paged",
        pool(lambda p: inside(p, 5, 2, 2, 4, 3, 16)),
        "pool: got stride 48 in dimension 3 (shape (5, 2, 2, 4, 2, 16), strides (768, 384, 192, 48, 16, 1), in elements); "
        "it must be 32: the layout of the spec",
    ),
    "dim_stride": (
        "paged",
        pool(with_strides(1024, 512, 256, 64, 32, 2)),
        "pool: got stride 2 in dimension 5 (shape",
    ),
    "page_stride_odd": (
        "paged",
        pool(with_strides(516, 256, 128, 32, 16, 1)),
        "pool: got stride 516 in dimension 0 (shape (5, 2, 2, 4, 2, 16), strides (516, 256, 128, 32, 16, 1), in elements); "
        "it must be a multiple of 8 elements",
    ),
    "misaligned": ("paged", pool(shifted), "pool: got address 0x"),
    "page_stride": (
        "paged",
        pool(with_strides(120, 1280, 640, 32, 16, 1)),
        "pool: got stride 120 along page (shape (5, 2, 2, 4, 2, 16), strides (120, 1280, 640, 32, 16, 1), in elements); "
        "two elements would share a place; pass a view whose page steps lie apart",
    ),
    "kv_among_pages": ("paged", pool(with_strides(256, 1024, 128, 32, 16, 1)), "pool: got stride 1024 along kv (shape"),
    "page_stride_zero": ("paged", pool(with_strides(0, 256, 128, 32, 16, 1)), "pool: got stride 0 along page (shape"),
    "page_stride_inside": (
        "paged",
        pool(with_strides(96, 512, 256, 32, 16, 1)),
        "pool: got stride 96 along page (shape",
    ),
    "kv_stride_zero": ("paged", pool(with_strides(256, 0, 128, 32, 16, 1)), "pool: got stride 0 along kv (shape"),
    "kv_stride": ("paged", pool(with_strides(512, 64, 256, 32, 16, 1)), "pool: got stride 64 along kv (shape"),
    "layer_stride_zero": ("paged", pool(with_strides(256, 128, 0, 32, 16, 1)), "pool: got stride 0 along layer (shape"),
    "layer_stride": ("paged", pool(with_strides(512, 256, 120, 32, 16, 1)), "pool: got stride 120 along layer (shape"),
    "kv_into_the_next_head": (
        "interleaved",
        pool(with_strides(640, 128, 32, 16, 12, 1)),
        "pool: got stride 12 along kv (shape",
    ),
    "list": ("paged", pool(lambda p: [p]), "pool: got list; it must be an array; pass a NumPy array"),
    "none": ("paged", pool(lambda p: None), "pool: got NoneType; it must be an array"),
    "no_list": (
        "apart",
        pool(lambda p: p[0], "k_pool"),
        "k_pool: got ndarray; the spec's layers='pointers' takes a list of tensors, one per layer",
    ),
    "no_layers": ("apart", pool(lambda p: [], "k_pool"), "k_pool: got list; the spec's layers='pointers'"),
    "layers_differ": (
        "apart",
        pool(lambda p: p[:1], "v_pool"),
        "v_pool: got 2 for k_pool and 1 for v_pool; every tensor needs one entry a layer",
    ),
    "one_layer_differs": (
        "apart",
        pool(lambda p: [p[0], p[1][:4]], "v_pool"),
        "v_pool[1]: got shape (4, 4, 2, 4); k_pool[1] has pages = 5 but v_pool[1] has 4; pass shape (5, 4, 2, 4)",
    ),
    "devices": (
        "apart",
        pool(lambda p: [on_device(p[0], 1 << 20), p[1]], "v_pool"),
        "v_pool[0]: got an array on cuda:0; the call runs on cpu, where the cache is",
    ),
    "second_gpu": (
        "apart",
        second_gpu,
        "v_pool[0]: got an array on cuda:1; the call runs on cuda:0, where the cache is",
    ),
    "lengths_dtype": (
        "paged",
        table("lengths", np.zeros(2, np.int64)),
        "lengths: got dtype i64; it must be i32, lengths_dtype of the spec; pass an i32 array",
    ),
    "table_dtype": (
        "paged",
        table("page_table", np.zeros((2, 3), np.uint32)),
        "page_table: got dtype u32; it must be i32, table.dtype of the spec",
    ),
    "block_table_dtype": (
        "blocks",
        table("page_table", np.zeros(2, np.uint32)),
        "page_table: got dtype u32; it must be i32, table_dtype of the spec",
    ),
    "table_rank": (
        "paged",
        table("page_table", i32(0, 1)),
        "page_table: got shape (2,); it must have 2 dimensions; pass shape (2, M)",
    ),
    "table_batch": (
        "paged",
        table("page_table", np.zeros((3, 3), np.int32)),
        "page_table: got shape (3, 3); lengths has B = 2 but page_table has 3; pass shape (2, M)",
    ),
    "table_columns": (
        "paged",
        table("page_table", np.zeros((2, 6), np.int32)[:, ::2]),
        "page_table: got stride 2 in dimension 1 (shape (2, 3), strides (6, 2), in elements); it must be 1: packed",
    ),
    "table_device": (
        "paged",
        table("page_table", DeviceArray((2, 3), np.int32, 1 << 20)),
        "page_table: got an array on cuda:0; the call runs on cpu, where the cache is",
    ),
    "table_none": (
        "paged",
        table("lengths", None),
        "lengths: got None beside page_table; a cache has all of its tables or none; pass an array",
    ),
}


@pytest.mark.parametrize("label", POOLS)
def test_caches(label: str) -> None:
    name, change, message = POOLS[label]
    call = Call(name, "append")
    call.cache()  # right until it is spoilt
    change(call)
    refused(call.cache, message)


NEST: dict[str, tuple[str, Callable[[Raw], Raw]]] = {
    "packed": ("paged", lambda p: p),
    "padded_pages": ("paged", with_strides(640, 256, 128, 32, 16, 1)),
    "padded_everywhere": ("paged", with_strides(816, 400, 136, 32, 16, 1)),
    "page_innermost": ("paged", with_strides(128, 640, 1280, 32, 16, 1)),
    "layers_slowest": ("paged", with_strides(256, 128, 1280, 32, 16, 1)),
    "backwards": ("paged", lambda p: p[::-1, ::-1]),
    "one_page": ("paged", lambda p: with_strides(0, 256, 128, 32, 16, 1)(p[:1])),
    "no_pages": ("paged", lambda p: p[:0]),
    "kv_between_head_and_dim": ("interleaved", lambda p: p),
    "kv_padded": ("interleaved", with_strides(640, 128, 32, 16, 8, 1)),
}


@pytest.mark.parametrize("label", NEST)
def test_strides_that_nest_are_accepted(label: str) -> None:
    """Padding, interleaving and any order of page, kv and layer."""
    name, make = NEST[label]
    call = Call(name, "gather")
    pool(make)(call)
    assert len(call.cache()) == 2


def test_layers() -> None:
    cache = Call("paged", "append").cache()
    assert [layer.layer for layer in cache] == [0, 1]
    assert cache[np.int64(1)].layer == 1
    for bad in (-1, 2, "0", 1.0, None, slice(0, 1)):
        refused(lambda bad=bad: cache[bad], f"layer: got {bad!r}; the pool has 2 layers; pass one from 0 to 1")
