"""page_ranges: the bytes of a page are those of its elements, each once, in every layout."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from kvgen import Block, KernelSet, Layout, Paged, Quant, ops, page_ranges, paired_ranges
from kvgen.errors import ArgumentError
from kvgen.runtime.page_ranges import PageRange
from tests.support.batches import PLAIN
from tests.support.harness import package
from tests.support.page_moves import SETS, moving_scene

NAMES = [name for name, kernels in SETS.items() if kernels.kv.page_tokens is not None]


def places(array: Any, axes: tuple[str, ...], page: int, heads: range | None = None) -> list[int]:
    """The address of every byte of a page of an array, or of these places along its head axis."""
    found = np.array([array.ctypes.data])
    for axis, count, step in zip(axes, array.shape, array.strides, strict=True):
        steps = np.array([page]) if axis == "page" else np.arange(count)
        steps = steps if axis != "head" or heads is None else np.array(heads)
        found = (found[:, None] + steps * step).reshape(-1)
    return (found[:, None] + np.arange(array.itemsize)).reshape(-1).tolist()  # type: ignore[no-any-return]


def listed(ranges: Iterable[PageRange]) -> list[int]:
    return [address + i for address, nbytes in ranges for i in range(nbytes)]


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_its_elements(name: str) -> None:
    scene = moving_scene(SETS[name], PLAIN)
    cache = package(scene.kernels).Cache(**scene.arguments())
    own = scene.cache.storage.own_table
    pages, scale_pages = [scene.pages - 1, 0], [1, scene.scale_pages - 1] if own else None
    found = page_ranges(cache, pages, scale_pages=scale_pages)
    for i, page in enumerate(pages):
        expected = []
        for tensor in scene.cache.storage.tensors:
            arrays = scene.arrays()[tensor.name]
            if "page" in tensor.axes:
                id_ = scale_pages[i] if scale_pages is not None and "scale" in tensor.name else page
                for array in arrays if isinstance(arrays, list) else [arrays]:
                    expected += places(array, tensor.axes, id_)
        assert len(set(expected)) == len(expected) and sorted(listed(found[i])) == sorted(expected)
        assert all(a.address + a.nbytes != b.address for a, b in zip(found[i], found[i][1:], strict=False))


@pytest.mark.parametrize("name", [n for n in NAMES if "int4_in_page" not in n and "latent_row" not in n])
def test_a_range_of_heads_is_its_elements(name: str) -> None:
    scene = moving_scene(SETS[name], PLAIN)
    cache = package(scene.kernels).Cache(**scene.arguments())
    page, scale_page = 1, 0 if scene.cache.storage.own_table else None
    scale_pages = None if scale_page is None else [scale_page]
    whole = scene.cache.kv_heads
    for heads in (range(1), range(1, whole), range(whole)):
        (found,) = page_ranges(cache, [page], heads=heads, scale_pages=scale_pages)
        expected = []
        for tensor in scene.cache.storage.tensors:
            if "page" in tensor.axes:
                arrays, id_ = scene.arrays()[tensor.name], page
                if scale_page is not None and "scale" in tensor.name:
                    id_ = scale_page
                for array in arrays if isinstance(arrays, list) else [arrays]:
                    expected += places(array, tensor.axes, id_, heads)
        assert sorted(listed(found)) == sorted(expected)
    assert [found] == page_ranges(cache, [page], scale_pages=scale_pages)


SMALL = KernelSet(
    name="ranged",
    q_heads=2,
    cache=Paged(dtype="f16", kv_heads=2, head_dim=8, page_size=4),
    ops=[ops.SwapPages(direction="out")],
)


def test_a_page_of_all_layers_is_one_range_and_moves() -> None:
    generated = package(SMALL)
    pools = [np.random.default_rng(i).standard_normal((5, 2, 3, 4, 2, 8)).astype(np.float16) for i in range(2)]
    here, there = (page_ranges(generated.Pages(pool), [1, 4][:: 1 - 2 * i]) for i, pool in enumerate(pools))
    assert [len(ranges) for ranges in here] == [1, 1] and here[0][0].nbytes == pools[0][0].nbytes
    for source, target in zip(here, there, strict=True):
        for a, b in zip(source, target, strict=True):
            ctypes.memmove(b.address, a.address, a.nbytes)
    assert (pools[1][4] == pools[0][1]).all() and (pools[1][1] == pools[0][4]).all()
    backwards = pools[0][::-1, :, ::-1]
    assert page_ranges(generated.Pages(backwards), [3]) == [here[0]]


def test_tensors_a_layer_come_layer_by_layer_wherever_they_lie() -> None:
    """Ids of NumPy are ids; the first layer may lie behind the second one, or right before it."""
    cache = Paged(
        dtype="f16", kv_heads=2, head_dim=8, page_size=4, layout=Layout(kv="page kv token head dim", layers="pointers")
    )
    generated = package(SMALL.model_copy(update={"name": "ranged_layers", "cache": cache}))
    memory = np.zeros((2, 1, 2, 4, 2, 8), np.float16)
    ids = np.array([0], np.int32)
    for order in ([0, 1], [1, 0]):
        pools = [memory[i] for i in order]
        assert page_ranges(generated.Pages(pools), ids) == [[(p.ctypes.data, p.nbytes) for p in pools]]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "pages", "scale_pages", "says"),
    [
        ("moving_dense", [10**6], None, "pages[0]: got 1000000; pool has the pages 0 to "),
        ("moving_dense", [0, -1], None, "pages[1]: got -1; pool has the pages 0 to "),
        ("moving_dense", [0], [0], "scale_pages: got 1 ids; scales have the ids of their values; leave it out"),
        ("moving_int8_own_table", [0], None, "scale_pages: got none; scales have a table of their own; pass 1 ids"),
        ("moving_continuous_open", [0], None, "pool: got moving_continuous_open, whose requests have no pages"),
    ],
)  # fmt: skip
def test_what_is_refused(name: str, pages: list[int], scale_pages: list[int] | None, says: str) -> None:
    scene = moving_scene(SETS[name], PLAIN)
    cache = package(scene.kernels).Cache(**scene.arguments())
    with pytest.raises(ArgumentError) as error:
        page_ranges(cache, pages, scale_pages=scale_pages)
    assert str(error.value).startswith(says)


def paged(name: str, **fields: Any) -> KernelSet:
    cache = Paged(dtype="f16", kv_heads=4, head_dim=8, page_size=4, **fields)
    return KernelSet(name=f"ranged_{name}", q_heads=12, cache=cache, ops=[ops.SwapPages(direction="out")])


PAIRS = paged("pairs", quant=Quant(dtype="e4m3", scale_dtype="f32", block=Block(head=2)))
SWIZZLED = paged("swizzled", layout=Layout(kv="page kv layer token head dim", swizzle=(2, 3, 3)))
BYTES = paged("bytes", quant=Quant(dtype="e4m3", scale_dtype="f32", block=Block(head=1), place="page"))


@pytest.mark.parametrize(
    ("kernels", "heads", "says"),
    [
        (PAIRS, range(2, 5), "heads: got range(2, 5); the cache has the KV heads 0 to 3; pass range(first, end)"),
        (PAIRS, range(2, 2), "heads: got range(2, 2); the cache has the KV heads 0 to 3; pass range(first, end)"),
        (PAIRS, range(0, 4, 2), "heads: got range(0, 4, 2); the cache has the KV heads 0 to 3; pass range(first, end)"),
        (PAIRS, 2, "heads: got 2; the cache has the KV heads 0 to 3; pass range(first, end)"),
        (PAIRS, range(1), "heads: got range(0, 1); scales has one scale for 2 heads; pass a range of whole multiples of 2"),
        (PAIRS, range(1, 4), "heads: got range(1, 4); scales has one scale for 2 heads; pass a range of whole multiples of 2"),
        (SWIZZLED, range(1), "heads: got range(0, 1) of pool, which is swizzled; its heads have no ranges of their own; "),
        (BYTES, range(1), "heads: got range(0, 1) of pool, which is 'page layer byte'; its heads have no ranges of their "),
    ],
)  # fmt: skip
def test_heads_that_are_refused(kernels: KernelSet, heads: range, says: str) -> None:
    sizes = {"pages": 3, "scale_pages": 3, "layers": 2}
    kinds = {"f16": np.float16, "f32": np.float32}
    pools = {
        t.name: np.zeros([sizes.get(n, n) for n in t.shape], kinds.get(t.dtype, np.uint8))
        for t in package(kernels).Pages.TENSORS
    }
    with pytest.raises(ArgumentError) as error:
        page_ranges(package(kernels).Pages(**pools), [0], heads=heads)
    assert str(error.value).startswith(says)


def test_pairs_of_ranges() -> None:
    source = [PageRange(100, 4), PageRange(200, 6), PageRange(300, 2)]
    target = [PageRange(1000, 7), PageRange(2000, 1), PageRange(3000, 4)]
    assert paired_ranges(source, target) == [
        (100, 1000, 4), (200, 1004, 3), (203, 2000, 1), (204, 3000, 2), (300, 3002, 2)
    ]  # fmt: skip
    assert paired_ranges([], []) == []
    beside = [PageRange(300, 2), PageRange(302, 6), PageRange(308, 1)]
    assert paired_ranges(beside, target[:1] + target[1:2] + [PageRange(2001, 1)]) == [(300, 1000, 7), (307, 2000, 2)]
    with pytest.raises(
        ArgumentError, match=r"^target: got 7 bytes for 12 of the source; .* pass heads= to the page_ranges"
    ):
        paired_ranges(source, target[:1])
