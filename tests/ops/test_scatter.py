"""scatter against the oracle: the whole pool, byte for byte; and back and forth with gather."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import KernelSet, Ring, ops, presets
from kvgen.layout.dtypes import dtype
from kvgen.runtime import Fault, describe
from kvgen.runtime.cpu import machine
from tests.support.batches import PLAIN, Batch, batches
from tests.support.cache_matrix import CHOSEN
from tests.support.harness import index_name, new_rows, offsets_of, package
from tests.support.raw_rows import STORED, check_gather_raw, check_scatter, random_stored, starts_of
from tests.support.scenes import Scene
from tests.support.sets import having


def drawn(data: Any, name: str) -> tuple[Batch, list[int], list[int]]:
    """A batch whose requests share no page, the first token that is stored of each, and how many."""
    batch = replace(data.draw(batches(STORED[name])), shared=False)
    starts = [data.draw(st.integers(0, n)) for n in batch.totals]
    return batch, starts, [n - s for s, n in zip(starts, batch.totals, strict=True)]


@pytest.mark.parametrize("name", having(STORED, "scatter"))
@settings(max_examples=3)
@given(data=st.data())
def test_values(name: str, data: Any) -> None:
    """Any run of tokens of any request, quantized as append quantizes; in a ring the older ones go nowhere."""
    batch, starts, counts = drawn(data, name)
    scene, index = Scene(STORED[name], batch, batch.totals), index_name(STORED[name], "scatter")
    whole = not any(starts) and data.draw(st.booleans())
    offsets = offsets_of(counts, index, batch.leading)
    rows = new_rows(scene, batch.leading + sum(counts) + batch.padding)
    given_starts = None if whole else starts_of(scene, index, starts)
    check_scatter(scene, rows, row_offsets=offsets, starts=given_starts, raw=False)


@pytest.mark.parametrize("name", having(STORED, "scatter_raw"))
@settings(max_examples=3)
@given(data=st.data())
def test_raw(name: str, data: Any) -> None:
    """Any bits go where they belong, and come back the same."""
    batch, starts, counts = drawn(data, name)
    scene, index = Scene(STORED[name], batch, batch.totals), index_name(STORED[name], "scatter_raw")
    offsets = offsets_of(counts, index, batch.leading)
    rows = batch.leading + sum(counts) + batch.padding
    places: dict[str, Any] = {"row_offsets": offsets, "starts": starts_of(scene, index, starts)}
    new = random_stored(scene, rows)
    check_scatter(scene, new, raw=True, **places)
    if not isinstance(scene.cache.page_table, Ring):
        back = check_gather_raw(scene, rows, **places)
        mine = slice(batch.leading, batch.leading + sum(counts))
        for key, array in back.items():
            assert np.ascontiguousarray(array[mine]).tobytes() == np.ascontiguousarray(new[key][mine]).tobytes()


@pytest.mark.parametrize("name", having(STORED, "scatter_raw"))
def test_there_and_back(name: str) -> None:
    """What gather with raw takes out of a cache, scatter puts back: not a byte of the pool changes."""
    batch = replace(PLAIN, totals=(5, 3, 1), new=(0, 0, 0), padding=1, seed=3)
    scene = Scene(STORED[name], batch, batch.totals)
    scene.fill(batch.totals)
    index = index_name(STORED[name], "scatter_raw")
    places: dict[str, Any] = {"row_offsets": offsets_of(batch.totals, index), "starts": None}
    found = check_gather_raw(scene, 10, **places)
    before = scene.snapshot()
    check_scatter(scene, found, raw=True, **places)
    assert all((a == b).all() for n in before for a, b in zip(before[n], scene.snapshot()[n], strict=True))


@pytest.mark.parametrize("value", [-1, 2**31 - 1, None])
@pytest.mark.parametrize("name", ["stored_int8_own_table", "stored_per_kv"])
def test_bad_pages(name: str, value: int | None) -> None:
    """A request without a valid page is skipped and named; the others are stored."""
    batch = replace(PLAIN, totals=(3, 9, 2), new=(3, 9, 2), seed=9)
    for raw in (False, True):
        scene = Scene(STORED[name], batch, batch.totals)
        table = scene.tables["page_table"]
        table[1] = np.array(scene.pages if value is None else value, np.int64).astype(table.dtype)
        index = index_name(STORED[name], "scatter")
        rows = random_stored(scene, 14) if raw else new_rows(scene, 14)
        word = check_scatter(scene, rows, row_offsets=offsets_of(batch.totals, index), starts=None, raw=raw)
        report = describe(word)
        assert report is not None and report.request == 1 and report.code is Fault.PAGE_ID


@pytest.mark.parametrize(
    ("at", "value", "start"),
    [(2, 0, 0), (-1, 90, 0), (-1, 1, 0), (1, 2**32 - 1, 0), (0, 0, -1), (0, 0, 2**31 - 1), (0, 0, 60)],
)
def test_bad_offsets_and_starts(at: int, value: int, start: int) -> None:
    """Rows whose offsets contradict, and tokens that no table holds, go nowhere and are reported."""
    name = "stored_ring" if start else "stored_kv_inside"
    batch = replace(PLAIN, totals=(4, 5, 3), new=(4, 5, 3), seed=2)
    scene = Scene(STORED[name], batch, batch.totals)
    index = index_name(STORED[name], "scatter")
    offsets = offsets_of((3, 3, 3), index)
    offsets[at] = np.array(value, np.int64).astype(offsets.dtype)
    starts = starts_of(scene, index, [0, start, 1])
    for raw in (False, True):
        rows = random_stored(scene, 9) if raw else new_rows(scene, 9)
        assert describe(check_scatter(scene, rows, row_offsets=offsets, starts=starts, raw=raw)) is not None


def test_refusals() -> None:
    """Keys that are quantized in groups of tokens are for seal and append."""
    for op in (ops.Scatter(), ops.Scatter(raw=True), ops.Gather(raw=True)):
        with pytest.raises(ValueError, match="residual=8"):
            KernelSet(name="x", q_heads=2, cache=CHOSEN["kivi"], ops=(op,))


TOKENS = 4096
BULK = {
    "scatter_bulk": presets.max_paged(dtype="bf16", kv_heads=4, head_dim=128, page_size=64),
    # Tokens lie between the dims of a head: V's side by side, K's in pieces of 16 bytes.
    "scatter_bulk_xpacked": presets.vllm_xpacked(dtype="bf16", kv_heads=4, head_dim=128, page_size=16),
}


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("scatter_bulk", "scatter"),
        ("scatter_bulk", "scatter_raw"),
        ("scatter_bulk", "gather_raw"),
        ("scatter_bulk_xpacked", "scatter"),
        ("scatter_bulk_xpacked", "scatter_raw"),
    ],
)
def test_no_sector_is_moved_twice(name: str, op: str) -> None:
    """4096 tokens, one launch: sectors moved are those that the rows consist of."""
    cache = BULK[name]
    found = (ops.Scatter(), ops.Scatter(name="scatter_raw", raw=True), ops.Gather(name="gather_raw", raw=True))
    kernels = KernelSet(name=name, q_heads=4, cache=cache, ops=found, arch=("sm_90a",))
    batch = replace(PLAIN, totals=(TOKENS,), new=(0,))
    scene = Scene(kernels, batch, batch.totals)
    rows = new_rows(scene, TOKENS)
    errors, offsets = np.zeros(1, np.uint64), np.array([0, TOKENS], dtype(index_name(kernels, op)).numpy())
    generated = package(kernels)
    named = {f"{n}_out" if op == "gather_raw" else n: array for n, array in rows.items()}
    with machine(arch="sm_90a", mode="check") as log:
        getattr(generated, op)(
            generated.Cache(**scene.arguments())[scene.layer], **named, row_offsets=offsets, errors=errors
        )
    assert describe(errors) is None
    (launched,) = log.launches
    minimum = 2 * TOKENS * 4 * 128 * 2 // 32
    traffic = launched.counters.per_buffer
    pools = [c for n, c in traffic.items() if "pool" in n]
    given_rows = [c for n, c in traffic.items() if n in named]
    out = op == "gather_raw"
    inside = sum(c.load_sectors if out else c.store_sectors for c in pools)
    outside = sum(c.store_sectors if out else c.load_sectors for c in given_rows)
    assert minimum <= inside <= 1.02 * minimum
    # Raw rows are read in the order in which they are written.
    assert minimum <= outside and (outside <= 1.02 * minimum or (name, op) == ("scatter_bulk_xpacked", "scatter_raw"))
