"""indexer_scores against the oracle in float64: prompts, drafts, single rows; what rows do not see; hostile data; traffic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvgen import CSR, Block, KernelSet, Layout, Paged, Quant, ops, presets
from kvgen.cases.indexer_scores import indexer_slack
from kvgen.layout.dtypes import dtype
from kvgen.reference import Scored, indexer_scores
from kvgen.reference.indexer_scores import key_scores
from kvgen.runtime import Fault, describe
from kvgen.runtime.cpu import machine
from tests.support.batches import PLAIN
from tests.support.harness import Run, hold_memory, launcher, offsets_of, optimized, surroundings
from tests.support.indexer_steps import few_blocks, op_of, ragged_step, scales_of, scores_scene, steps
from tests.support.memory import CANARY, Raw, rows_array
from tests.support.scenes import Scene

# Codes widened to f16, drafts of three rows; products of warpgroups, two rows each, of keys that stand for four tokens, unseen
# ones left alone; values of 16 bits; codes of 4 bits.
SETS = {
    kernels.name: kernels
    for kernels in (
        KernelSet(
            name="scores_widened",
            q_heads=8,
            cache=presets.vllm_indexer(page_size=16),
            ops=[ops.IndexerScores(rows=3)],
            arch=["sm_80"],
        ),
        KernelSet(
            name="scores_groups",
            q_heads=32,
            cache=Paged(
                dtype="bf16",
                kv_heads=1,
                head_dim=128,
                page_size=48,
                rate=4,
                stores="k",
                layout=Layout(kv="page token head dim", layers="pointers"),
                lengths="after",
                quant=Quant(dtype="e4m3", scale_dtype="f32", block=Block(dim=128), recipe="pow2", place="page"),
            ),
            ops=[ops.IndexerScores(rows=2, fill=False, index_dtype="i64")],
            arch=["sm_90a"],
        ),
        KernelSet(
            name="scores_values",
            q_heads=16,
            cache=Paged(
                dtype="bf16",
                kv_heads=1,
                head_dim=128,
                page_size=32,
                stores="k",
                layout=Layout(k="page token head dim", layers="pointers"),
                table=CSR(),
            ),
            ops=[ops.IndexerScores()],
            arch=["sm_89"],
        ),
        KernelSet(
            name="scores_packed",
            q_heads=16,
            cache=Paged(
                dtype="bf16",
                kv_heads=1,
                head_dim=128,
                page_size=16,
                stores="k",
                layout=Layout(kv="page token head dim", layers="pointers"),
                lengths="after",
                quant=Quant(
                    dtype="e2m1",
                    scale_dtype="e8m0",
                    block=Block(dim=32),
                    recipe="pow2",
                    amax_min=6 * 2.0**-126,
                    place="page",
                ),
            ),
            ops=[ops.IndexerScores(rows=2)],
            arch=["sm_80"],
        ),
    )
}


def call(scene: Scene, q: Raw, weights: Raw, room: int, offsets: Raw | None = None) -> tuple[Raw, Scored]:
    """Scores of one step, held to the oracle: every entry, those that nobody may touch, the error word."""
    op = op_of(scene.kernels)
    logits, around = rows_array(len(q), (room,), "f32", strided=scene.batch.strided)
    before = np.array(logits)
    (keys,) = scene.rows()
    given = scales_of(scene, q) | ({} if offsets is None else {"row_offsets": offsets})
    wanted = indexer_scores(scene.view, keys, q, weights, room, rows=op.rows, **given)
    pool = scene.snapshot()
    run = Run(scene, op.name, launcher(scene, op.name), q=q, weights=weights, logits=logits, **given)
    run.expect_word(wanted.errors)
    hold_memory(scene, pool)
    assert (surroundings(logits, around) == CANARY).all(), "written beside the rows"
    found = np.array(logits)
    if not op.fill:
        assert found[~wanted.seen].tobytes() == before[~wanted.seen].tobytes(), "written where a row sees nothing"
        found[~wanted.seen] = -np.inf
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted.logits))
    known = np.isfinite(wanted.logits)
    np.testing.assert_array_equal(found[~known], wanted.logits[~known])
    far = np.abs(found[known] - wanted.logits[known])
    assert (far <= 2.0**-21 * wanted.terms[known] + 1e-30).all(), f"off by {far.max():.3g}"
    return logits, wanted


def fourteen_bits(q: Raw, k: Raw) -> Raw:
    """q k as tensor cores of sm_90 add products of e4m3: 32 at a time to the sum so far, all of them cut to 13 bits behind the
    first one of the largest."""
    together = np.zeros((*q.shape[:-1], 1))
    for first in range(0, q.shape[-1], 32):
        addends = np.concatenate([q[..., first : first + 32] * k[first : first + 32], together], axis=-1)
        _, exponent = np.frexp(np.abs(addends).max(axis=-1, keepdims=True))
        unit = np.ldexp(1.0, exponent - 14)
        together = (np.trunc(addends / unit) * unit).sum(axis=-1, keepdims=True)
        _, exponent = np.frexp(together)  # and the sum to as many
        together = np.trunc(together / np.ldexp(1.0, exponent - 14)) * np.ldexp(1.0, exponent - 14)
    return together[..., 0]


@pytest.mark.parametrize("signs", [True, False])
def test_what_a_gpu_s_sums_lose_is_allowed(signs: bool) -> None:
    """`kvgen verify` holds a GPU to it. Where products have one sign it is more than a 4096th of their magnitudes together."""
    rng = np.random.default_rng(3)
    kind = dtype("e4m3").numpy()
    q, keys, w = (np.abs(rng.standard_normal(s)) for s in ((4, 128), (300, 128), 4))
    if signs:
        q, keys, w = (x * rng.choice((-1, 1), x.shape) for x in (q, keys, w))
    q, keys = (x.astype(kind).astype(np.float64) for x in (q, keys))
    logits, terms, largest = (np.asarray(x)[None] for x in key_scores(q, w, keys))
    found = np.array([w @ np.maximum(fourteen_bits(q, k), 0) for k in keys])[None]
    wanted = Scored(logits, np.ones(logits.shape, np.bool_), terms, largest, np.zeros(1, np.bool_), 0)
    allowed, far = indexer_slack(wanted, 128, codes=True), np.abs(found - logits)
    assert (far <= allowed).all()
    assert (far <= 2.0**-12 * terms).all() == signs
    assert (allowed < (0.005 if signs else 0.02) * terms).all(), "a wrong product would pass"


@pytest.mark.parametrize("name", SETS)
@settings(max_examples=4)
@given(data=st.data())
def test_a_step(name: str, data: Any) -> None:
    """Ragged rows or as many each, more rows than tokens among them; NaN and infinity lie where no token does."""
    kernels = SETS[name]
    batch, ragged = data.draw(steps(kernels))
    total = batch.leading + sum(batch.new) + batch.padding
    scene, q, weights = scores_scene(kernels, batch, total)
    kind = op_of(kernels).index_dtype or scene.cache.lengths_dtype
    offsets = offsets_of(batch.new, kind, batch.leading) if ragged else None
    with few_blocks(kernels, data.draw(st.sampled_from((1, 2, 5, 1000)))):
        call(scene, q, weights, max(batch.totals, default=0) // scene.cache.entry_tokens + 3, offsets)


def test_a_prompt_among_many_requests() -> None:
    """More requests than a block has threads, and a prompt of more tiles than a ring has, which three blocks share."""
    totals = (*([3] * 140), 700)
    scene, q, weights, offsets = ragged_step(SETS["scores_groups"], totals, (*([0, 1] * 70), 9))
    with few_blocks(scene.kernels, 3):
        call(scene, q, weights, 710, offsets)


def test_requests_do_not_see_each_other() -> None:
    """The same bits of a request without the others, and after another one's keys have become NaN."""
    scene, q, weights, offsets = ragged_step(SETS["scores_groups"], (100, 150), (2, 3))
    was, _ = call(scene, q, weights, 160, offsets)
    scene.write(0, 99, [np.full((1, 128), np.nan, dtype("bf16").numpy())])
    found, wanted = call(scene, q, weights, 160, offsets)
    assert np.isnan(wanted.logits[1, 99]) and not np.isnan(wanted.logits[0]).any()
    assert found[2:, :150].tobytes() == was[2:, :150].tobytes()
    tables = {key: array[1:] for key, array in scene.tables.items()}
    scene.tables = tables
    alone, _ = call(scene, q[2:], weights[2:], 160, offsets[1:] - offsets[1])
    assert alone[:, :150].tobytes() == was[2:, :150].tobytes()


VICTIMS = {
    "page": Fault.PAGE_ID,
    "minus_one": Fault.PAGE_ID,
    "length": Fault.LENGTH,
    "room": Fault.LENGTH,
    "minus": Fault.LENGTH,
    "decrease": Fault.ROW_OFFSETS,
    "too_many": Fault.ROW_OFFSETS,
    "twice": Fault.ROW_OFFSETS,
}


@pytest.mark.parametrize(
    ("name", "wrong"), [*(("scores_groups", wrong) for wrong in VICTIMS), ("scores_packed", "page")]
)
def test_hostile_data(name: str, wrong: str) -> None:
    """Whatever a request's pages, length and offsets are: it is NaN there, which is reported, and others keep their bits."""
    scene, q, weights, offsets = ragged_step(SETS[name], (60, 90, 40), (3, 4, 2))
    room = 130
    was, _ = call(scene, q, weights, room, offsets)
    table, lengths = scene.tables["page_table"], scene.tables["lengths"]
    if wrong in ("page", "minus_one"):
        table[1, 0] = scene.pages if wrong == "page" else -1
    elif wrong in ("length", "room"):
        keys = table.shape[1] * scene.tokens + 1 if wrong == "length" else room + 1
        lengths[1] = keys * scene.cache.entry_tokens
    elif wrong == "minus":
        lengths[1] = -5
    elif wrong == "decrease":
        offsets[2] = 2
    elif wrong == "too_many":
        offsets[3] = 99
    else:  # a later request claims rows of an earlier one
        offsets[...] = 0, 7, 3, 5
    found, wanted = call(scene, q, weights, room, offsets)
    report = describe(wanted.errors)
    assert report is not None and report.code is VICTIMS[wrong]
    if VICTIMS[wrong] is not Fault.ROW_OFFSETS:
        assert np.isnan(wanted.logits[3:7, :2]).all()
        for rows in (slice(0, 3), slice(7, 9)):
            assert found[rows, :40].tobytes() == was[rows, :40].tobytes()


@settings(max_examples=6)
@given(offsets=st.lists(st.integers(-1, 11), min_size=7, max_size=7), blocks=st.sampled_from((1, 3)))
@example(offsets=[0, 4, 8, 2, 3, 4, 9], blocks=1)  # rows 3 and 4 are two requests', if none but their own offsets count
def test_offsets_that_contradict_each_other(offsets: list[int], blocks: int) -> None:
    """A row is of one request, or of none; whoever else claims it leaves it alone."""
    scene, q, weights, given_offsets = ragged_step(SETS["scores_widened"], (60, 20, 40, 17, 16, 33), (2, 1, 3, 2, 1, 0))
    given_offsets[...] = offsets
    with few_blocks(scene.kernels, blocks):
        call(scene, q, weights, 70, given_offsets)


def test_rows_of_nobody_ask_for_no_page() -> None:
    """Where the last offset is wrong, a request whose own are good has no rows either: nothing is said of its pages."""
    scene, q, weights, offsets = ragged_step(SETS["scores_widened"], (60, 20, 40, 16), (2, 1, 3, 0))
    scene.tables["page_table"][1, 0] = scene.pages
    offsets[...] = 0, 2, 3, 6, 1
    _, wanted = call(scene, q, weights, 70, offsets)
    report = describe(wanted.errors)
    assert report is not None and (report.code, report.position) == (Fault.ROW_OFFSETS, len(q))


def test_without_offsets_rows_can_be_missing() -> None:
    """A call with fewer rows than its requests have to have, and one with rows of nobody."""
    kernels = SETS["scores_widened"]
    batch = replace(PLAIN, totals=(20, 30), new=(3, 3))
    for total in (5, 8):
        scene, q, weights = scores_scene(kernels, batch, total)
        call(scene, q, weights, 40)


BULK = KernelSet(
    name="scores_bulk", q_heads=64, cache=presets.vllm_indexer(), ops=[ops.IndexerScores(fill=False)], arch=["sm_90a"]
)


def test_keys_are_read_once() -> None:
    """1024 keys for 64 heads: their sectors once, scores' once, and no bank twice in the loop over tiles."""
    pages, keys = 16, 1024
    pool, _ = rows_array(pages, (64 * 132,), "u8", strided=False)
    pool[...] = 0x38
    tables = {"page_table": np.random.default_rng(1).permutation(pages)[None].astype(np.int32)}
    tables["lengths"] = np.array([keys], np.int32)
    q, _ = rows_array(1, (64, 128), "e4m3", strided=False)
    weights, _ = rows_array(1, (64,), "f32", strided=False)
    logits, _ = rows_array(1, (keys,), "f32", strided=False)
    q[...], weights[...] = 1, 1
    with optimized(BULK) as generated, machine(mode="check", arch="sm_90a") as log:
        cache = generated.Cache([pool], **tables)
        generated.indexer_scores(cache[0], q=q, weights=weights, logits=logits)
    counters = log.launches[-1].counters
    sectors = {n.partition("[")[0]: c.load_sectors + c.store_sectors for n, c in counters.per_buffer.items()}
    assert sectors["pool"] == keys * 132 // 32 and sectors["logits"] == keys * 4 // 32
    # What a block keeps of its first request is all that meets a bank twice.
    twice = [line for line in counters.lines if line.shared.wavefronts > line.shared.ideal_wavefronts]
    assert sum(line.shared.requests for line in twice) <= 16 * 9
    scale = np.frombuffer(b"\x38" * 4, np.float32)[0]
    np.testing.assert_allclose(logits, 64 * 128 * scale, rtol=1e-6)
