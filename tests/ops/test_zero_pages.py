"""zero_pages against the oracle: all memory of all layers, byte for byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import KernelSet, Paged, Quant, ops
from kvgen.layout.dtypes import dtype
from kvgen.lowering.id_lists import IdLists
from kvgen.lowering.page_runs import TILE, page_runs
from kvgen.reference import cache_rows, zero_pages
from kvgen.runtime import Fault, describe
from kvgen.runtime.cpu import machine
from tests.ops.test_copy_pages import BULK
from tests.support.batches import PLAIN
from tests.support.harness import package
from tests.support.page_moves import SETS, expect, having, hold_bytes, launch, moving_scene, sizes, steps, vector
from tests.support.scenes import LAYERS, Scene

PAIR = replace(PLAIN, totals=(40, 40), new=(0, 0))


def kind_of(kernels: KernelSet) -> str:
    """The type of a set's ids."""
    (found,) = [op.index_dtype for op in kernels.ops if isinstance(op, ops.ZeroPages)]
    return found


def check(scene: Scene, *, mode: Any = "check", **given: Any) -> int:
    """Zero, and compare all memory with the oracle's; the oracle's error word. Lists and counts have canaries around."""
    expected, kind = scene.snapshot(), kind_of(scene.kernels)
    counts: dict[str, Any] = {k: v for k, v in given.items() if k.startswith("num_")}
    lists = {k: np.array(v, dtype(kind).numpy()).reshape(-1) for k, v in given.items() if k not in counts}
    word = zero_pages(scene.cache, scene.arrays(expected), **lists, **counts)
    arrays = {k: vector(v, kind) for k, v in (lists | {k: np.array([n]) for k, n in counts.items()}).items()}
    around = {k: memory.copy() for k, (_, memory) in arrays.items()}
    found, log = launch(scene, "zero_pages", mode=mode, **{k: array for k, (array, _) in arrays.items()})
    hold_bytes(scene.snapshot(), expected)
    for k, (_, memory) in arrays.items():
        np.testing.assert_array_equal(memory, around[k], err_msg=k)
    expect(found, word)
    assert len(log) == any(len(ids) for ids in lists.values())
    return word


@pytest.mark.parametrize("name", having("zero_pages"))
@settings(max_examples=6)
@given(data=st.data())
def test_ids(name: str, data: Any) -> None:
    """Any ids, apart from one another where they are good; as many of them as the device says."""
    kernels = SETS[name]
    scene = moving_scene(kernels, data.draw(steps(kernels)))
    given: dict[str, Any] = {}
    for which, entries in zip(IdLists(kernels.cache, "page_ids").runs, sizes(scene), strict=False):
        order = data.draw(st.permutations(range(entries)))
        ids = order[: data.draw(st.integers(0, min(9, entries)))]
        for _ in range(data.draw(st.integers(0, 3))):
            odd = data.draw(st.sampled_from([-1, -1, -2, entries, 2**31 - 1, -(2**31), scene.pages + 7]))
            ids.insert(data.draw(st.integers(0, len(ids))), odd)
        given[which] = ids
        if data.draw(st.booleans()):
            given[f"num_{which}"] = data.draw(st.sampled_from([-1, -(2**31), 2**31 - 1, *range(len(ids) + 3)]))
    if "scale_page_ids" in given and data.draw(st.booleans()):
        del given["scale_page_ids"]
        given.pop("num_scale_page_ids", None)
    check(scene, **given)


@pytest.mark.parametrize("name", having("zero_pages"))
def test_ids_outside_the_pool(name: str) -> None:
    """Whatever an id says, the page that it names is in the pool or it is skipped; the word has the first bad one."""
    kernels = SETS[name]
    scene = moving_scene(kernels, replace(PLAIN, totals=(20, 30, 9), new=(0,) * 3))
    entries, scales = sizes(scene)
    wide = [2**40, -(2**63), 2**63 - 1, 2**32] if kind_of(kernels) == "i64" else []
    ids = [0, -1, entries - 1, entries, 2**31 - 1, -2, -(2**31), scene.pages, *wide, 1]
    given: dict[str, Any] = {"page_ids": ids}
    if "scale_page_ids" in IdLists(kernels.cache, "page_ids").runs:
        given["scale_page_ids"] = [scales - 1, -1, scales]
    report = describe(check(scene, **given))
    assert report is not None and (report.code, report.position) == (Fault.PAIR, 4 - len(given))


@pytest.mark.parametrize("live", [-1, -(2**63), 2**40, 2**32 - 1])
def test_a_count_that_cannot_be(live: int) -> None:
    """No page is zeroed, and the word says so; of a list of scales no page of scales."""
    scene = moving_scene(SETS["moving_dense"], PAIR)
    before = scene.snapshot()
    report = describe(check(scene, page_ids=[0, 2], num_page_ids=live))
    assert report is not None and (report.code, report.position) == (Fault.PAIR, 0)
    hold_bytes(scene.snapshot(), before)
    scene = moving_scene(SETS["moving_int8_own_table"], PAIR)
    scales = scene.snapshot()["scales"]
    report = describe(check(scene, page_ids=[0, 2], scale_page_ids=[1], num_scale_page_ids=live))
    assert report is not None and report.code is Fault.PAIR
    hold_bytes({"scales": scene.snapshot()["scales"]}, {"scales": scales})


def test_counts_of_the_device() -> None:
    """None, some, all, and more than the list has."""
    scene = moving_scene(SETS["moving_hnd"], PAIR)
    for live, ids in ((0, [0, 1]), (1, [2, 3]), (2, [4, 5]), (3, [6, 7]), (2**31 - 1, [8, -1])):
        assert describe(check(scene, page_ids=ids, num_page_ids=live)) is None
    assert describe(check(scene, page_ids=[0, -7], num_page_ids=1)) is None, "an id that does not count"


def test_lists_that_are_empty() -> None:
    """Nothing is launched; one list of two is enough."""
    scene = moving_scene(SETS["moving_int8_own_table"], PAIR)
    assert describe(check(scene, page_ids=[])) is None
    assert describe(check(scene, page_ids=[], scale_page_ids=[], num_page_ids=-1)) is None
    assert describe(check(scene, page_ids=[], scale_page_ids=[1, 0])) is None
    assert describe(check(scene, page_ids=[3, 0], scale_page_ids=[])) is None


@pytest.mark.parametrize("name", ["moving_hnd", "moving_indirect", "moving_latent_row", "moving_int4_in_page"])
def test_an_id_may_come_twice(name: str) -> None:
    """In one tile and in several, pages of one tile and of several."""
    scene = moving_scene(SETS[name], replace(PLAIN, totals=(20, 30, 9), new=(0,) * 3))
    entries = sizes(scene)[0]
    assert describe(check(scene, mode="fast", page_ids=[1, 1, 0, *[entries - 1] * 70, 1])) is None


# Scales of 18 bytes a page, behind which lies another page or a gap; pages with a tile of one piece.
ODD = {
    "scales": Paged(
        dtype="bf16", kv_heads=3, head_dim=24, page_size=3, quant=Quant(dtype="i8", scale_dtype="f16", zero=True)
    ),
    "tile": Paged(dtype="f32", kv_heads=5, head_dim=20, page_size=41, layout="page layer token head dim", stores="k"),
}


@pytest.mark.parametrize("name", ODD)
def test_pages_that_tiles_do_not_divide(name: str) -> None:
    kernels = KernelSet(name=f"zeroed_odd_{name}", q_heads=15, cache=ODD[name], ops=(ops.ZeroPages(),))
    runs = page_runs(ODD[name])
    assert any(run.nbytes % 16 for run in runs) or [run.nbytes // 16 % TILE for run in runs] == [1]
    scene = moving_scene(kernels, replace(PLAIN, totals=(90, 100, 60), new=(0,) * 3))
    assert describe(check(scene, page_ids=[3, 0, -1, 7, 5])) is None


@pytest.mark.parametrize("name", [n for n in having("zero_pages") if n != "moving_kivi"])
def test_zeroed_tokens_are_zero(name: str) -> None:
    """Codes, scales and zero points of random bytes, NaN among them: afterwards all tokens of all layers dequantize to 0."""
    kernels = SETS[name]
    scene = moving_scene(kernels, replace(PLAIN, totals=(20, 30, 9), new=(0,) * 3))
    given = dict(zip(IdLists(kernels.cache, "page_ids").runs, (np.arange(n) for n in sizes(scene)), strict=False))
    assert describe(check(scene, **given)) is None
    multiplier = scene.cache.page_table.id_multiplier
    for layer in range(LAYERS):
        for rows in cache_rows(scene.cache, scene.arrays(), layer):
            for page in range(0, scene.pages, multiplier):
                scales = page if page < rows.scale_pages else None
                for token in range(scene.tokens):
                    assert not rows.numbers(page, token, scales).any()


def bulk(name: str, pages: int, layers: int) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Of a set with large pages: its package, pools without a gap, and tables."""
    kernels = KernelSet(name=f"zeroed_{name}", q_heads=8, cache=BULK[name], ops=(ops.ZeroPages(),))
    scene, pools = Scene(kernels, replace(PLAIN, totals=(1,), new=(0,)), (1,)), dict[str, Any]()
    extents = {"pages": pages, "scale_pages": pages, "layers": layers}
    for tensor in kernels.cache.storage.tensors:
        shape = [extents[n] if isinstance(n, str) else n for n in tensor.shape]
        kind = scene.arrays()[tensor.name].dtype
        size = int(np.prod(shape)) * kind.itemsize
        raw = np.full(size + 256, 0xEE, np.uint8)
        start = -raw.ctypes.data % 256
        pools[tensor.name] = raw[start : start + size].view(kind).reshape(shape)
    return package(kernels), pools, scene.tables


@pytest.mark.parametrize("name", BULK)
def test_every_sector_is_stored_once(name: str) -> None:
    """64 pages of 2 layers: the sectors that they consist of are stored, each once, and none is loaded."""
    pages = 130
    generated, pools, tables = bulk(name, pages, 2)
    ids = np.random.default_rng(0).permutation(pages)[:64]
    with machine(mode="check") as log:
        generated.zero_pages(generated.Cache(**pools, **tables), ids)
    (done,) = log.launches
    for which, pool in pools.items():
        found, least = done.counters.per_buffer[which], len(ids) * pool.nbytes / pages / 32
        print(f"{name} {which}: stored {found.store_sectors / least:.3f} of the least")
        assert found.store_sectors == least and found.load_sectors == 0
        assert sum(not page.view(np.uint8).any() for page in pool) == len(ids)


def test_a_bad_id_of_a_single_layer() -> None:
    """Said by the only layer there is, and where a page has several tiles."""
    generated, pools, tables = bulk("plain", 3, 1)
    word = np.zeros(1, np.uint64)
    with machine(mode="check"):
        generated.zero_pages(generated.Cache(**pools, **tables), np.array([2, 3, 0]), errors=word)
    report = describe(word)
    assert report is not None and (report.code, report.position) == (Fault.PAIR, 1)
    assert [bool(page.view(np.uint8).any()) for page in pools["pool"]] == [False, True, False]
