"""lora_add against the oracle: the whole memory byte for byte, whatever m, the batch and the tables hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16

from kvgen import KernelSet, ops, presets
from kvgen.errors import ArgumentError
from kvgen.reference import lora_add
from kvgen.runtime import Fault, describe
from kvgen.runtime.cpu import machine
from kvgen.schema.cache import Cache
from tests.support.batches import PLAIN, Batch, batches
from tests.support.cache_matrix import FEW_BITS, chosen
from tests.support.harness import Run, hold_memory, launcher, offsets_of, package
from tests.support.memory import Raw, aligned, rows_array
from tests.support.scenes import Scene
from tests.support.sets import ALL

# Tables, layouts and quantizations whose K and V of single tokens can be added to.
NAMES = (
    "dense", "hnd", "kv_inside", "per_kv", "indirect", "ring", "continuous", "xpacked", "given", "int8_own_table",
    "int4_in_page", "nvfp4_swizzled", *FEW_BITS,
)  # fmt: skip
SETS = chosen("lora", lambda cache: (ops.LoraAdd(),), NAMES)
DEVICE = chosen("lora_device", lambda cache: (ops.LoraAdd(end="device"),), ("dense", "nvfp4"))
# Blocks of more values than a lane keeps: they are read twice, the second time under a new scale.
WIDE = KernelSet(name="lora_wide", q_heads=40, cache=ALL["wide_block"].cache, ops=(ops.LoraAdd(index_dtype="i64"),))
EVERY = SETS | DEVICE | {WIDE.name: WIDE}


def index_of(kernels: KernelSet) -> str:
    """The type of an operation's row offsets."""
    return getattr(kernels.ops[0], "index_dtype", None) or kernels.cache.lengths_dtype


def stored_scene(kernels: KernelSet, batch: Batch) -> Scene:
    """A scene in which the step's tokens are stored, and lengths still count as they do in the step."""
    before = [n - new for n, new in zip(batch.totals, batch.new, strict=True)]
    scene = Scene(kernels, batch, batch.totals if kernels.cache.lengths == "after" else before)
    for b, count in enumerate(batch.totals):
        held = [p for p in range(count) if not scene.view.overtaken(p // scene.tokens, count)]
        for position in held:
            scene.write(b, position, [scene.wild(1, r.heads, r.dim)[0] for r in scene.rows()])
    return scene


def flat_rows(scene: Scene, rows: int, width: int) -> Raw:
    """Rows `[rows, width]` of the cache's dtype, of many sizes, strided where the batch says so."""
    array, _ = rows_array(rows, (width,), scene.cache.dtype, strided=scene.batch.strided)
    array[...] = scene.wild(rows, 1, width)[:, 0]
    return array


def check_lora(scene: Scene, kv: Raw, m: int, row_offsets: Raw) -> int:
    """Add and compare all memory with the oracle's; returns the error word."""
    expected = scene.snapshot()
    word = lora_add(scene.view, scene.rows(expected), kv, row_offsets=row_offsets, lora_end_idx=m)
    on_device = scene.kernels.ops[0] == ops.LoraAdd(end="device")
    end: Any = np.array([m], np.int64) if on_device or m % 2 else m
    run = Run(scene, "lora_add", launcher(scene, "lora_add"), kv=kv, row_offsets=row_offsets, lora_end_idx=end)
    hold_memory(scene, expected)
    run.expect_word(word)
    return word


def width_of(cache: Cache) -> int:
    return cache.kv_heads * cache.head_dim


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=6)
@given(data=st.data())
def test_drawn(name: str, data: Any) -> None:
    """The first tokens of a batch get their rows; all the rest of the memory stays."""
    kernels = EVERY[name]
    batch = data.draw(batches(kernels))
    scene = stored_scene(kernels, batch)
    tokens = batch.leading + sum(batch.new)
    m = data.draw(st.one_of(st.integers(0, tokens), st.just(tokens), st.just(tokens + 2)))
    kv = flat_rows(scene, 2 * m + batch.padding, width_of(kernels.cache))
    check_lora(scene, kv, m, offsets_of(batch.new, index_of(kernels), batch.leading))


def test_a_row_in_parts() -> None:
    """Rows that are too wide for a block of threads: several blocks add one."""
    cache = presets.max_paged(dtype="f16", kv_heads=40, head_dim=128, page_size=16)
    kernels = KernelSet(name="lora_parts", q_heads=40, cache=cache, ops=(ops.LoraAdd(),))
    batch = replace(PLAIN, totals=(5, 18), new=(2, 3))
    scene = stored_scene(kernels, batch)
    check_lora(scene, flat_rows(scene, 8, width_of(cache)), 4, offsets_of(batch.new, "u32"))


# One captured graph, and no graph -----------------------------------------------------------------------------------------


def bulk(tokens: Sequence[int], pages: int) -> tuple[KernelSet, KernelSet, dict[str, Any]]:
    """Host and device form over one cache, and the arguments of a batch of prompts of so many tokens."""
    rng = np.random.default_rng(3)
    needed = [-(-n // 16) for n in tokens]
    table = np.full((len(tokens), max(needed)), pages, np.uint32)
    order = iter(rng.permutation(pages))
    for b, count in enumerate(needed):
        table[b, :count] = [next(order) for _ in range(count)]
    arguments = {"page_table": table, "lengths": np.zeros(len(tokens), np.uint32)}
    return SETS["lora_dense"], DEVICE["lora_device_dense"], arguments


def test_one_bound_launch_serves_any_m() -> None:
    """What a graph would capture: the same launch, m read on the device each time; as the host form does it."""
    host, device, tables = bulk((7, 20, 3), 8)
    rng = np.random.default_rng(2)
    start = rng.standard_normal((8, 2, 2, 16, 2, 64)).astype(bfloat16)
    kv = rng.standard_normal((300, 128)).astype(start.dtype)
    offsets, pool, end = np.array([0, 7, 27, 30], np.uint32), start.copy(), np.zeros(1, np.int64)
    word = np.zeros(1, np.uint64)
    with machine(mode="check") as log:
        bound = package(device).lora_add.bind(
            package(device).Cache(pool, **tables)[1], kv, row_offsets=offsets, lora_end_idx=end, errors=word
        )
        for m in (0, 1, 7, 30, 151, -1):
            pool[...], end[0] = start, m
            bound()
            expected = start.copy()
            if 0 <= m <= 30:
                package(host).lora_add(
                    package(host).Cache(expected, **tables)[1], kv, row_offsets=offsets, lora_end_idx=m
                )
            np.testing.assert_array_equal(pool, expected)
            assert (describe(word) is None) == (0 <= m <= 30)
    assert [x.entry for x in log.launches].count("lora_device_dense_lora_add") == 6
    assert [x.entry for x in log.launches].count("lora_dense_lora_add") == 3


def test_without_rows_the_end_is_not_looked_at() -> None:
    """As upstream: callers without rows have no number of LoRA tokens. Nothing is launched, nor is with m = 0."""
    host, _, tables = bulk((1,), 1)
    pool = np.ones((1, 2, 2, 16, 2, 64), bfloat16)
    cache, offsets = package(host).Cache(pool, **tables)[0], np.array([0, 1], np.uint32)
    with machine(mode="check") as log:
        for end in (np.zeros(0, np.int64), None, -1, "nothing"):
            package(host).lora_add(cache, np.zeros((0, 128), pool.dtype), offsets, end)
        package(host).lora_add(cache, np.zeros((4, 128), pool.dtype), offsets, 0)
    assert not log.launches and (pool == 1).all()


def test_more_than_the_rows_have() -> None:
    """A host's m that kv has no rows for raises; on the device it may be empty where there are no rows."""
    host, device, tables = bulk((1,), 1)
    pool, offsets = np.ones((1, 2, 2, 16, 2, 64), bfloat16), np.array([0, 1], np.uint32)
    for end in (2, np.array([2**40])):
        with pytest.raises(
            ArgumentError, match=r"^lora_end_idx: got \d+, which takes \d+ rows; kv has 3 rows; pass at most 1"
        ):
            package(host).lora_add(package(host).Cache(pool, **tables)[0], np.zeros((3, 128), pool.dtype), offsets, end)
    cache, nothing = package(device).Cache(pool, **tables)[0], np.zeros((0, 128), pool.dtype)
    with machine(mode="check") as log:
        package(device).lora_add(cache, nothing, offsets, np.zeros(0, np.int64))
    assert not log.launches
    with pytest.raises(ArgumentError, match=r"^lora_end_idx: "):
        package(device).lora_add(cache, np.zeros((2, 128), pool.dtype), offsets, np.zeros(0, np.int64))


@pytest.mark.parametrize("end", [-1, 1.0, None, np.zeros(2, np.int64), np.zeros(0, np.int64), np.array([-3])])
def test_an_end_that_is_no_count(end: Any) -> None:
    host, _, tables = bulk((1,), 1)
    pool = np.ones((1, 2, 2, 16, 2, 64), bfloat16)
    with pytest.raises(ArgumentError, match="lora_end_idx: got "):
        package(host).lora_add(
            package(host).Cache(pool, **tables)[0], np.zeros((2, 128), pool.dtype), np.array([0, 1], np.uint32), end
        )


def sectors_of(*shape: int) -> Raw:
    """An array of ones that begins with a sector."""
    array: Raw = aligned(math.prod(shape) * 2).view(bfloat16).reshape(shape)
    array[...] = 1
    return array


def test_no_sector_is_moved_twice() -> None:
    """Each row is read once, each place of the cache read and written once, in whole sectors."""
    host, _, tables = bulk((1500, 548), 160)
    pool, kv = sectors_of(160, 2, 2, 16, 2, 64), sectors_of(4096, 128)
    with machine(mode="check") as log:
        package(host).lora_add(
            package(host).Cache(pool, **tables)[1], kv, np.array([0, 1500, 2048], np.uint32), np.array([2048])
        )
    (launched,) = log.launches
    minimum, traffic = 4096 * 256 // 32, launched.counters.per_buffer
    assert traffic["kv"].load_sectors == minimum
    assert traffic["pool"].load_sectors == minimum and traffic["pool"].store_sectors == minimum
    assert (pool == 2).sum() == 4096 * 128


# Bad data ---------------------------------------------------------------------------------------------------------------

BATCH = replace(PLAIN, totals=(9, 17, 5), new=(2, 3, 4), fill="bytes")


@pytest.mark.parametrize("m", [-1, -(2**62), 7, 9, 2**31, 2**32, 2**32 + 1, 2**62])
def test_an_end_past_the_rows(m: int) -> None:
    """6 rows of kv for each of K and V: nothing is added, the word names the first token without rows."""
    name = "lora_device_dense"
    scene = stored_scene(EVERY[name], BATCH)
    before = scene.snapshot()
    word = check_lora(scene, flat_rows(scene, 13, 128), m, offsets_of(BATCH.new, "u32"))
    hold_memory(scene, before)
    report = describe(word)
    assert report is not None and (report.code, report.request, report.position) == (
        (Fault.LORA_END, 0, 0) if m < 0 else (Fault.LORA_END, 2, 6)
    )


def test_an_end_past_the_batch() -> None:
    """12 tokens of a batch of 9: the three past it are reported and skipped."""
    name = "lora_device_dense"
    scene = stored_scene(EVERY[name], BATCH)
    report = describe(check_lora(scene, flat_rows(scene, 24, 128), 12, offsets_of(BATCH.new, "u32")))
    assert report is not None and (report.code, report.request, report.position) == (Fault.LORA_END, 2, 9)


OFFSETS = {
    "decrease": (2, 1),
    "first_too_large": (0, 90),
    "past_the_next": (1, 7),
    "last_huge": (-1, 2**31),
    "last_minus_one": (-1, 2**32 - 1),
    "last_decreases": (-1, 1),
    "minus_one": (1, 2**32 - 1),
}


@pytest.mark.parametrize("label", OFFSETS)
@pytest.mark.parametrize("name", ["lora_dense", "lora_ring"])
def test_row_offsets(name: str, label: str) -> None:
    at, value = OFFSETS[label]
    scene = stored_scene(EVERY[name], BATCH)
    offsets = offsets_of(BATCH.new, index_of(EVERY[name]))
    offsets[at] = np.array(value, np.int64).astype(offsets.dtype)
    word = check_lora(scene, flat_rows(scene, 18, width_of(scene.cache)), 9, offsets)
    # kv does not say how many tokens there are: where lengths come before the step, so many may follow.
    assert (describe(word) is None) == (label == "last_huge" and name == "lora_dense")


TABLES: dict[str, tuple[str, str, Any, int]] = {
    "page_minus_one": ("lora_dense", "page_table", (1, 0), -1),
    "page_huge": ("lora_dense", "page_table", (1, 1), 2**31 - 1),
    "one_of_two": ("lora_per_kv", "page_table", (1, 1, 14), 2**31 - 1),
    "ring": ("lora_ring", "page_table", (1, slice(None)), -1),
    "csr": ("lora_kv_inside", "page_indptr", -1, 2**31 - 1),
    "scales": ("lora_int8_own_table", "scales_page_table", (1, slice(None)), 2**31 - 1),
    "length": ("lora_dense", "lengths", 1, -1),
    "length_huge": ("lora_int8_own_table", "lengths", 1, 2**31),
    "length_after": ("lora_hnd", "lengths", 1, -1),
    "request": ("lora_indirect", "request_ids", 1, 99),
}


@pytest.mark.parametrize("label", TABLES)
def test_tables(label: str) -> None:
    """One wrong entry: that request's tokens are left alone and reported, the others' are added to."""
    name, table, at, value = TABLES[label]
    scene = stored_scene(EVERY[name], BATCH)
    array = scene.tables[table]
    array[at] = np.array(value, np.int64).astype(array.dtype)
    word = check_lora(
        scene, flat_rows(scene, 18, width_of(scene.cache)), 9, offsets_of(BATCH.new, index_of(EVERY[name]))
    )
    report = describe(word)
    assert report is not None and report.request == (2 if label == "csr" else 1)
