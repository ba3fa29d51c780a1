"""copy_pages against the oracle: all memory of all layers, byte for byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import KernelSet, Paged, Quant, ops, presets
from kvgen.reference import copy_pages, overlaps
from kvgen.runtime import Fault, describe
from kvgen.runtime.cpu import machine
from tests.support.batches import PLAIN
from tests.support.harness import package
from tests.support.page_moves import SETS, apart, expect, having, hold_bytes, launch, lists, moving_scene, sizes, steps
from tests.support.scenes import Scene


def pairs_array(pairs: Any, kind: Any = np.int64) -> Any:
    return np.array(pairs, kind).reshape(-1, 2)


def check(scene: Scene, *, check_first: bool = False, **given: Any) -> int:
    """Copy, and compare all memory with the oracle's; the oracle's error word."""
    expected = scene.snapshot()
    counts: dict[str, Any] = {k: int(v[0]) for k, v in given.items() if k.startswith("num_") and v is not None}
    arrays = {k: v for k, v in given.items() if not k.startswith("num_")}
    word = copy_pages(scene.cache, scene.arrays(expected), arrays.pop("pairs"), **arrays, **counts)
    if check_first:
        word = max(word, overlaps(scene.cache, given["pairs"], scene.pages, counts.get("num_pairs")))
    pairs = given.pop("pairs")
    found, log = launch(scene, "copy_pages", pairs, **given, **(dict[str, Any](check=True) if check_first else {}))
    hold_bytes(scene.snapshot(), expected)
    expect(found, word)
    empty = not len(pairs) and not len(given.get("scale_pairs", ()))
    assert len(log) == (0 if empty else 1 + check_first)
    return word


# Whose pairs are compared before they are copied: with and without a multiplier, a list of scales, and of both sizes of an id.
COMPARED = ("moving_dense", "moving_hnd", "moving_indirect", "moving_latent_row", "moving_int8_own_table")


@pytest.mark.parametrize("name", having("copy_pages"))
@settings(max_examples=4)
@given(data=st.data())
def test_pairs(name: str, data: Any) -> None:
    """Any pairs that do not overlap; fewer than the list has, if the device says so; both architectures."""
    kernels = SETS[name]
    scene = moving_scene(kernels, data.draw(steps(kernels)))
    given: dict[str, Any] = {}
    for which, entries in zip(lists(kernels), sizes(scene), strict=False):
        pairs = data.draw(apart(entries))
        given[which] = pairs_array(pairs)
        if data.draw(st.booleans()):
            given[f"num_{which}"] = np.array([data.draw(st.integers(0, len(pairs) + 2))], np.int64)
    if "scale_pairs" in given and data.draw(st.booleans()):
        del given["scale_pairs"]
        given.pop("num_scale_pairs", None)
    check(scene, check_first=name in COMPARED and data.draw(st.booleans()), **given)


@pytest.mark.parametrize("name", ["moving_hnd", "moving_kv_inside", "moving_int8_own_table", "moving_continuous_open"])
def test_ids_outside_the_pool(name: str) -> None:
    """Whatever a pair says, what it names is in the pool or it is skipped; the word has the first bad one."""
    kernels = SETS[name]
    scene = moving_scene(kernels, replace(PLAIN, totals=(20, 30, 9), new=(0,) * 3))
    entries, scales = sizes(scene)
    bad = [entries, 2**31 - 1, -2, 2**40, -(2**63), 2**63 - 1, scene.pages]
    pairs = [[0, 1], *([i, 2] for i in bad), *([2, i] for i in bad), [entries - 1, 2]]
    given = {"pairs": pairs_array(pairs)}
    if "scale_pairs" in lists(kernels):
        given["scale_pairs"] = pairs_array([[scales, 0], [1, scales - 1]])
    report = describe(check(scene, **given))
    assert report is not None and report.code is Fault.PAIR
    assert report.position == (
        0 if len(given) > 1 else next(i for i, p in enumerate(pairs) if max(p) >= entries or min(p) < -1)
    )


@pytest.mark.parametrize("live", [-1, -(2**63), 2**40, 2**32 - 1])
def test_a_count_that_cannot_be(live: int) -> None:
    """No pair is copied, and the word says so."""
    scene = moving_scene(SETS["moving_dense"], replace(PLAIN, totals=(40, 40), new=(0, 0)))
    before = scene.snapshot()
    report = describe(check(scene, check_first=True, pairs=pairs_array([[0, 1], [2, 3]]), num_pairs=np.array([live])))
    assert report is not None and (report.code, report.position) == (Fault.PAIR, 0)
    hold_bytes(scene.snapshot(), before)


def test_a_count_past_the_list() -> None:
    """All pairs are copied; a bad count of scales leaves the pages of values alone."""
    scene = moving_scene(SETS["moving_int8_own_table"], replace(PLAIN, totals=(40, 40), new=(0, 0)))
    pairs = pairs_array([[0, 1], [2, 3]])
    assert describe(check(scene, pairs=pairs, num_pairs=np.array([2**32 - 2]))) is None
    given = {"pairs": pairs[:, ::-1].copy(), "scale_pairs": pairs, "num_scale_pairs": np.array([-7])}
    report = describe(check(scene, **given))
    assert report is not None and report.code is Fault.PAIR


OVERLAPPING = {
    "twice": ([[0, 3], [1, 3]], 1),
    "a chain": ([[0, 1], [1, 2]], 0),
    "a swap": ([[0, 1], [1, 0]], 0),
    "three": ([[4, 5], [0, 3], [1, 2], [2, 3]], 2),
    "not if skipped": ([[0, 3], [-1, 3], [3, -1], [3, 3], [9999, 3]], None),
}


@pytest.mark.parametrize("label", OVERLAPPING)
def test_overlapping_pairs_of_scales(label: str) -> None:
    """The list of scales is compared behind that of values: one pair, and as many as take two blocks."""
    pairs, first = OVERLAPPING[label]
    scene = moving_scene(SETS["moving_int8_own_table"], replace(PLAIN, totals=(40, 40), new=(0, 0)))
    for values in ([[0, 1]], [[-1, -1]] * 300):
        word, _ = launch(scene, "copy_pages", pairs_array(values), scale_pairs=pairs_array(pairs), step="check")
        found = describe(word) if word is not None else None
        assert (found is None) == (first is None)
        if found is not None:
            assert (found.code, found.position) == (Fault.OVERLAP, first)


@pytest.mark.parametrize("label", OVERLAPPING)
@pytest.mark.parametrize("name", ["moving_hnd", "moving_latent_row"])
def test_overlapping_pairs(name: str, label: str) -> None:
    """Found by check; and copied, every 16 bytes are those of a page involved, and no other page changes."""
    pairs, first = OVERLAPPING[label]
    scene = moving_scene(SETS[name], replace(PLAIN, totals=(20, 30, 9), new=(0,) * 3))
    given = pairs_array(pairs)
    word, _ = launch(scene, "copy_pages", given, step="check")
    found = describe(word) if word is not None else None
    assert (found is None) == (first is None)
    if found is not None:
        assert (found.code, found.position) == (Fault.OVERLAP, first)
    before = scene.snapshot()
    launch(scene, "copy_pages", given, mode="fast")
    after, m = scene.snapshot(), scene.cache.page_table.id_multiplier
    written = {to * m for _, to in pairs if 0 <= to < 9999}
    for tensor in scene.cache.storage.tensors:
        if "page" not in tensor.axes:
            continue
        for old, new in zip(each(scene, before, tensor.name), each(scene, after, tensor.name), strict=True):
            others = [i for i in range(len(old)) if i not in written]
            assert new[others].tobytes() == old[others].tobytes()
            for to in written:
                choices = [to, *(a * m for a, t in pairs if t * m == to and 0 <= a < 9999)]
                choices += [a * m for i in choices for a, t in pairs if t * m == i and 0 <= a < 9999]
                blocks = [np.frombuffer(old[i].tobytes(), np.uint8) for i in choices]
                mine = np.frombuffer(new[to].tobytes(), np.uint8)
                unit = 16 if len(mine) % 16 == 0 else 1
                same = [(b.reshape(-1, unit) == mine.reshape(-1, unit)).all(axis=1) for b in blocks]
                assert np.any(same, axis=0).all()


def each(scene: Scene, memory: Any, name: str) -> list[Any]:
    tensor = scene.cache.storage.tensor(name)
    given = scene.arrays(memory)[name]
    return [np.moveaxis(a, tensor.axes.index("page"), 0) for a in ([given] if isinstance(given, np.ndarray) else given)]


def test_many_pairs_are_compared() -> None:
    """More than a block has, of both kinds; the last one overlaps the first."""
    kernels = SETS["moving_indirect"]
    scene = moving_scene(kernels, replace(PLAIN, totals=(1500, 1200), new=(0, 0)))
    order = np.random.default_rng(3).permutation(sizes(scene)[0])
    pairs = pairs_array(order[: len(order) // 2 * 2])
    assert len(pairs) > 1024
    word, _ = launch(scene, "copy_pages", pairs, step="check")
    assert describe(word) is None
    pairs[-1, 1] = pairs[0, 1]
    word, _ = launch(scene, "copy_pages", pairs, step="check")
    report = describe(word)
    assert report is not None and (report.code, report.position) == (Fault.OVERLAP, len(pairs) - 1)


BULK = {
    "plain": presets.max_paged(dtype="bf16", kv_heads=8, head_dim=128, page_size=16),
    "quantized": Paged(
        dtype="bf16", kv_heads=8, head_dim=128, page_size=16, quant=Quant(dtype="i8", scale_dtype="f32", zero=True)
    ),
}


@pytest.mark.parametrize("name", BULK)
def test_no_sector_is_moved_twice(name: str) -> None:
    """64 pages of 2 layers: sectors loaded and stored over what the pages consist of, by 1.02 at most."""
    kernels = KernelSet(name=f"copied_{name}", q_heads=8, cache=BULK[name], ops=(ops.CopyPages(),))
    scene = Scene(kernels, replace(PLAIN, totals=(1,), new=(0,)), (1,))
    generated, pools, pages = package(kernels), {}, 130
    for tensor in kernels.cache.storage.tensors:
        extents = {"pages": pages, "scale_pages": pages, "layers": 2}
        shape = [extents[n] if isinstance(n, str) else n for n in tensor.shape]
        kind = scene.arrays()[tensor.name].dtype
        raw = np.zeros(int(np.prod(shape)) * kind.itemsize + 256, np.uint8)
        start = -raw.ctypes.data % 256
        pools[tensor.name] = raw[start : start + int(np.prod(shape)) * kind.itemsize].view(kind).reshape(shape)
    order = np.random.default_rng(0).permutation(pages)[:128].reshape(64, 2)
    with machine(mode="check") as log:
        generated.copy_pages(generated.Cache(**pools, **scene.tables), pairs_array(order))
    (done,) = log.launches
    for which, pool in pools.items():
        found, least = done.counters.per_buffer[which], 64 * pool.nbytes / pages / 32
        print(
            f"{name} {which}: loaded {found.load_sectors / least:.3f}, stored {found.store_sectors / least:.3f} of the least"
        )
        assert least <= found.load_sectors <= 1.02 * least
        assert least <= found.store_sectors <= 1.02 * least
