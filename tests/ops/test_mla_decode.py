"""mla_decode against the oracle in float64, by FlashAttention 3's rule; hostile data; poisoned memory; its traffic."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import presets
from kvgen.architectures import architecture
from kvgen.codegen.emit import render_set
from kvgen.layout.dtypes import dtype
from kvgen.lowering.attention.mla_mma import MlaMma
from kvgen.runtime.cpu import machine
from kvgen.schema.loader import LoadedSet
from tests.support.batches import PLAIN, Batch
from tests.support.harness import offsets_of, optimized, package
from tests.support.latent_steps import (
    SETS,
    SPARSE,
    SPLIT,
    Rows,
    call,
    hold_hostile,
    latent_scene,
    latent_set,
    op_of,
    steps,
)
from tests.support.memory import aligned
from tests.support.scenes import Scene
from tests.support.sets import archs_of


def some(name: str) -> Batch:
    return replace(PLAIN, arch=archs_of((SETS | SPLIT | SPARSE)[name])[0])


# Sets whose kernels others of these sets, or of tests/ops/test_mla_records.py, have at other sizes: a campaign's.
CAMPAIGN = "KVGEN_FAMILY" in os.environ
ALIKE = ("mla_plain", "mla_two_pools", "mla_balanced_rows", "mla_sparse_plain")


def fewer(names: Iterable[str]) -> list[str]:
    """The names that this run has."""
    return [name for name in names if CAMPAIGN or name not in ALIKE]


@pytest.mark.parametrize("name", fewer([*SETS, *SPLIT]))
@settings(max_examples=2)
@given(data=st.data())
def test_a_step(name: str, data: Any) -> None:
    """Ragged rows or as many each; pages without a token, and what comes after the last token, hold NaN or infinity."""
    batch, rows, total, ragged = data.draw(steps((SETS | SPLIT)[name]))
    scene, q = latent_scene((SETS | SPLIT)[name], batch, rows, total)
    offsets = offsets_of([r.end - r.begin for r in rows], scene.cache.lengths_dtype, batch.leading) if ragged else None
    call(scene, q, row_offsets=offsets, lse=data.draw(st.booleans()))


@pytest.mark.parametrize("name", ["mla_rate", "mla_invariant_rate"])
def test_entries_of_several_tokens(name: str) -> None:
    """Rows at every phase of an entry: a row at position p sees the (p + 1) // rate entries that are whole, none at first."""
    kernels = (SETS | SPLIT)[name]
    totals = (1, 2, 3, 4, 5, 7, 8, 47, 48, 49, 262)
    batch = replace(some(name), totals=totals, new=(0,) * len(totals))
    scene, q = latent_scene(kernels, batch, [Rows(b, b, b + 1) for b in range(len(totals))], len(totals))
    out, lse, wanted = call(scene, q)
    rate = kernels.cache.entry_tokens
    assert [len(seen.k) for seen in wanted.seen if seen is not None] == [n // rate for n in totals]
    assert lse is not None
    assert all(not out[b].any() and np.isneginf(lse[b]).all() for b, n in enumerate(totals) if n < rate)


@pytest.mark.parametrize("name", ["mla_many", "mla_balanced"])
def test_a_long_request_among_short_ones(name: str) -> None:
    kernels = (SETS | SPLIT)[name]
    rows = op_of(kernels).rows
    batch = replace(some(name), totals=(1100, rows, rows + 1, 37), new=(0,) * 4)
    scene, q = latent_scene(kernels, batch, [Rows(b, b * rows, (b + 1) * rows) for b in range(4)], 4 * rows)
    call(scene, q)


@pytest.mark.parametrize("name", ["mla_one_head", "mla_small_pool", "mla_balanced"])
def test_schedules_agree(name: str) -> None:
    """Three orders of the threads, the same bits."""
    kernels, results = (SETS | SPLIT)[name], []
    rows = op_of(kernels).rows
    for schedule in ("ascending", "descending", 12345):
        batch = replace(some(name), totals=(200, rows, 70), new=(0,) * 3, schedule=schedule)
        scene, q = latent_scene(kernels, batch, [Rows(b, b * rows, (b + 1) * rows) for b in range(3)], 3 * rows)
        out, lse, _ = call(scene, q)
        assert lse is not None
        results.append((out.tobytes(), lse.tobytes()))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("name", ["mla_one_head", "mla_invariant"])
def test_a_request_does_not_depend_on_its_batch(name: str) -> None:
    """A request has the same bits without the first request, and in another order."""
    batch = replace(some(name), totals=(150, 330, 70), new=(0,) * 3)
    scene, q = latent_scene((SETS | SPLIT)[name], batch, [Rows(b, b, b + 1) for b in range(3)], 3)
    was, was_lse, _ = call(scene, q)
    tables = dict(scene.tables)
    for kept in ([1, 2], [2, 0, 1]):
        scene.tables = {key: array[kept] for key, array in tables.items()}
        out, lse, _ = call(scene, q[kept])
        assert lse is not None and was_lse is not None
        assert out.tobytes() == was[kept].tobytes() and lse.tobytes() == was_lse[kept].tobytes()


def test_a_workspace_over_a_ring_is_sized_by_its_window() -> None:
    """Chunks of 64 tokens for the 200 that a row sees, wherever they begin, however long the cache says a request may be."""
    kernels = SPLIT["mla_invariant"]
    mla = package(kernels).mla_decode
    window = mla.SPLIT_PLAN.sizes(3, 200, 5)
    assert window["max_chunks"] == window["max_slots"] == 3 * 5 and window["bytes"] < 2**17
    for most in (4096, 2**32 - 1):
        assert mla.SPLIT_PLAN.sizes(3, most, 5) == window
        assert mla.workspace_bytes(3, max_tokens=most, multiprocessors=5) == window["bytes"]
    assert mla.SPLIT_PLAN.sizes(3, 64, 5)["max_chunks"] == 3 * 2
    batch = replace(some(kernels.name), totals=(1100, 199, 263), new=(0,) * 3)
    scene, q = latent_scene(kernels, batch, [Rows(b, b, b + 1) for b in range(3)], 3)
    call(scene, q)


@pytest.mark.parametrize("name", ["mla_one_head", "mla_rows", "mla_small_pool", "mla_balanced"])
def test_hostile_tables_and_lengths(name: str) -> None:
    """Whatever one request's pages and length are: it is NaN, the error word names it, the others keep their bits."""
    hold_hostile((SETS | SPLIT)[name], some(name))


def test_hostile_offsets() -> None:
    """Offsets that contradict each other, or give a request more rows than there may be."""
    name = "mla_eight"
    for offsets in ((0, 4, 3, 6), (0, 5, 6, 8), (0, 2, 4, 99), (-1, 2, 4, 6), (3, 3, 3, 2)):
        batch = replace(some(name), totals=(70, 5, 40), new=(0,) * 3)
        scene, q = latent_scene(SETS[name], batch, [], 8)
        scene.tables["lengths"] -= 4
        given = np.array(offsets, np.int64).astype(dtype(scene.cache.lengths_dtype).numpy())
        call(scene, q, row_offsets=given)


@pytest.mark.parametrize("name", ["mla_rows", "mla_eight", "mla_small_pool"])
def test_a_garbage_token_is_its_own_rows_alone(name: str) -> None:
    """The last row's token is NaN throughout: rows before it keep their bits, it becomes NaN."""
    kernels = SETS[name]
    rows = op_of(kernels).rows
    batch = replace(some(name), totals=(66,), new=(0,))
    scene, q = latent_scene(kernels, batch, [Rows(0, 0, rows)], rows)
    was, _, _ = call(scene, q)
    (keys,) = scene.rows()
    scene.write(0, 65, [np.full((1, keys.dim), np.nan, q.dtype)])
    generated = package(kernels)
    out = np.zeros_like(was)
    with machine(arch=batch.arch, mode="check", schedule=7):
        generated.mla_decode(generated.Cache(**scene.arguments())[scene.layer], q=q, out=out)
    assert out[: rows - 1].tobytes() == was[: rows - 1].tobytes()
    assert np.isnan(out[rows - 1].astype(np.float32)).all()


def physical(scene: Scene, entries: int) -> np.ndarray[Any, Any]:
    """Lists `[B, entries]` of each request's tokens as physical rows, in random order among holes."""
    found = np.full((len(scene.batch.totals), entries), -1, np.int32)
    for b, n in enumerate(scene.batch.totals):
        rows = [scene.entries[b][t // scene.tokens][0] * scene.tokens + t % scene.tokens for t in range(n)]
        found[b, scene.rng.permutation(entries)[:n]] = scene.rng.permutation(rows)
    return found


@pytest.mark.parametrize("name", fewer(SPARSE))
def test_lists_of_physical_rows(name: str) -> None:
    """Holes, lists of other lengths, lists of nothing; entries and lengths that there are not."""
    batch = replace(some(name), totals=(70, 33, 5, 40), new=(0,) * 4, strided=True)
    scene, q = latent_scene(SPARSE[name], batch, [Rows(b, b, b + 1) for b in range(4)], 4)
    indices = physical(scene, 75)
    was, was_lse, _ = call(scene, q, indices=indices)
    assert was_lse is not None
    call(scene, q, indices=indices, topk_lengths=np.array([75, 40, 0, 1], np.int32))
    indices[1, 3] = scene.pages * scene.tokens
    indices[2, 70] = -2
    out, lse, wanted = call(scene, q, indices=indices, topk_lengths=np.array([76, 75, 75, 75], np.int32))
    assert lse is not None and [seen is None for seen in wanted.seen] == [True, True, True, False]
    assert out[3].tobytes() == was[3].tobytes() and lse[3].tobytes() == was_lse[3].tobytes()


def test_lists_may_name_rows_of_any_request_twice() -> None:
    name = "mla_sparse_pool"
    batch = replace(some(name), totals=(40, 9), new=(0,) * 2)
    scene, q = latent_scene(SPARSE[name], batch, [Rows(b, b, b + 1) for b in range(2)], 2)
    rows = physical(scene, 40)[0]
    call(scene, q, indices=np.stack([np.repeat(rows[:20], 2), np.roll(rows, 7)]))


# Shared memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*SETS, *SPLIT, *SPARSE])
def test_a_launch_gives_what_the_kernel_declares(name: str) -> None:
    """The kernel's assertion is what its struct has; a launch gives that with the stages of each architecture, at most 227 KB."""
    kernels = (SETS | SPLIT | SPARSE)[name]
    plan = op_of(kernels).plan(kernels)[0]
    assert isinstance(plan.context, MlaMma)
    text = render_set(LoadedSet(kernels, "tests/support/latent_steps.py", ""))[f"{kernels.name}/mla_decode.cu"].text
    found = re.search(r"static_assert\(sizeof\(Shared\) == kStages \* \(([\d +]+)\) \+ ([\d +]+)\);", text)
    assert found is not None
    stage, fixed = (sum(map(int, terms.split(" + "))) for terms in found.groups())
    (_, archs), *_ = plan.files(kernels.arch)  # others run a kernel of their own
    for arch in archs:
        given_bytes = plan.shared_on(arch)
        division = plan.on(arch).division
        assert division is not None
        most, count = architecture(arch).block_shared, division.stages
        assert given_bytes == count * stage + fixed <= most, arch
        full = count == min(6, 256 // plan.context.shape.tokens)
        assert full or given_bytes + stage > most, f"{arch} has room for another stage"


# Traffic -------------------------------------------------------------------------------------------------------------------

TOKENS = 1024
BULK = {
    "plain": (presets.max_mla(page_size=64), 1152, 0),
    "rows": (presets.vllm_mla_fp8(), 656, 0),
    "pool": (presets.max_mla_fp8(page_size=64), 640, 4),
}


@pytest.mark.parametrize("form", BULK if CAMPAIGN else ["rows", "pool"])
def test_each_byte_is_read_once(form: str) -> None:
    """Sectors of rows and scales against the fewest, and no bank twice in the loop over tiles."""
    cache, row, scale = BULK[form]
    kernels = latent_set(f"bulk_{form}", cache, 16)
    pages = TOKENS // 64
    memory = aligned(pages * 64 * row)
    kind = dtype(cache.dtype).numpy()
    arguments: dict[str, Any] = {
        "lengths": np.array([TOKENS - (cache.lengths == "before")], dtype(cache.lengths_dtype).numpy())
    }
    arguments["page_table"] = np.random.default_rng(1).permutation(pages)[None].astype(dtype(cache.table.dtype).numpy())
    if form == "rows":
        arguments["pool"] = [memory.reshape(pages, 64, 1, row)]
    else:
        elements = memory if scale else memory.view(kind)
        arguments["pool"] = elements.reshape(pages, 1, 1, 64, 1, -1)
    if scale:
        arguments["scales"] = aligned(4 * TOKENS).view(np.float32).reshape(pages, 1, 1, 64, 1, 1)
    q, out = np.zeros((1, 16, 576), kind), np.zeros((1, 16, 512), kind)
    with optimized(kernels) as generated, machine(mode="check", schedule=7) as log:
        generated.mla_decode(generated.Cache(**arguments)[0], q=q, out=out)
    counters = log.launches[-1].counters
    read = {n.partition("[")[0]: c.load_sectors for n, c in counters.per_buffer.items() if c.load_requests}
    assert read["pool"] <= 1.02 * TOKENS * row / 32
    assert read.get("scales", 0) <= 1.02 * TOKENS * scale / 32 + 1
    # Q's fragments, once a chunk, are all that meets a bank twice.
    twice = [line for line in counters.lines if line.shared.wavefronts > line.shared.ideal_wavefronts]
    assert sum(line.shared.requests for line in twice) <= 16 * 9
