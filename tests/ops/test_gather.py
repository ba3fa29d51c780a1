"""gather against the oracle: every byte, and MAX's own example."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import KernelSet, Latent, Paged, Quant, Ring, ops
from kvgen.layout.dtypes import dtype
from kvgen.reference.gather import Runs, gather
from kvgen.runtime.cpu import machine
from tests.support.batches import PLAIN, batches
from tests.support.harness import check_gather, index_name, offsets_of, package
from tests.support.raw_rows import STORED, check_gather_raw
from tests.support.scenes import Scene
from tests.support.sets import RUN, SETS, having


@pytest.mark.parametrize("name", RUN)
@settings(max_examples=4)
@given(data=st.data())
def test_gather(name: str, data: Any) -> None:
    """Any piece of any request; the cache may hold NaN and infinity of its own, which are copied like the rest."""
    kernels, batch = SETS[name], data.draw(batches(SETS[name]))
    scene = Scene(kernels, batch, batch.totals)
    scene.fill(batch.totals)
    first = [scene.view.first_token(n) for n in batch.totals]
    starts = [int(scene.rng.integers(f, n + 1)) for f, n in zip(first, batch.totals, strict=True)]
    whole = data.draw(st.booleans()) and not any(first)
    if whole:
        starts = [0] * len(starts)
    counts = [n - s for s, n in zip(starts, batch.totals, strict=True)]
    index = index_name(kernels, "gather")
    check_gather(
        scene,
        batch.leading + sum(counts) + batch.padding,
        row_offsets=offsets_of(counts, index, batch.leading),
        starts=None if whole else np.array(starts, dtype(index).numpy()),
    )


RUNS = {
    s.name: s
    for s in (
        KernelSet(
            name="runs_fp8",
            q_heads=2,
            cache=Latent(dtype="bf16", latent_dim=32, rope_dim=8, page_size=8, quant=Quant(dtype="e4m3", scale_dtype="f32")),
            ops=[ops.Gather(rows="runs")],
        ),
        KernelSet(
            name="runs_ring",
            q_heads=2,
            cache=Paged(dtype="f16", kv_heads=2, head_dim=16, page_size=4, table=Ring(window=10)),
            ops=[ops.Gather(rows="runs", index_dtype="i64")],
        ),
    )
}  # fmt: skip


def runs_of(counts: list[int], gaps: list[int], kind: str) -> Runs:
    """So many rows a request, each behind a gap."""
    begins = np.cumsum([g + c for g, c in zip(gaps, [0, *counts], strict=False)])[: len(counts)]
    return Runs(begins.astype(dtype(kind).numpy()), np.array(counts, dtype(kind).numpy()))


@pytest.mark.parametrize("name", RUNS)
@settings(max_examples=6)
@given(data=st.data())
def test_runs(name: str, data: Any) -> None:
    """Requests' rows with gaps between them, which keep what they had."""
    kernels, batch = RUNS[name], data.draw(batches(RUNS[name]))
    scene = Scene(kernels, batch, batch.totals)
    scene.fill(batch.totals)
    starts = [int(scene.rng.integers(scene.view.first_token(n), n + 1)) for n in batch.totals]
    counts = [n - s for s, n in zip(starts, batch.totals, strict=True)]
    gaps = [data.draw(st.integers(0, 3)) for _ in range(len(counts) + 1)]
    index = index_name(kernels, "gather")
    runs = runs_of(counts, gaps, index)
    rows = int(runs.begins[-1]) + counts[-1] + gaps[-1] if counts else 2
    check_gather(scene, rows, row_offsets=runs, starts=np.array(starts, dtype(index).numpy()))


@pytest.mark.parametrize(
    ("begins", "counts"),
    [
        ((0, 5, 9), (5, 5, 2)),  # into the next run
        ((0, 9, 5), (3, 3, 3)),  # not ascending
        ((0, 0, 8), (4, 3, 2)),  # one over another
        ((0, 5, 9), (4, -1, 2)),
        ((-1, 5, 9), (4, 3, 2)),
        ((0, 5, 2**31 - 1), (4, 3, 2**31 - 1)),
        ((0, 5, 9), (4, 3, 4)),  # past the rows
        ((13, 14, 15), (1, 1, 1)),
    ],
)
def test_bad_runs(begins: tuple[int, ...], counts: tuple[int, ...]) -> None:
    """Rows of runs that contradict each other stay as they are, and are reported; what lies beside them is right."""
    batch = replace(PLAIN, totals=(5, 9, 7), new=(5, 9, 7), errors=True, seed=4)
    scene = Scene(RUNS["runs_fp8"], batch, batch.totals)
    scene.fill(batch.totals)
    kind = dtype(index_name(RUNS["runs_fp8"], "gather")).numpy()
    runs = Runs(*(np.array(x, np.int64).astype(kind) for x in (begins, counts)))
    check_gather(scene, 12, row_offsets=runs, starts=None)


def test_two_caches_fill_one_buffer() -> None:
    """Entries of a cache at a rate first, the last tokens of another behind them, as prefills of DeepSeek V4 read them."""
    sizes: dict[str, Any] = {"dtype": "bf16", "latent_dim": 24, "rope_dim": 8, "page_size": 4}
    made = {
        name: KernelSet(name=f"runs_{name}", q_heads=2, cache=Latent(**sizes, **more), ops=[ops.Gather(rows="runs")])
        for name, more in {"entries": {"rate": 4}, "window": {"quant": Quant(dtype="e4m3", scale_dtype="f32")}}.items()
    }
    totals, window, room = (23, 4, 9), 6, 12
    batch = replace(PLAIN, totals=totals, new=totals, seed=8)
    begins = np.arange(3) * room
    entries, tokens = (np.array(x) for x in ([n // 4 for n in totals], [min(n, window) for n in totals]))
    buffer = np.zeros((3 * room, 1, 32), dtype("bf16").numpy())
    wanted = buffer.copy()
    for name, first, count, starts in (
        ("entries", begins, entries, 0 * entries),
        ("window", begins + entries, tokens, np.array(totals) - tokens),
    ):
        scene = Scene(made[name], batch, totals)
        scene.fill(totals)
        runs = Runs(first.astype(np.int32), count.astype(np.int32))
        wanted = gather(scene.view, scene.rows(), [wanted], row_offsets=runs, starts=starts).outputs[0]
        cache = package(made[name]).Cache(**scene.arguments())[scene.layer]
        with machine(mode="check"):
            package(made[name]).gather(cache, runs.begins, runs.counts, buffer, starts=starts.astype(np.int32))
    np.testing.assert_array_equal(buffer.view(np.uint16), wanted.view(np.uint16))
    taken = (wanted != 0).any(axis=(1, 2)).reshape(3, room)
    assert [row.sum() for row in taken] == [int(e + t) for e, t in zip(entries, tokens, strict=True)]


def test_max_example() -> None:
    """MAX's own: a pool [4, 2, 3, 2, 2, 4] of its flat index; K of layer 1, block 1, token 0, head 1, dim 2 is 118."""
    pool = np.arange(4 * 2 * 3 * 2 * 2 * 4, dtype=np.float32).reshape(4, 2, 3, 2, 2, 4)
    generated = package("max_f32")
    cache = generated.Cache(pool, lengths=np.array([2], np.int32), page_table=np.array([[1]], np.int32))
    k, v = (np.zeros((2, 2, 4), np.float32) for _ in range(2))
    with machine(mode="check"):
        generated.gather(cache[1], k_out=k, v_out=v, row_offsets=np.array([0, 2], np.int32))
    assert k[0, 1, 2] == 118
    np.testing.assert_array_equal(k, pool[1, 0, 1])
    np.testing.assert_array_equal(v, pool[1, 1, 1])


def test_empty_batch_and_no_rows() -> None:
    """Neither launches anything that could touch memory."""
    batch, kernels = replace(PLAIN, padding=2), SETS["max_f32"]
    check_gather(Scene(kernels, batch, ()), 2, row_offsets=np.zeros(1, np.int32), starts=None)
    check_gather(Scene(kernels, batch, ()), 0, row_offsets=np.zeros(1, np.int32), starts=None)


@pytest.mark.parametrize("name", having(STORED, "gather_raw"))
@settings(max_examples=3)
@given(data=st.data())
def test_raw(name: str, data: Any) -> None:
    """Codes, scales and plain values as they lie in memory; in a ring also tokens that it no longer or not yet holds."""
    kernels, batch = STORED[name], data.draw(batches(STORED[name]))
    scene = Scene(kernels, batch, batch.totals)
    scene.fill(batch.totals)
    starts = [data.draw(st.integers(0, n)) for n in batch.totals]
    counts = [n - s for s, n in zip(starts, batch.totals, strict=True)]
    index = index_name(kernels, "gather_raw")
    check_gather_raw(
        scene,
        batch.leading + sum(counts) + batch.padding,
        row_offsets=offsets_of(counts, index, batch.leading),
        starts=np.array(starts, dtype(index).numpy()),
    )


@pytest.mark.parametrize("value", [-1, 2**31 - 1, None])
@pytest.mark.parametrize("name", ["stored_int8_own_table", "stored_latent_row", "stored_per_kv"])
def test_raw_of_bad_pages(name: str, value: int | None) -> None:
    """Rows without a valid page have NaN scales, codes of ones, and are reported."""
    batch = replace(PLAIN, totals=(3, 9, 2), new=(3, 9, 2), seed=9)
    scene = Scene(STORED[name], batch, batch.totals)
    scene.fill(batch.totals)
    table = scene.tables["page_table"]
    table[1] = np.array(scene.pages if value is None else value, np.int64).astype(table.dtype)
    offsets = offsets_of(batch.totals, index_name(STORED[name], "gather_raw"))
    found = check_gather_raw(scene, 14, row_offsets=offsets, starts=None)
    for key, array in found.items():
        if key.endswith("_codes"):
            assert (array[3:12] == 0xFF).all()
        else:
            assert np.isnan(array[3:12].astype(np.float32)).all()
