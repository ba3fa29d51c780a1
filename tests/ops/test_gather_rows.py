"""gather_rows against the oracle: every byte, holes, faults, and MAX's own case."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import KernelSet, Ring, ops, presets
from kvgen.layout.dtypes import dtype
from kvgen.reference import gather_rows
from kvgen.runtime import Fault, describe
from kvgen.runtime.cpu import machine
from tests.support.batches import PLAIN, batches
from tests.support.cache_matrix import CHOSEN, FEW_BITS, chosen
from tests.support.harness import Run, hold_memory, index_name, launcher, offsets_of, package, surroundings
from tests.support.memory import CANARY, Raw, rows_array
from tests.support.scenes import Scene

SETS = chosen(
    "rows",
    lambda cache: [ops.GatherRows(roles="kv" if cache.stores == "kv" else "k")],
    ("hnd", "latent", "latent_row", "ring", "int4_in_page", "kivi", *FEW_BITS),
) | {
    "rows_mla": KernelSet(
        name="rows_mla", q_heads=16, cache=presets.max_mla(page_size=16), ops=(ops.GatherRows(slots_dtype="i64"),)
    )
}


def check(scene: Scene, slots: Raw, row_offsets: Raw) -> tuple[list[Raw], Any]:
    """Gather rows and compare every byte, those around and between the outputs' rows too."""
    outs, memory = {}, []
    for name, role in zip(("k_out", "v_out"), scene.rows(), strict=False):
        shape = (slots.shape[1], role.heads, role.dim)
        outs[name], around = rows_array(len(slots), shape, scene.cache.dtype, strided=scene.batch.strided)
        memory.append(around)
    wanted = gather_rows(scene.view, scene.rows(), list(outs.values()), row_offsets=row_offsets, slots=slots)
    pool = scene.snapshot()
    run = Run(scene, "gather_rows", launcher(scene, "gather_rows"), **outs, row_offsets=row_offsets, slots=slots)
    for out, right, around in zip(outs.values(), wanted.outputs, memory, strict=True):
        assert np.isnan(out[wanted.failed].astype(np.float32)).all()
        found, bits = (np.ascontiguousarray(x[~wanted.failed]).tobytes() for x in (out, right))
        assert found == bits
        assert (surroundings(out, around) == CANARY).all(), "written beside the rows"
    hold_memory(scene, pool)
    run.expect_word(wanted.errors)
    return list(outs.values()), wanted


@pytest.mark.parametrize("name", SETS)
@settings(max_examples=4)
@given(data=st.data())
def test_rows(name: str, data: Any) -> None:
    """Any tokens, in any order and repeated; holes; query rows of no request."""
    kernels, batch = SETS[name], data.draw(batches(SETS[name]))
    scene = Scene(kernels, batch, batch.totals)
    scene.fill(batch.totals)
    counts = [data.draw(st.integers(0, 2)) for _ in batch.totals]
    rows, width = batch.leading + sum(counts) + batch.padding, data.draw(st.integers(0, 5))
    slots = np.full((rows, width), 2**31 - 1, np.int64)
    row = batch.leading
    for n, count in zip(batch.totals, counts, strict=True):
        first = scene.view.first_token(n)
        slots[row : row + count] = scene.rng.integers(first, max(n, first + 1), (count, width))
        row += count
    slots[scene.rng.random(slots.shape) < 0.2] = -1
    if isinstance(scene.cache.page_table, Ring) or 0 in batch.totals:
        slots = np.where(scene.rng.random(slots.shape) < 0.1, 2, slots)
    kind = dtype(next(op.slots_dtype for op in kernels.ops if isinstance(op, ops.GatherRows))).numpy()
    check(scene, slots.astype(kind), offsets_of(counts, index_name(kernels, "gather_rows"), batch.leading))


@pytest.mark.parametrize(
    ("slot", "page"), [(2**31 - 1, None), (-(2**31), None), (1000, None), (2, -1), (2, 2**31 - 1), (2, "count")]
)
@pytest.mark.parametrize("name", ["rows_hnd", "rows_latent_row"])
def test_bad_slots_and_pages(name: str, slot: int, page: Any) -> None:
    """Past the table, and pages that are none: NaN and a report of the request; the others get their rows."""
    batch = replace(PLAIN, totals=(5, 9, 4), new=(0, 0, 0), seed=4)
    scene = Scene(SETS[name], batch, batch.totals)
    scene.fill(batch.totals)
    if page is not None:
        table = scene.tables["page_table"]
        table[1] = np.array(scene.pages if page == "count" else page, np.int64).astype(table.dtype)
    slots = np.array([[0, 4, -1], [1, slot, -1], [3, 0, 0]], np.int32)
    outs, wanted = check(scene, slots, offsets_of((1, 1, 1), index_name(SETS[name], "gather_rows")))
    report = describe(wanted.errors)
    if slot < 0 and page is None:
        assert report is None and not outs[0][1, 1].astype(np.float32).any()
    else:
        assert report is not None and report.request == 1 and not wanted.failed[[0, 2]].any()


@pytest.mark.parametrize(("at", "value"), [(2, 0), (-1, 90), (-1, 1), (1, 2**32 - 1), (0, 90)])
def test_bad_offsets(at: int, value: int) -> None:
    """Query rows whose offsets contradict are left alone and reported, however few slots a row has."""
    batch = replace(PLAIN, totals=(4, 5, 3), new=(0, 0, 0), seed=2)
    scene = Scene(SETS["rows_latent"], batch, batch.totals)
    scene.fill(batch.totals)
    offsets = offsets_of((3, 3, 3), "u32")
    offsets[at] = np.array(value, np.int64).astype(offsets.dtype)
    for slots in (2, 1):
        _, wanted = check(scene, np.ones((9, slots), np.int32), offsets)
        report = describe(wanted.errors)
        assert report is not None and report.code is Fault.ROW_OFFSETS


def test_v_where_there_is_none() -> None:
    with pytest.raises(ValueError, match="roles: got 'kv'"):
        KernelSet(name="x", q_heads=1, cache=CHOSEN["latent"], ops=(ops.GatherRows(roles="kv"),))


def test_no_sector_is_moved_twice() -> None:
    """2048 latent rows of 576: one launch, whole sectors."""
    kernels = SETS["rows_mla"]
    batch = replace(PLAIN, totals=(1024,), new=(0,))
    scene = Scene(kernels, batch, batch.totals)
    slots = scene.rng.permutation(1024).astype(np.int64).reshape(4, 256)
    out, _ = rows_array(4, (256, 1, 576), "bf16", strided=False)
    errors = np.zeros(1, np.uint64)
    generated = package(kernels)
    with machine(mode="check") as log:
        generated.gather_rows(
            generated.Cache(**scene.arguments())[scene.layer],
            row_offsets=np.array([0, 4], np.uint32),
            slots=slots,
            k_out=out,
            errors=errors,
        )
    assert describe(errors) is None
    (launched,) = log.launches
    minimum, traffic = 1024 * 576 * 2 // 32, launched.counters.per_buffer
    assert minimum <= traffic["pool"].load_sectors <= 1.02 * minimum
    assert minimum <= traffic["k_out"].store_sectors <= 1.02 * minimum
