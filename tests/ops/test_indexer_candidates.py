"""indexer_scores at two levels: maxima of blocks of keys, and scores of the keys of listed blocks, against the oracle."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvgen import CSR, Block, KernelSet, Layout, Paged, Quant, ops, presets
from kvgen.reference import Scored, candidate_scores, indexer_scores
from kvgen.runtime import Fault, describe
from kvgen.runtime.cpu import machine
from tests.support.harness import Run, hold_memory, launcher, offsets_of, optimized, surroundings
from tests.support.indexer_steps import few_blocks, op_of, ragged_step, scales_of, scores_scene, steps
from tests.support.memory import CANARY, Raw, rows_array
from tests.support.scenes import Scene

# Values of 16 bits by warps, drafts of three rows; products of a warpgroup for e4m3 keys that stand for four tokens, maxima
# alone, unseen ones left; codes of 4 bits in pages that blocks do not divide. In a campaign e4m3 widened by warps, and blocks
# of one key.
SETS = {
    kernels.name: kernels
    for kernels in (
        KernelSet(
            name="levels_values",
            q_heads=8,
            cache=Paged(
                dtype="bf16",
                kv_heads=1,
                head_dim=128,
                page_size=16,
                stores="k",
                layout=Layout(k="page token head dim", layers="pointers"),
                lengths="after",
            ),
            ops=[
                ops.IndexerScores(name="block_scores", rows=3, block_max=8, pin_newest=True),
                ops.IndexerScores(name="candidate_scores", rows=3, candidates=8),
            ],
            arch=["sm_80"],
        ),
        KernelSet(
            name="levels_groups",
            q_heads=32,
            cache=presets.vllm_indexer(page_size=48, rate=4),
            ops=[
                ops.IndexerScores(name="block_scores", rows=2, block_max=16, logits=False, fill=False),
                ops.IndexerScores(name="candidate_scores", rows=2, candidates=16, index_dtype="i64"),
            ],
            arch=["sm_90a"],
        ),
        KernelSet(
            name="levels_packed",
            q_heads=32,
            cache=presets.vllm_indexer_fp4(page_size=12),
            ops=[
                ops.IndexerScores(name="block_scores", block_max=8, pin_newest=True, fill=False),
                ops.IndexerScores(name="candidate_scores", candidates=8),
            ],
            arch=["sm_90a"],
        ),
        KernelSet(
            name="levels_widened",
            q_heads=16,
            cache=Paged(
                dtype="bf16",
                kv_heads=1,
                head_dim=128,
                page_size=32,
                stores="k",
                layout=Layout(kv="page token head dim", layers="pointers"),
                table=CSR(),
                quant=Quant(dtype="e4m3", scale_dtype="f32", block=Block(dim=128)),
            ),
            ops=[
                ops.IndexerScores(name="block_scores", block_max=2, logits=False),
                ops.IndexerScores(name="candidate_scores", candidates=2),
            ],
            arch=["sm_80"],
        ),
    )
}
KINDS = [name for name in SETS if name != "levels_widened" or "KVGEN_FAMILY" in os.environ]


class Held:
    """One array of a call's scores, in memory with canaries beside its rows, compared with what the oracle has."""

    def __init__(self, scene: Scene, rows: int, shape: tuple[int, ...]) -> None:
        self.array, self._around = rows_array(rows, shape, "f32", strided=scene.batch.strided)
        self._before = np.array(self.array)

    def hold(self, wanted: Scored, *, fill: bool) -> None:
        assert (surroundings(self.array, self._around) == CANARY).all(), "written beside the rows"
        found = np.array(self.array)
        if not fill:
            unseen = ~wanted.seen
            assert found[unseen].tobytes() == self._before[unseen].tobytes(), "written where a row sees nothing"
            found[unseen] = -np.inf
        np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted.logits))
        known = np.isfinite(wanted.logits)
        np.testing.assert_array_equal(found[~known], wanted.logits[~known])
        far = np.abs(found[known] - wanted.logits[known])
        assert (far <= 2.0**-21 * wanted.terms[known] + 1e-30).all(), f"off by {far.max():.3g}"


def _given(scene: Scene, q: Raw, offsets: Raw | None) -> dict[str, Any]:
    return scales_of(scene, q) | ({} if offsets is None else {"row_offsets": offsets})


def block_scores(
    scene: Scene, q: Raw, weights: Raw, keys: int, blocks: int, offsets: Raw | None = None
) -> tuple[Raw, Raw | None, Scored]:
    """Maxima of `blocks` blocks of one step, and logits of `keys` keys where the operation has them, held to the oracle."""
    op = op_of(scene.kernels, "block_scores")
    size, given = op.block_max, _given(scene, q, offsets)
    assert size is not None
    room = min(keys, blocks * size) if op.logits else blocks * size
    wanted = indexer_scores(scene.view, scene.rows()[0], q, weights, room, rows=op.rows, **given)
    maxima, logits = Held(scene, len(q), (blocks,)), Held(scene, len(q), (keys,))
    outputs = {"block_max": maxima.array} | ({"logits": logits.array} if op.logits else {})
    pool = scene.snapshot()
    Run(scene, op.name, launcher(scene, op.name), q=q, weights=weights, **outputs, **given).expect_word(wanted.errors)
    hold_memory(scene, pool)
    best = wanted.first(blocks * size).block_max(size, pin_newest=op.pin_newest)
    maxima.hold(best, fill=op.fill)
    if op.logits:
        logits.hold(wanted.first(keys), fill=op.fill)
    return maxima.array, logits.array if op.logits else None, best


def listed_scores(scene: Scene, q: Raw, weights: Raw, lists: Raw, offsets: Raw | None = None) -> tuple[Raw, Scored]:
    """Scores of the keys of listed blocks of one step, held to the oracle."""
    op = op_of(scene.kernels, "candidate_scores")
    assert op.candidates is not None
    candidates, _ = rows_array(len(q), lists.shape[1:], "i32", strided=scene.batch.strided)
    candidates[...] = lists
    given = _given(scene, q, offsets)
    wanted = candidate_scores(scene.view, scene.rows()[0], q, weights, candidates, op.candidates, rows=op.rows, **given)
    logits = Held(scene, len(q), (lists.shape[1], op.candidates))
    pool = scene.snapshot()
    run = Run(
        scene,
        op.name,
        launcher(scene, op.name),
        q=q,
        weights=weights,
        candidates=candidates,
        logits=logits.array,
        **given,
    )
    run.expect_word(wanted.errors)
    hold_memory(scene, pool)
    logits.hold(wanted, fill=True)
    return logits.array, wanted


def drawn_lists(data: Any, rows: int, blocks: int) -> Raw:
    """Lists of the first `blocks` blocks and of none: sorted, padded, with holes, with numbers twice, of hostile ones."""
    width = data.draw(st.sampled_from((1, 2, 15, 16, 17, 40)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    lists = rng.integers(0, max(blocks + 1, 1), (rows, width))
    match data.draw(st.sampled_from(("sorted", "padded", "holes", "hostile"))):
        case "sorted":
            lists = np.sort(lists, axis=1)
        case "padded":
            lists[np.arange(width) >= rng.integers(0, width + 1, (rows, 1))] = -1
        case "holes":
            lists[rng.random(lists.shape) < 0.6] = -1
        case "hostile":
            wild = np.array([-1, -2, -(2**31), 2**31 - 1, 2**28, 2**28 - 1, 2**29, 2**30, blocks])
            lists = np.where(rng.random(lists.shape) < 0.5, rng.choice(wild, lists.shape), lists)
    return lists.astype(np.int32)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=4)
@given(data=st.data())
def test_maxima_of_blocks(name: str, data: Any) -> None:
    """Ragged rows or as many each; fewer blocks than logits have keys, and more."""
    kernels = SETS[name]
    batch, ragged = data.draw(steps(kernels, "block_scores"))
    op, total = op_of(kernels, "block_scores"), batch.leading + sum(batch.new) + batch.padding
    scene, q, weights = scores_scene(kernels, batch, total)
    kind = op.index_dtype or scene.cache.lengths_dtype
    offsets = offsets_of(batch.new, kind, batch.leading) if ragged else None
    keys = max(batch.totals, default=0) // scene.cache.entry_tokens
    blocks = -(-keys // (op.block_max or 1)) + data.draw(st.sampled_from((0, 1, 5)))
    with few_blocks(kernels, data.draw(st.sampled_from((1, 2, 5, 1000))), op.name):
        block_scores(scene, q, weights, keys + data.draw(st.sampled_from((0, 3, 40))), max(blocks, 1), offsets)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=6)
@given(data=st.data())
def test_scores_of_listed_blocks(name: str, data: Any) -> None:
    """Whatever lists hold: numbers in any order, behind padding, twice, past everything."""
    kernels = SETS[name]
    batch, ragged = data.draw(steps(kernels, "candidate_scores"))
    op, total = op_of(kernels, "candidate_scores"), batch.leading + sum(batch.new) + batch.padding
    scene, q, weights = scores_scene(kernels, batch, total)
    kind = op.index_dtype or scene.cache.lengths_dtype
    offsets = offsets_of(batch.new, kind, batch.leading) if ragged else None
    keys = max(batch.totals, default=0) // scene.cache.entry_tokens
    lists = drawn_lists(data, total, -(-keys // (op.candidates or 1)))
    with few_blocks(kernels, data.draw(st.sampled_from((1, 2, 5, 1000))), op.name):
        listed_scores(scene, q, weights, lists, offsets)


def test_the_two_levels_find_the_best() -> None:
    """Scores of listed keys are those among all keys, bit for bit; the best 3 blocks have the newest key's among them."""
    scene, q, weights, offsets = ragged_step(SETS["levels_packed"], (150, 9, 70), (2, 1, 3), "block_scores")
    maxima, logits, _ = block_scores(scene, q, weights, 160, 20, offsets)
    assert logits is not None
    # Not filled: what rows do not see is garbage there.
    seen = np.array([149, 150, 9, 68, 69, 70])
    blocks = -(-seen // 8)
    hidden = np.where(np.arange(20) < blocks[:, None], maxima, -np.inf)
    lists = np.argsort(-hidden, axis=1, kind="stable")[:, :3].astype(np.int32)
    assert (lists[:, 0] == blocks - 1).all(), "the newest block comes first"
    found, _ = listed_scores(scene, q, weights, lists, offsets)
    for row, count in enumerate(seen):
        keys = (lists[row][:, None] * 8 + np.arange(8)).reshape(-1)
        mine, there = found[row].reshape(-1), keys < count
        assert mine[there].tobytes() == logits[row, keys[there]].tobytes() and (mine[~there] == -np.inf).all()


def test_many_rows_and_lists_of_many_tiles() -> None:
    """More requests than a block has threads; a long prompt of lists with holes, three blocks or one a tile; short ones whose
    lists are padding but for their last number."""
    totals = (*([3] * 140), 700)
    kernels = SETS["levels_groups"]
    scene, q, weights, offsets = ragged_step(kernels, totals, (*([0, 1] * 70), 9), "candidate_scores")
    rng = np.random.default_rng(5)
    lists = np.full((len(q), 33), -1, np.int32)
    lists[:70, -1] = 0
    for row in range(70, len(q)):
        lists[row, : rng.integers(20, 34)] = 0
        lists[row] = np.where(lists[row] == 0, rng.permutation(44)[:33], -1)
    for blocks in (3, 1000):
        with few_blocks(kernels, blocks, "candidate_scores"):
            listed_scores(scene, q, weights, lists, offsets)


@pytest.mark.parametrize(("keys", "blocks"), [(149, 40), (200, 18), (148, 19)])
def test_keys_that_do_not_fit(keys: int, blocks: int) -> None:
    """Logits or maxima too narrow for a request: its rows are NaN in both, which is reported; the others have theirs."""
    scene, q, weights, offsets = ragged_step(SETS["levels_packed"], (150, 9, 70), (2, 1, 3), "block_scores")
    _, _, best = block_scores(scene, q, weights, keys, blocks, offsets)
    report = describe(best.errors)
    assert report is not None and (report.code, report.request, report.position) == (Fault.LENGTH, 0, 150)
    assert np.isnan(best.logits[:2]).all() and not np.isnan(best.logits[2:]).any()


VICTIMS = {
    "page": Fault.PAGE_ID,
    "minus_one": Fault.PAGE_ID,
    "length": Fault.LENGTH,
    "minus": Fault.LENGTH,
    "decrease": Fault.ROW_OFFSETS,
    "too_many": Fault.ROW_OFFSETS,
    "twice": Fault.ROW_OFFSETS,
}


@pytest.mark.parametrize("wrong", [*VICTIMS, "room"])
def test_hostile_data(wrong: str) -> None:
    """Whatever a request's pages, length and offsets are: it is NaN there, which is reported, and others keep their bits."""
    scene, q, weights, offsets = ragged_step(SETS["levels_groups"], (60, 90, 40), (3, 4, 2), "candidate_scores")
    lists = np.tile(np.array([0, 5, -1, 2, 1, 3, 4], np.int32), (9, 1))
    was, _ = listed_scores(scene, q, weights, lists, offsets.astype(np.int64))
    maxima, _, _ = block_scores(scene, q, weights, 0, 9, offsets.astype(np.int32))
    table, lengths = scene.tables["page_table"], scene.tables["lengths"]
    if wrong in ("page", "minus_one"):
        table[1, 0] = scene.pages if wrong == "page" else -1
    elif wrong in ("length", "room"):
        lengths[1] = (table.shape[1] * scene.tokens + 1 if wrong == "length" else 9 * 16 + 1) * 4
    elif wrong == "minus":
        lengths[1] = -5
    elif wrong == "decrease":
        offsets[2] = 2
    elif wrong == "too_many":
        offsets[3] = 99
    else:  # a later request claims rows of an earlier one
        offsets[...] = 0, 7, 3, 5
    if wrong == "room":  # of maxima: a list has no room to be above
        _, _, best = block_scores(scene, q, weights, 0, 9, offsets.astype(np.int32))
        assert np.isnan(best.logits[3:7]).all() and describe(best.errors).code is Fault.LENGTH  # type: ignore[union-attr]
        return
    with few_blocks(scene.kernels, 1, "candidate_scores"), few_blocks(scene.kernels, 1, "block_scores"):
        found, wanted = listed_scores(scene, q, weights, lists, offsets.astype(np.int64))
        now, _, best = block_scores(scene, q, weights, 0, 9, offsets.astype(np.int32))
    for errors in (wanted.errors, best.errors):
        report = describe(errors)
        assert report is not None and report.code is VICTIMS[wrong]
    if VICTIMS[wrong] is not Fault.ROW_OFFSETS:
        assert np.isnan(wanted.logits[3:7, 0]).all() and np.isnan(best.logits[3:7, 0]).all()
        for rows in (slice(0, 3), slice(7, 9)):
            assert (
                found[rows].tobytes() == was[rows].tobytes() and now[rows, :2].tobytes() == maxima[rows, :2].tobytes()
            )


def test_a_page_that_nobody_lists_is_not_asked_for() -> None:
    """A wrong id of a page whose keys are on no list is no fault; where one row lists them, that row alone is NaN."""
    scene, q, weights, offsets = ragged_step(SETS["levels_values"], (100, 60), (2, 1), "candidate_scores")
    scene.tables["page_table"][0, 3] = -1  # keys 48 to 63: blocks 6 and 7
    lists = np.array([[0, 1, 5, 8], [12, 3, 4, 2], [6, 7, 0, 1]], np.int32)
    _, wanted = listed_scores(scene, q, weights, lists, offsets)
    assert wanted.errors == 0 and not np.isnan(wanted.logits).any()
    lists[1, 2] = 7
    _, wanted = listed_scores(scene, q, weights, lists, offsets)
    assert np.isnan(wanted.logits[1, 2]).all() and np.isnan(wanted.logits).sum() == 8
    report = describe(wanted.errors)
    assert report is not None and (report.code, report.request, report.position) == (Fault.PAGE_ID, 0, 56)


@settings(max_examples=5)
@given(offsets=st.lists(st.integers(-1, 11), min_size=7, max_size=7), blocks=st.sampled_from((1, 3)))
@example(offsets=[0, 4, 8, 2, 3, 4, 9], blocks=3)  # row 3 is two requests', if none but their own offsets count
@example(offsets=[2, 3, 5, 6, 8, 9, 9], blocks=3)  # the first two rows are nobody's
def test_offsets_that_contradict_each_other(offsets: list[int], blocks: int) -> None:
    """A row is of one request, or of none; whoever else claims it leaves it alone."""
    kernels = SETS["levels_values"]
    scene, q, weights, given_offsets = ragged_step(
        kernels, (60, 20, 40, 17, 16, 33), (2, 1, 3, 2, 1, 0), "candidate_scores"
    )
    given_offsets[...] = offsets
    lists = np.random.default_rng(3).integers(-1, 9, (9, 5)).astype(np.int32)
    for name in ("candidate_scores", "block_scores"):
        with few_blocks(kernels, blocks, name):
            if name == "candidate_scores":
                listed_scores(scene, q, weights, lists, given_offsets)
            else:
                block_scores(scene, q, weights, 70, 18, given_offsets)


def test_empty_calls() -> None:
    """No rows, no numbers in a list, no requests: nothing is written where there is nothing, rows of nobody are -inf."""
    kernels = SETS["levels_values"]
    scene, q, weights, offsets = ragged_step(kernels, (60, 20), (2, 1), "candidate_scores")
    none = offsets[:1] * 0
    listed_scores(scene, q, weights, np.zeros((3, 0), np.int32), offsets)
    listed_scores(scene, q[:0], weights[:0], np.zeros((0, 4), np.int32), offsets * 0)
    scene.tables = {name: array[:0] for name, array in scene.tables.items()}
    listed_scores(scene, q, weights, np.zeros((3, 4), np.int32), none)
    block_scores(scene, q, weights, 10, 4, none)
    block_scores(scene, q, weights, 0, 4, none)  # logits of no keys beside maxima


BULK = KernelSet(
    name="levels_bulk",
    q_heads=32,
    cache=presets.vllm_indexer_fp4(),
    ops=[ops.IndexerScores(name="candidate_scores", candidates=8)],
    arch=["sm_90a"],
)


def test_listed_keys_alone_are_read() -> None:
    """Of 1024 keys of 68 bytes 64 blocks of 8: their sectors once for each of two rows, no bank twice in the loop over tiles."""
    pages, keys, listed = 16, 1024, 64
    pool, _ = rows_array(pages, (64 * 68,), "u8", strided=False)
    q, _ = rows_array(2, (32, 64), "u8", strided=False)
    q_scales, _ = rows_array(2, (32,), "i32", strided=False)
    weights, _ = rows_array(2, (32,), "f32", strided=False)
    logits, _ = rows_array(2, (listed, 8), "f32", strided=False)
    lists, _ = rows_array(2, (listed,), "i32", strided=False)
    pool[...], q[...], q_scales[...], weights[...] = 0x38, 1, 0x7F7F7F7F, 1
    lists[...] = [np.sort(np.random.default_rng(row).permutation(keys // 8)[:listed]) for row in range(2)]
    tables = {"page_table": np.random.default_rng(1).permutation(pages)[None].astype(np.int32)}
    given = {"lengths": np.array([keys], np.int32)} | tables
    with optimized(BULK) as generated, machine(mode="check", arch="sm_90a") as log:
        cache = generated.Cache([pool], **given)
        generated.candidate_scores(
            cache[0], q, q_scales, weights, lists, logits, row_offsets=np.array([0, 2], np.int32)
        )
    counters = log.launches[-1].counters
    sectors = {n.partition("[")[0]: c.load_sectors + c.store_sectors for n, c in counters.per_buffer.items()}
    assert sectors["pool"] == 2 * listed * 8 * 68 // 32
    assert sectors["logits"] == 2 * listed * 8 * 4 // 32
    # What a block keeps of its first request is all that meets a bank twice.
    twice = [line for line in counters.lines if line.shared.wavefronts > line.shared.ideal_wavefronts]
    assert sum(line.shared.requests for line in twice) <= 8 * 18
    assert np.isfinite(logits).all()
