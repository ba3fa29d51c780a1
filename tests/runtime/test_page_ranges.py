"""page_ranges: the bytes of a page are those of its elements, each once, in every layout."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from kvgen import KernelSet, Layout, Paged, ops, page_ranges
from kvgen.errors import ArgumentError
from kvgen.runtime.page_ranges import PageRange
from tests.support.batches import PLAIN
from tests.support.harness import package
from tests.support.page_moves import SETS, moving_scene

NAMES = [name for name, kernels in SETS.items() if kernels.kv.page_tokens is not None]


def places(array: Any, axes: tuple[str, ...], page: int) -> list[int]:
    """The address of every byte of a page of an array."""
    found = np.array([array.ctypes.data])
    for axis, count, step in zip(axes, array.shape, array.strides, strict=True):
        steps = np.array([page]) if axis == "page" else np.arange(count)
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
