"""store_scales against the oracle: the whole memory byte for byte; codes stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import KernelSet, ops
from kvgen.reference import store_scales
from kvgen.reference.elements import Elements
from kvgen.reference.segments import Coded
from kvgen.runtime import Fault, describe
from kvgen.runtime.cpu import machine
from tests.ops.test_lora_add import index_of, stored_scene
from tests.support.batches import PLAIN, Batch, batches
from tests.support.cache_matrix import CHOSEN, FEW_BITS, chosen
from tests.support.harness import Run, hold_memory, launcher, offsets_of, package
from tests.support.memory import Raw, aligned, rows_array
from tests.support.scenes import Scene

SETS = chosen(
    "k_scales",
    lambda cache: (ops.StoreScales(),),
    ("latent_row", "latent_pool", "int8_own_table", "int4_in_page", "nvfp4", "nvfp4_swizzled"),
)
# V's: with a zero point, and of a cache whose K waits in a tail.
SETS |= chosen("v_scales", lambda cache: (ops.StoreScales(role="v"),), ("int8_own_table", "kivi", *FEW_BITS))


def role_of(kernels: KernelSet) -> int:
    (op,) = kernels.ops
    assert isinstance(op, ops.StoreScales)
    return "kv".index(op.role)


def scales_of(scene: Scene) -> Elements:
    """Where the role's scales lie."""
    part = scene.rows()[role_of(scene.kernels)].parts[0]
    assert isinstance(part, Coded) and isinstance(part.scales, Elements)
    return part.scales


def new_scales(scene: Scene, rows: int) -> Raw:
    """Scales `[rows, blocks of heads, places]` of many sizes, strided where the batch says so."""
    held = scales_of(scene)
    kind = scene.kernels.cache.quants["kv"[role_of(scene.kernels)]]
    assert kind is not None and kind.scale_dtype is not None
    array, _ = rows_array(rows, (held.heads, held.dim), kind.scale_dtype, strided=scene.batch.strided)
    array[...] = 2.0 ** scene.rng.integers(-6, 6, array.shape) * (1 + scene.rng.random(array.shape))
    return array


def check_scales(scene: Scene, scales: Raw, row_offsets: Raw) -> int:
    """Store and compare all memory with the oracle's; returns the error word."""
    expected, role = scene.snapshot(), role_of(scene.kernels)
    word = store_scales(scene.view, scene.rows(expected), scales, row_offsets=row_offsets, role=role)
    call = launcher(scene, "store_scales")
    run = Run(scene, "store_scales", call, new_scales=scales, row_offsets=row_offsets)
    hold_memory(scene, expected)
    run.expect_word(word)
    return word


def scene_of(kernels: KernelSet, batch: Batch) -> Scene:
    """A scene whose codes are stored; of a cache with a tail, in which none is."""
    if kernels.cache.storage.residual:
        before = [n - new for n, new in zip(batch.totals, batch.new, strict=True)]
        return Scene(kernels, batch, before)
    return stored_scene(kernels, batch)


@pytest.mark.parametrize("name", SETS)
@settings(max_examples=6)
@given(data=st.data())
def test_drawn(name: str, data: Any) -> None:
    batch = data.draw(batches(SETS[name]))
    scene = scene_of(SETS[name], batch)
    rows = batch.leading + sum(batch.new) + batch.padding
    offsets = offsets_of(batch.new, index_of(SETS[name]), batch.leading)
    check_scales(scene, new_scales(scene, rows), offsets)


def test_zero_points_lie_behind_their_scales() -> None:
    """The last axis has a group's scale and then its zero point, as memory has them."""
    name = "k_scales_int4_in_page"
    scene = scene_of(SETS[name], replace(PLAIN, totals=(5,), new=(1,)))
    scales = new_scales(scene, 1)
    assert scales.shape == (1, 2, 8)  # heads, 64 dims of 16 a group: 4 scales, 4 zero points
    check_scales(scene, scales, offsets_of((1,), index_of(SETS[name])))
    place = scene.view.places(0, 4 // 3)
    assert isinstance(place, tuple)
    np.testing.assert_array_equal(scales_of(scene).read(place[0].scales, 1), scales[0])


BATCH = replace(PLAIN, totals=(9, 17, 5), new=(2, 3, 4), fill="bytes")
TABLES: dict[str, tuple[str, Any, int, Fault]] = {
    "page": ("page_table", (1, slice(None)), -1, Fault.PAGE_ID),
    "scale_page": ("scales_page_table", (1, slice(None)), 2**31 - 1, Fault.PAGE_ID),
    "length": ("lengths", 1, -1, Fault.LENGTH),
    "length_huge": ("lengths", 1, 2**31 - 1, Fault.POSITION),
}


@pytest.mark.parametrize("label", TABLES)
def test_tables(label: str) -> None:
    """One wrong entry: nothing of that request is stored, and it is reported."""
    table, at, value, code = TABLES[label]
    name = "k_scales_int8_own_table"
    scene = scene_of(SETS[name], BATCH)
    array = scene.tables[table]
    array[at] = np.array(value, np.int64).astype(array.dtype)
    report = describe(check_scales(scene, new_scales(scene, 10), offsets_of(BATCH.new, index_of(SETS[name]))))
    assert report is not None and (report.code, report.request) == (code, 1)


@pytest.mark.parametrize(("at", "value"), [(2, 1), (0, 90), (2, 90), (-1, 90), (-1, 1), (1, 2**32 - 1)])
def test_row_offsets(at: int, value: int) -> None:
    name = "k_scales_int8_own_table"
    scene = scene_of(SETS[name], BATCH)
    offsets = offsets_of(BATCH.new, index_of(SETS[name]))
    offsets[at] = np.array(value, np.int64).astype(offsets.dtype)
    report = describe(check_scales(scene, new_scales(scene, 9), offsets))
    assert report is not None and report.code is Fault.ROW_OFFSETS


def test_no_sector_is_moved_twice() -> None:
    """Scales of a whole page's tokens lie together in MAX's pools; every sector of them is written once."""
    kernels = SETS["k_scales_latent_pool"]
    made = package(kernels)
    tokens, cache = 1024, CHOSEN["latent_pool"]
    groups = cache.storage.roles["k"][0].scales
    assert groups is not None
    tensors: dict[str, Any] = {}
    for tensor in cache.storage.tensors:
        sizes = {"pages": 64, "scale_pages": 64, "layers": 1}
        shape = [sizes[s] if isinstance(s, str) else s for s in tensor.shape]
        from kvgen.layout.dtypes import dtype

        kind = dtype(tensor.dtypes[0]).numpy()
        tensors[tensor.name] = aligned(int(np.prod(shape)) * kind.itemsize).view(kind).reshape(shape)
    scales = aligned(tokens * groups.groups * 4).view(np.float32).reshape(tokens, 1, groups.groups)
    scales[...] = np.arange(tokens * groups.groups).reshape(scales.shape)
    table = np.random.default_rng(1).permutation(64).reshape(1, 64).astype(np.uint32)
    with machine(mode="check") as log:
        layer = made.Cache(**tensors, page_table=table, lengths=np.zeros(1, np.uint32))[0]
        made.store_scales(layer, scales, np.array([0, tokens], np.uint32))
    (launched,) = log.launches
    counted, minimum = launched.counters.per_buffer, tokens * groups.groups * 4 // 32
    assert counted["new_scales"].load_sectors == minimum
    assert sum(x.store_sectors for x in counted.values()) == minimum
