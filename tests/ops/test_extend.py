"""extend against the oracle in float64: any number of rows a request, over any prefix, whoever shares the batch."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import product
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import KernelSet, Layout, Mask, Paged
from kvgen.errors import ArgumentError
from kvgen.ops import Extend
from kvgen.runtime import Fault, describe
from tests.ops import test_extend_sm90
from tests.support.batches import PLAIN, Batch
from tests.support.extend_sets import DRAWN, SETS, decoded
from tests.support.extend_steps import Step, chunks_of, hold_bits_of_rows, step, steps
from tests.support.harness import package
from tests.support.memory import Raw

CAMPAIGN = "KVGEN_FAMILY" in os.environ
ROWS = "page layer token head dim"


def plain(*totals: int, **fields: Any) -> Batch:
    return replace(PLAIN, totals=totals, new=(0,) * len(totals), **fields)


def rows_of(found: Raw, step: Step, b: int) -> bytes:
    """The bits of request b's rows."""
    begin = step.scene.batch.leading + sum(step.counts[:b])
    return found[begin : begin + step.counts[b]].tobytes()


@pytest.mark.parametrize("name", DRAWN)
@settings(max_examples=3 if CAMPAIGN else 2)
@given(data=st.data())
def test_drawn(name: str, data: Any) -> None:
    """Any batch. Unused pages and tails hold NaN or infinity, tables end in poison."""
    data.draw(steps(DRAWN[name])).check(lse=data.draw(st.sampled_from((True, True, False))))


def test_every_cache_that_decode_reads() -> None:
    """It has an extend, on tensor cores or on CUDA cores."""
    walks = set()
    for kernels in decoded().values():
        op = kernels.ops[0]
        assert isinstance(op, Extend) and len(op.plan(kernels)) == 2
        walks |= {choice.name for choice in op.choices(kernels).values()}
    assert walks == {"extend_sm90", "extend_mma", "extend_simt"}


def test_heads_of_any_two_dims_have_a_block() -> None:
    """On CUDA cores, whichever of K's and V's rows is the wide one; it fits every architecture."""
    for k, v in product((1, 128, 129, 620, 1024), repeat=2):
        cache = Paged(dtype="f32", kv_heads=1, head_dim=k, v_head_dim=v, page_size=16, layout=Layout(k=ROWS, v=ROWS))
        kernels = KernelSet(name="dims", q_heads=1, cache=cache, ops=(Extend(),))
        assert Extend().plan(kernels)[0].shared <= 99 << 10, (k, v)


@pytest.mark.parametrize(
    ("name", "before", "rows"),
    [
        ("paged", (0, 0, 0, 0, 0), (1, 31, 32, 33, 64)),  # 32 rows of 4 heads are a tile of columns
        ("paged", (0, 1, 15, 17, 160), (130, 63, 2, 97, 1)),
        ("sglang", (64, 0, 1), (42, 43, 85)),
        ("window", (31, 200, 33), (1, 40, 64)),  # a window shorter than a tile
    ],
)
def test_ends_of_tiles(name: str, before: tuple[int, ...], rows: tuple[int, ...]) -> None:
    """Rows that end with a tile or one beside, prefixes that end with a page; the longest request last; and all counted."""
    batch = plain(*(a + b for a, b in zip(before, rows, strict=True)), padding=3, leading=2)
    for level in (False, True):
        step(SETS[name], batch, rows, level=level).check()


def test_a_long_prompt_beside_decoding_rows() -> None:
    """Every row is right however unlike the requests are, and a request without rows has none."""
    rows = (300, *(1,) * 12, 0, 3) if not CAMPAIGN else (5000, *(1,) * 60, 0, 3)
    totals = (rows[0] + 20, *range(30, 30 + len(rows) - 3), 90, 200)
    step(SETS["paged"], plain(*totals, padding=5), rows).check(multiprocessors=4)


@pytest.mark.parametrize("name", ["paged", "invariant", *(("fp8", "xpacked") if CAMPAIGN else ())])
@pytest.mark.parametrize("rows", [1, 40])
def test_keys_are_cut_where_tiles_are_few(name: str, rows: int) -> None:
    """A request alone on a large GPU: several blocks share a tile, and the last one has the sums of all."""
    found = step(DRAWN[name], plain(1900, 5), (rows, 1))
    workspace = found.planned(multiprocessors=64)
    chunks = chunks_of(workspace)
    found.check(workspace=workspace)
    assert chunks > 2 + (rows > 32), "nothing was cut"


@pytest.mark.parametrize("name", ["paged", "fp8", *(["invariant", "wgmma"] if CAMPAIGN else [])])
def test_schedules_and_runs_agree(name: str) -> None:
    """Bits do not depend on which thread or block comes first, and stay run after run with one plan."""
    results, kernels = set(), SETS[name] if name in SETS else test_extend_sm90.SETS["llama"]
    for schedule in ("ascending", "descending", 12345):
        rows = (60, 1, 150) if CAMPAIGN else (20, 1, 40)
        found = step(kernels, plain(700, 1, 150, schedule=schedule, seed=3), rows)
        workspace = found.planned(multiprocessors=32)
        for _ in range(16 if CAMPAIGN else 1 + (schedule == 12345)):
            out, lse, word = found.run(workspace=workspace)
            assert word == 0
            results.add((out.tobytes(), lse.tobytes()))
    assert len(results) == 1


@pytest.mark.parametrize("name", ["paged", "window"])
def test_chunks_are_the_whole_prompt(name: str) -> None:
    """A prompt by parts, each over what came before, is the prompt: as near as the oracle asks."""
    for done, rows in ((0, 50), (50, 1), (51, 149)):
        step(SETS[name], plain(done + rows, seed=8), (rows,), dominant=False).check()


@pytest.mark.parametrize("name", ["invariant", "f32", *(["fp8"] if CAMPAIGN else [])])
def test_bits_of_a_row_are_its_own(name: str) -> None:
    """With fixed cuts: the same bits alone, by parts, beside others, behind padding, and however many blocks share a tile."""
    total, most, others = 640, 130, ((), (200,))
    if name == "f32" and not CAMPAIGN:
        most, others = 40, ((60,), ())
    tries = [(most, 64), (1, 64), (most // 2, 8)]
    if CAMPAIGN or name == "invariant":
        tries += [(1, 1), (3, 16), (most - 9, 8), (most, 256)]
    found = [(rows, n, beside) for rows, n in tries for beside in others]
    # With one of the others in turn, or with each.
    hold_bits_of_rows(SETS[name], total, most, found if CAMPAIGN else found[::4] + found[3::4])


# What is wrong with a step --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["paged", "f32"])
def test_a_page_that_is_not_there(name: str) -> None:
    """Rows that see it are NaN, which the error word says; other requests do not change by a bit."""
    right = step(SETS[name], plain(90, 200, 90, seed=2), (40, 150, 90))
    good = right.check(multiprocessors=2)
    for page, where in ((7, "in the middle"), (0, "first"), (12, "last"))[: 3 if name == "paged" else 1]:
        for bad in (10**6, -1) if CAMPAIGN else (-1,) if page == 0 else (10**6,):
            broken = step(SETS[name], plain(90, 200, 90, seed=2), (40, 150, 90))
            broken.scene.tables["page_table"][1, page] = bad
            out, lse = broken.check(multiprocessors=2)
            for b in (0, 2):
                assert rows_of(out, broken, b) == rows_of(good[0], right, b), where
                assert rows_of(lse, broken, b) == rows_of(good[1], right, b), where
            seen = max(0, 16 * page - 50)
            assert np.isnan(out[40 + seen : 190].astype(np.float32)).all()


@pytest.mark.parametrize(
    "offsets",
    [
        (0, 40, 30, 100),
        (0, 40, 200, 130),
        (0, -1, 40, 130),
        (5, 5, 5, 131),
        (0, 131, 0, 130),
        (0, 10, 20, 2**31 - 1),
        (0, 40, 130, 90),
    ],
)
def test_offsets_that_contradict_each_other(offsets: tuple[int, ...]) -> None:
    """Their rows are NaN or nobody's, as the oracle says, and no row is written by two."""
    found = step(SETS["paged"], plain(90, 200, 90), (40, 50, 40))
    assert found.row_offsets is not None
    found.row_offsets[...] = offsets
    found.check()


def test_what_is_said_of_a_wrong_step() -> None:
    """As an engine reads it: rows past what the table holds, offsets that decrease, a workspace of another batch or operation."""
    found = step(SETS["paged"], plain(90, 60, 70), (40, 20, 40))
    assert found.row_offsets is not None
    other = step(SETS["paged"], plain(50, 50), (50, 50)).planned()
    _, _, word = found.run(workspace=other)
    assert str(describe(word)) == (
        "PLAN: a workspace without a plan for this operation, batch and rows, or one that was overwritten"
    )
    found.row_offsets[...] = (0, 40, 30, 100)
    assert str(describe(found.run()[2])) == (
        "ROW_OFFSETS: row offsets that decrease, pass the rows, or give request 2 too many rows (row 40)"
    )
    found = step(SETS["paged"], plain(90, 60), (40, 60))
    held = 16 * found.scene.tables["page_table"].shape[1]
    found.scene.tables["lengths"][1] = held - 59
    assert str(describe(found.run()[2])) == (
        f"LENGTH: request 1 (over lists: row 1) has a length or count that its page table, its list, its rows or its "
        f"k_sealed cannot have (token or count {held + 1})"
    )
    with pytest.raises(ArgumentError, match="workspace: got one for 3 rows and q with 100; it must hold every row"):
        found.run(workspace=package(SETS["paged"]).extend.workspace(max_rows=3, multiprocessors=1))
    with pytest.raises(ArgumentError, match="every operation divides its own differently"):
        found.run(workspace=package(SETS["window"]).extend.workspace(max_rows=100, multiprocessors=1))


def test_lengths_that_cannot_be() -> None:
    """A length below the rows, one past the table, a negative one."""
    for length in (-1, 10**6, -(2**31)):
        found = step(SETS["paged"], plain(90, 200, 90), (40, 150, 90))
        found.scene.tables["lengths"][1] = length
        found.check()


def test_requests_of_fewer_tokens_than_rows() -> None:
    """Their early rows stand before the first token: they see none."""
    found = step(SETS["dims"], plain(3, 70, 0), (40, 71, 5))
    out, _ = found.check()
    assert not out[:37].any() and out[37:40].any()


def test_packed_trees_have_32_rows() -> None:
    """A request of more is faulty: its rows are NaN."""
    found = step(SETS["tree"], plain(90, 60), (33, 32), dominant=False)
    found.check()
    out, _, word = found.run()
    assert np.isnan(out[:33].astype(np.float32)).all()
    assert (report := describe(word)) is not None and report.code is Fault.ROW_OFFSETS


def test_plans_of_another_step() -> None:
    """Another batch, other rows, other lengths, garbage, none: NaN, never old text."""
    found = step(SETS["paged"], plain(90, 200), (40, 150))
    good = found.planned()
    for what in ("rows", "batch", "garbage", "entry", "header"):
        workspace = found.planned()
        memory = workspace.view.owner
        if what == "rows":
            memory[...] = step(SETS["paged"], plain(90, 200), (40, 149)).planned(more=2).view.owner
        elif what == "batch":
            memory[...] = step(SETS["paged"], plain(90, 100, 100), (40, 75, 75)).planned().view.owner
        elif what == "garbage":
            memory[...] = 0x5A
        elif what == "entry":
            words = memory.view(np.uint32)
            words[np.flatnonzero(words == 200)] = 201  # the tokens of request 1
        else:
            memory[:64] = 0
        out, lse, word = found.run(workspace=workspace)
        wrong = np.isnan(out.astype(np.float32)).all(axis=(1, 2))
        assert wrong.all() if what != "entry" else wrong[40:].all() or wrong.all(), what
        assert (report := describe(word)) is not None
        assert report.code is (Fault.STALE if what == "entry" else Fault.PLAN), what
        assert np.isnan(lse[wrong]).all()
    # A request whose length has changed since.
    found.scene.tables["lengths"][1] -= 1
    out, _, word = found.run(workspace=good)
    assert np.isnan(out[40:].astype(np.float32)).all() and not np.isnan(out[:40].astype(np.float32)).any()
    assert (report := describe(word)) is not None and report.code is Fault.STALE


def test_values_that_are_no_numbers_stay_with_who_sees_them() -> None:
    """NaN and infinity in V of a token: rows before it do not change by a bit, rows that see it have it."""
    right = step(SETS["paged"], plain(150, seed=4), (100,), dominant=False)
    good, _ = right.check()
    for token, value in ((149, np.nan), (100, np.inf), (60, -np.inf)):
        found = step(SETS["paged"], plain(150, seed=4), (100,), dominant=False)
        key, values = (
            x.read(found.scene.view.places(0, token // 16)[i].page, token % 16)
            for i, x in enumerate(found.scene.rows())
        )  # type: ignore[index]
        values = np.array(values)
        values[...] = value
        found.scene.write(0, token, [key, values])
        out, _, word = found.run()
        assert word == 0
        first = token - 50
        assert out[:first].tobytes() == good[:first].tobytes()
        assert not np.isfinite(out[first:].astype(np.float32)).any()


def test_scales_of_codes() -> None:
    """They are multiplied with q's codes and divide results, which saturate; none is 1."""
    found = step(SETS["codes"], plain(70, 9, padding=1), (40, 9))
    found.arguments = {"q_scale": np.full(1, 0.3, np.float32), "out_scale": np.full(1, 0.125, np.float32)}
    found.check()
    results = set()
    for scales in ({}, {"q_scale": np.ones(1, np.float32)}, {"out_scale": np.ones(1, np.float32)}):
        found.arguments = scales
        out, lse = found.check()
        results.add((out.tobytes(), lse.tobytes()))
    assert len(results) == 1
    found.arguments = {"out_scale": np.full(1, 1e-30, np.float32)}
    out, _, word = found.run()
    size = np.abs(out.astype(np.float32))
    assert word == 0 and np.isin(size[:49], (0, 448)).all() and (size[:49] == 448).mean() > 0.9 and not size[49].any()


def test_groups_that_are_not_sealed() -> None:
    """Where `k_sealed` does not count the whole groups of a request its rows are NaN, and no others."""
    for sealed in (96, -1):
        found = step(SETS["kivi"], plain(90, 150), (40, 70))
        found.scene.arrays()["k_sealed"][1] = sealed
        out, _ = found.check()
        assert np.isnan(out[40:].astype(np.float32)).all()


FEW_KEYS: Final = KernelSet(
    name="extend_few_keys",
    q_heads=4,
    cache=Paged(dtype="f32", kv_heads=2, head_dim=16, page_size=16),
    ops=[Extend(mask=Mask(window=5))],
    arch=["sm_80"],
)


@pytest.mark.parametrize("name", ["window", "few_keys"])
def test_windows_that_begin_anywhere_in_a_tile(name: str) -> None:
    """A row a request, of 64 lengths after one another: some windows begin at a tile's last token, or end at its first."""
    totals = range(70, 134)
    step(FEW_KEYS if name == "few_keys" else SETS[name], plain(*totals), (1,) * len(totals)).check(multiprocessors=4)


def test_no_rows_and_no_requests() -> None:
    for batch, counts in ((plain(), ()), (plain(40), (0,)), (plain(padding=4), ()), (plain(40, padding=130), (0,))):
        step(SETS["paged"], batch, counts).check()


def test_a_padded_batch() -> None:
    """Without offsets every request has T // B rows: many, or one."""
    for rows in (45, 1):
        step(SETS["paged"], plain(60, 45, 90), (rows,) * 3, offsets=False).check()


def test_the_workspace_does_not_ask_for_tokens() -> None:
    """With fixed cuts and with balanced ones its size depends on the rows and the GPU alone."""
    for name in ("paged", "invariant"):
        extend = package(SETS[name]).extend
        assert extend.workspace_bytes(64, multiprocessors=8) == extend.workspace(max_rows=64, multiprocessors=8).nbytes
