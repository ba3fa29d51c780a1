"""mla_plan: every chunk against the oracle, and against what a reader makes of it; bad data reported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import CSR, KernelSet, Latent, Layout, ops
from kvgen.layout.dtypes import dtype
from kvgen.reference import Chunked, mla_plan
from kvgen.runtime import Fault, describe
from kvgen.runtime.cpu import machine
from tests.support.batches import PLAIN, batches
from tests.support.cache_matrix import CHOSEN
from tests.support.harness import index_name, offsets_of, package, surroundings
from tests.support.memory import CANARY, Raw, rows_array
from tests.support.scenes import Scene
from tests.support.step_lengths import go, hold, scene_of, vector

_AFTER = Latent(
    dtype="f32",
    latent_dim=8,
    rope_dim=4,
    page_size=3,
    layout=Layout(k="layer page token head dim"),
    table=CSR(id_multiplier=2),
    lengths="after",
    lengths_dtype="i64",
)
SETS = {
    kernels.name: kernels
    for kernels in (
        KernelSet(
            name="plan_latent",
            q_heads=2,
            cache=CHOSEN["latent"],
            ops=(
                ops.MlaPlan(buffer_token_size=32),
                ops.MlaPlan(name="packed", buffer_token_size=13, alignment=1, index_dtype="i32"),
            ),
        ),
        KernelSet(
            name="plan_after",
            q_heads=1,
            cache=_AFTER,
            ops=(
                ops.MlaPlan(buffer_token_size=12),
                ops.MlaPlan(name="packed", buffer_token_size=6, alignment=1, index_dtype="u32"),
            ),
        ),
    )
}
CASES = [(name, op) for name in SETS for op in ("mla_plan", "packed")]


def sizes_of(kernels: KernelSet, name: str) -> tuple[int, int]:
    """Rows of a buffer, and what requests are padded to."""
    op = next(o for o in kernels.ops if o.name == name)
    assert isinstance(op, ops.MlaPlan) and kernels.cache.page_tokens is not None
    return op.buffer_token_size, op.alignment or kernels.cache.page_tokens


def check(scene: Scene, name: str, chunks: int, offsets: Raw | None) -> Chunked:
    """A plan of so many chunks against the oracle, memory around it too."""
    requests, kind = len(scene.batch.totals), index_name(scene.kernels, name)
    size, alignment = sizes_of(scene.kernels, name)
    strided = scene.batch.strided
    rows, rows_around = rows_array(chunks, (requests + 1,), kind, strided=strided)
    begins, begins_around = rows_array(chunks, (requests,), kind, strided=strided)
    lengths = vector(chunks, "i32")
    steps = {} if scene.cache.lengths == "after" else {"row_offsets": offsets}
    wanted = mla_plan(scene.view, chunks, size, alignment, dtype(kind).numpy(), steps.get("row_offsets"))
    found = go(scene, name, buffer_row_offsets=rows, cache_offsets=begins, buffer_lengths=lengths[0], **steps)
    np.testing.assert_array_equal(rows, wanted.buffer_row_offsets)
    np.testing.assert_array_equal(begins, wanted.cache_offsets)
    hold(lengths, wanted.buffer_lengths)
    for array, around in ((rows, rows_around), (begins, begins_around)):
        assert (surroundings(array, around) == CANARY).all(), "written beside the plan"
    assert not scene.batch.errors or found == wanted.errors, f"{describe(found)}, not {describe(wanted.errors)}"
    return wanted


@pytest.mark.parametrize(("name", "op"), CASES)
@settings(max_examples=6)
@given(data=st.data())
def test_plan(name: str, op: str, data: Any) -> None:
    """As many chunks as needed, more, and too few; a reader of the plan meets every key once and in order."""
    kernels = SETS[name]
    batch = data.draw(batches(kernels))
    scene = scene_of(kernels, batch)
    size, alignment = sizes_of(kernels, op)
    padded = [-(-n // alignment) * alignment for n in batch.totals]
    needed = -(-sum(padded) // size)
    chunks = data.draw(st.sampled_from((needed, needed + 2, max(needed - 1, 0))))
    plan = check(scene, op, chunks, offsets_of(batch.new, index_name(kernels, op), batch.leading))
    assert (describe(plan.errors) is None) == (chunks >= needed)
    met: list[list[int]] = [[] for _ in padded]
    for row, begins, length in zip(plan.buffer_row_offsets, plan.cache_offsets, plan.buffer_lengths, strict=True):
        assert length in (row[-1], -1)
        for b, request in enumerate(met):
            request += range(int(begins[b]), int(begins[b]) + int(row[b + 1]) - int(row[b]))
    keys = [(b, k) for b, request in enumerate(met) for k in request]
    assert keys == [(b, k) for b, n in enumerate(padded) for k in range(n)][: chunks * size]


def test_modular_max_example() -> None:
    """Requests of 5, 0 and 30 tokens in pages of 16, buffers of 32: 16 rows, none, and 32 of which 16 come in chunk 1."""
    batch = replace(PLAIN, totals=(5, 0, 30), new=(5, 0, 2))
    scene = scene_of(SETS["plan_latent"], batch)
    plan = check(scene, "mla_plan", 3, offsets_of(batch.new, "u32"))
    assert plan.buffer_row_offsets.tolist() == [[0, 16, 16, 32], [0, 0, 0, 16], [0, 0, 0, 0]]
    assert plan.cache_offsets.tolist() == [[0, 0, 0], [16, 0, 16], [16, 0, 32]]
    assert plan.buffer_lengths.tolist() == [32, 16, -1]
    packed = check(scene, "packed", 3, offsets_of(batch.new, "i32"))
    assert packed.buffer_row_offsets.tolist() == [[0, 5, 5, 13], [0, 0, 0, 13], [0, 0, 0, 9]]
    assert packed.cache_offsets.tolist() == [[0, 0, 0], [5, 0, 8], [5, 0, 21]]
    assert packed.buffer_lengths.tolist() == [13, 13, 9]


def test_an_empty_batch_is_all_zeros() -> None:
    plan = check(scene_of(SETS["plan_latent"], PLAIN), "mla_plan", 3, np.zeros(1, np.uint32))
    assert plan.buffer_row_offsets.tolist() == [[0], [0], [0]] and plan.buffer_lengths.tolist() == [0, 0, 0]


@pytest.mark.parametrize(("requests", "chunks"), [(511, 2), (512, 400), (1100, 20)])
def test_many_requests_in_one_launch(requests: int, chunks: int) -> None:
    """Blocks that begin in the middle of the batch, and more chunks than a block's turn."""
    rng = np.random.default_rng(requests)
    scene = Scene(SETS["plan_latent"], replace(PLAIN, totals=(1,) * 2, new=(0,) * 2), (1, 1))
    scene.batch = replace(PLAIN, totals=(1,) * requests, new=(0,) * requests)
    lengths = rng.integers(0, 17, requests) * (
        rng.random(requests) < chunks / 700
    )  # the last chunks have the last requests
    scene.tables["lengths"] = lengths.astype(np.uint32)
    scene.tables["page_table"] = np.zeros((requests, 2), np.uint32)
    check(scene, "packed", chunks, np.zeros(requests + 1, np.int32))


def test_more_chunks_than_blocks() -> None:
    batch = replace(PLAIN, totals=(7, 12), new=(2, 3))
    check(scene_of(SETS["plan_latent"], batch), "packed", 1030, offsets_of(batch.new, "i32"))


BATCH = replace(PLAIN, totals=(7, 12, 5), new=(2, 3, 1))


@pytest.mark.parametrize("value", [-1, -2, 2**31 - 1, 2**32 - 4, 33])
@pytest.mark.parametrize(("name", "op"), CASES)
def test_bad_lengths(name: str, op: str, value: int) -> None:
    """Lengths that cannot be, and those that the table has no pages for: no keys, and nobody else's change."""
    kernels = SETS[name]
    scene = scene_of(kernels, BATCH)
    lengths = scene.tables["lengths"] = scene.tables["lengths"].copy()
    lengths[1] = np.array(value, np.int64).astype(lengths.dtype)
    scene.trim(1)
    plan = check(scene, op, 6, offsets_of(BATCH.new, index_name(kernels, op)))
    report = describe(plan.errors)
    assert report is not None and (report.code, report.request) == (Fault.LENGTH, 1)
    assert (np.diff(plan.buffer_row_offsets[:, 1:3]) == 0).all()


@pytest.mark.parametrize(("at", "value"), [(2, 0), (0, 90), (1, 6), (3, 4), (2, -1)])
def test_bad_offsets(at: int, value: int) -> None:
    offsets = offsets_of(BATCH.new, "u32")
    offsets[at] = np.array(value, np.int64).astype(np.uint32)
    plan = check(scene_of(SETS["plan_latent"], BATCH), "mla_plan", 3, offsets)
    report = describe(plan.errors)
    assert report is not None and report.code is Fault.ROW_OFFSETS


def test_no_chunks_at_all() -> None:
    """The first key has no place."""
    report = describe(check(scene_of(SETS["plan_latent"], BATCH), "mla_plan", 0, offsets_of(BATCH.new, "u32")).errors)
    assert report is not None and (report.code, report.request, report.position) == (Fault.POSITION, 0, 0)


def test_one_launch_for_a_step() -> None:
    scene = scene_of(SETS["plan_latent"], BATCH)
    with machine(mode="check") as log:
        package(scene.kernels).mla_plan(
            package(scene.kernels).Cache(**scene.arguments())[0],
            buffer_row_offsets=np.zeros((2, 4), np.uint32),
            cache_offsets=np.zeros((2, 3), np.uint32),
            buffer_lengths=np.zeros(2, np.int32),
            row_offsets=offsets_of(BATCH.new, "u32"),
        )
    assert len(log.launches) == 1
