"""mla_decompress against the oracle, chunk after chunk of a plan: every byte, padding, faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import KernelSet, Latent, Layout, ops, presets
from kvgen.layout.dtypes import dtype
from kvgen.reference import Gathered, mla_decompress, mla_plan
from kvgen.runtime import Fault, describe
from kvgen.runtime.cpu import machine
from tests.support.batches import PLAIN, Batch, batches
from tests.support.cache_matrix import CHOSEN, chosen
from tests.support.harness import Run, hold_memory, index_name, launcher, package, surroundings
from tests.support.memory import CANARY, Raw, rows_array
from tests.support.scenes import Scene
from tests.support.step_lengths import scene_of

OPS = (ops.MlaDecompress(), ops.MlaDecompress(name="whole", rope=True, alignment=1, index_dtype="i32"))
SETS = chosen("chunk", lambda cache: OPS, ("latent", "latent_row", "latent_pool")) | {
    # The RoPE part in a tensor of its own, CSR, lengths that count the step.
    "chunk_apart": KernelSet(
        name="chunk_apart", q_heads=2, cache=presets.flashinfer_mla(latent_dim=64, rope_dim=16, page_size=8), ops=OPS
    ),
    # Rows of odd dims, all of them one segment.
    "chunk_odd": KernelSet(
        name="chunk_odd",
        q_heads=1,
        cache=Latent(dtype="f16", latent_dim=20, rope_dim=6, page_size=3, layout=Layout(k="layer page token head dim")),
        ops=OPS,
    ),
}
SIZES = {"mla_decompress": 2, "whole": 3}  # pages of a buffer, and for packed keys a token less


def parts(kernels: KernelSet, op: str) -> tuple[int, int, int]:
    """(rows of a buffer, alignment, dims of a row) of an operation's test."""
    cache = kernels.cache
    assert isinstance(cache, Latent)
    whole = op == "whole"
    size = SIZES[op] * cache.page_size - whole
    return size, 1 if whole else cache.page_size, cache.head_dim if whole else cache.latent_dim


def check(
    scene: Scene, op: str, rows: int, row_offsets: Raw, buffer_row_offsets: Raw, cache_offsets: Raw
) -> tuple[Raw, Gathered]:
    """One chunk: every byte, those around and between the rows too."""
    _, alignment, dims = parts(scene.kernels, op)
    out, around = rows_array(rows, (dims,), scene.cache.dtype, strided=scene.batch.strided)
    steps = {} if scene.cache.lengths == "after" else {"row_offsets": row_offsets}
    where: dict[str, Any] = {"buffer_row_offsets": buffer_row_offsets, "cache_offsets": cache_offsets, **steps}
    wanted = mla_decompress(scene.view, scene.rows(), out, alignment, **where)
    pool = scene.snapshot()
    run = Run(scene, op, launcher(scene, op), k_latent=out, **where)
    assert np.isnan(out[wanted.failed].astype(np.float32)).all()
    found, bits = (np.ascontiguousarray(x[~wanted.failed]).tobytes() for x in (out, wanted.outputs[0]))
    assert found == bits
    assert (surroundings(out, around) == CANARY).all(), "written beside the rows"
    hold_memory(scene, pool)
    run.expect_word(wanted.errors)
    return out, wanted


def scene_for(kernels: KernelSet, batch: Batch) -> tuple[Scene, Raw]:
    """A filled scene before the step's lengths are counted, and the step's offsets by index type."""
    scene = scene_of(kernels, batch)
    scene.fill(batch.totals)
    return scene, np.cumsum([batch.leading, *batch.new])


@pytest.mark.parametrize("op", [o.name for o in OPS])
@pytest.mark.parametrize("name", SETS)
@settings(max_examples=3)
@given(data=st.data())
def test_chunks(name: str, op: str, data: Any) -> None:
    """All chunks of a plan; what pads a request's last page is 0, though NaN and garbage lie there."""
    kernels = SETS[name]
    batch = data.draw(batches(kernels))
    scene, counted = scene_for(kernels, batch)
    kind = dtype(index_name(kernels, op)).numpy()
    offsets = counted.astype(kind)
    size, alignment, dims = parts(kernels, op)
    chunks = 1 + sum(-(-n // alignment) * alignment for n in batch.totals) // size
    plan = mla_plan(scene.view, chunks, size, alignment, kind, None if scene.cache.lengths == "after" else offsets)
    met = []
    for rows, begins in zip(plan.buffer_row_offsets, plan.cache_offsets, strict=True):
        out, wanted = check(scene, op, size, offsets, rows, begins)
        assert describe(wanted.errors) is None and not wanted.failed.any()
        met += list(out[: rows[-1]])
    rest = iter(met)
    for b, n in enumerate(batch.totals):
        for t in range(-(-n // alignment) * alignment):
            row = next(rest)
            if t >= n:
                assert not row.astype(np.float32).any()
                continue
            places = scene.view.places(b, t // scene.tokens)
            assert isinstance(places, tuple)
            assert row.tobytes() == scene.rows()[0].token(b, t, places[0])[0, :dims].tobytes()


VICTIMS: dict[str, tuple[Fault, bool]] = {
    "minus_one": (Fault.PAGE_ID, True),
    "huge": (Fault.PAGE_ID, True),
    "count": (Fault.PAGE_ID, True),
    "length": (Fault.LENGTH, True),
    "begin": (Fault.LENGTH, True),
    "past": (Fault.POSITION, True),
    "last": (Fault.POSITION, True),  # the last run that ends where tokens can be counted
    "decrease": (Fault.ROW_OFFSETS, False),
    "too_many": (Fault.ROW_OFFSETS, False),
}


@pytest.mark.parametrize("label", VICTIMS)
@pytest.mark.parametrize("name", ["chunk_latent", "chunk_latent_row"])
def test_bad_data(name: str, label: str) -> None:
    """The victim's rows become NaN, or, where nobody knows whose they are, stay; it is reported, the others get theirs."""
    kernels = SETS[name]
    batch = replace(PLAIN, totals=(5, 9, 4), new=(1, 1, 1), seed=3)
    scene, counted = scene_for(kernels, batch)
    index = dtype(kernels.cache.lengths_dtype).numpy()
    begins, rows = np.zeros(3, index), np.array([0, 5, 14, 18], index)
    good, _ = check(scene, "mla_decompress", 20, counted.astype(index), rows, begins)
    table, lengths = scene.tables["page_table"], scene.tables["lengths"]
    ids = {"minus_one": -1, "huge": 2**31 - 1, "count": scene.pages}
    if label in ids:
        table[1] = np.array(ids[label], np.int64).astype(table.dtype)
    elif label == "length":
        lengths[1] = np.array(-1, np.int64).astype(lengths.dtype)
    elif label in ("begin", "past", "last"):
        last = min(2**32 - 2 - 9, np.iinfo(index).max)
        begins[1] = np.array({"begin": -3, "past": 16, "last": last}[label], np.int64).astype(index)
    else:
        rows[2 if label == "decrease" else 3] = 3 if label == "decrease" else 21
    out, wanted = check(scene, "mla_decompress", 20, counted.astype(index), rows, begins)
    fault, failed = VICTIMS[label]
    report = describe(wanted.errors)
    assert report is not None and report.code is fault
    if failed:
        assert report.request == 1 and wanted.failed.tolist() == [5 <= i < 14 for i in range(20)]
        for part in (slice(0, 5), slice(14, 18)):
            assert out[part].tobytes() == good[part].tobytes()


def test_one_block_reports_a_bad_total() -> None:
    """A last offset of 0 makes every row padding: only the total says that something is wrong."""
    scene, counted = scene_for(SETS["chunk_latent"], replace(PLAIN, totals=(3, 1), new=(0, 0)))
    index = dtype(scene.cache.lengths_dtype).numpy()
    rows, begins = np.array([0, 3, 0], index), np.zeros(2, index)
    _, wanted = check(scene, "mla_decompress", 4, counted.astype(index), rows, begins)
    report = describe(wanted.errors)
    assert report is not None and (report.code, report.request) == (Fault.ROW_OFFSETS, 1)


def test_nobody() -> None:
    """No requests, and no rows."""
    scene = scene_of(SETS["chunk_latent"], PLAIN)
    nothing = np.zeros(1, np.uint32)
    for rows in (0, 3):
        check(scene, "mla_decompress", rows, nothing, nothing, np.zeros(0, np.uint32))


BULK = KernelSet(
    name="chunk_bulk",
    q_heads=16,
    cache=presets.max_mla(page_size=64),
    ops=(ops.MlaDecompress(), ops.MlaDecompress(name="whole", rope=True)),
)


@pytest.mark.parametrize(("op", "dims"), [("mla_decompress", 512), ("whole", 576)])
def test_no_sector_is_moved_twice(op: str, dims: int) -> None:
    """4096 latent rows of two requests in one launch: whole sectors, once."""
    batch = replace(PLAIN, totals=(3072, 1024), new=(0, 0))
    scene = Scene(BULK, batch, batch.totals)
    out, _ = rows_array(4096, (dims,), "bf16", strided=False)
    errors = np.zeros(1, np.uint64)
    with machine(mode="check") as log:
        getattr(package(BULK), op)(
            package(BULK).Cache(**scene.arguments())[scene.layer],
            k_latent=out,
            buffer_row_offsets=np.array([0, 3072, 4096], np.uint32),
            cache_offsets=np.zeros(2, np.uint32),
            row_offsets=np.zeros(3, np.uint32),
            errors=errors,
        )
    assert describe(errors) is None
    (launched,) = log.launches
    minimum, traffic = 4096 * dims * 2 // 32, launched.counters.per_buffer
    assert minimum <= traffic["pool"].load_sectors <= 1.02 * minimum
    assert minimum <= traffic["k_latent"].store_sectors <= 1.02 * minimum


def test_other_caches() -> None:
    with pytest.raises(ValueError, match="got mla_decompress with Paged"):
        KernelSet(name="x", q_heads=2, cache=CHOSEN["k_only"], ops=OPS)
