"""pool_tokens against the oracle: entries, the rows that wait, and steps of any size over the same sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.layout.dtypes import dtype
from kvgen.reference.pool_tokens import softmax_pool
from kvgen.runtime import Fault, describe
from kvgen.runtime.cpu import machine
from tests.support.harness import package
from tests.support.pooling import SETS, Sequence, arguments_of, plain, run_step, scene_of

MOST = 44


def sequence_of(name: str, batch: Any, most: int = MOST) -> Sequence:
    return Sequence(SETS[name], batch, most)


@pytest.mark.parametrize("name", SETS)
@settings(max_examples=4)
@given(data=st.data())
def test_drawn_steps(name: str, data: Any) -> None:
    """Several requests, step after step of any size: a step's entries and the state are the oracle's, all else stays."""
    draw = data.draw
    batch = plain(
        draw(st.integers(1, 3)),
        padding=draw(st.integers(0, 2)),
        leading=draw(st.sampled_from((0, 2))),
        fill=draw(st.sampled_from(("nan", "bytes"))),
        strided=draw(st.booleans()),
        schedule=draw(st.sampled_from(("ascending", "descending", 7))),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
    requests = len(batch.totals)
    sequence = sequence_of(name, batch)
    scene = scene_of(sequence, (MOST,) * requests)
    done = (0,) * requests
    for _ in range(draw(st.integers(1, 4))):
        new = tuple(draw(st.sampled_from(sorted({0, 1, 2, 5, 19, MOST - n} & set(range(MOST - n + 1))))) for n in done)
        run_step(sequence, scene, done, new)
        done = tuple(np.add(done, new).tolist())


def stored(sequence: Sequence, scene: Any) -> Any:
    """The bytes of the cache."""
    return [part for parts in scene.snapshot().values() for part in parts]


@pytest.mark.parametrize("name", SETS)
def test_steps_of_any_size_leave_the_same_bytes(name: str) -> None:
    """A prompt at once, in chunks that begin at every phase, and token by token: the arithmetic is the same, so are the bytes.
    The longest request is the last."""
    totals = (0, 17, MOST)
    runs = {"whole": [totals], "chunks": [(0, 3, 7), (0, 1, 13), (0, 5, 19)], "tokens": []}
    found = {}
    for way, steps in runs.items():
        sequence = sequence_of(name, plain(3), MOST)
        scene, done = scene_of(sequence, totals), (0, 0, 0)
        while done != totals:
            left = np.subtract(totals, done)
            new = tuple(np.minimum(steps.pop(0) if steps else (1, 1, 1), left).tolist())
            run_step(sequence, scene, done, new, hold=way == "whole")
            done = tuple(np.add(done, new).tolist())
        found[way] = stored(sequence, scene)
    for way in ("chunks", "tokens"):
        for mine, whole in zip(found[way], found["whole"], strict=True):
            np.testing.assert_array_equal(mine, whole, err_msg=way)


def test_three_hundred_steps() -> None:
    """A ring goes round many times; entries are those of the sequence as a whole."""
    sequence = sequence_of("overlap", plain(1), 300)
    whole, stepped = scene_of(sequence, (300,)), scene_of(sequence, (300,))
    run_step(sequence, whole, (0,), (300,))
    for token in range(300):
        run_step(sequence, stepped, (token,), (1,), hold=False)
    for mine, right in zip(stored(sequence, stepped), stored(sequence, whole), strict=True):
        np.testing.assert_array_equal(mine, right)


@pytest.mark.parametrize("name", ["overlap", "two"])
def test_drafts_that_are_taken_back(name: str) -> None:
    """Steps of a token and three drafts, of which none, some or all stay: what the others left is overwritten."""
    sequence = sequence_of(name, plain(1), MOST)
    right, scene = scene_of(sequence, (MOST,)), scene_of(sequence, (MOST,))
    run_step(sequence, right, (0,), (40,))
    rng, done = np.random.default_rng(5), 0
    while done < 40:
        new, stay = min(4, 40 - done), int(rng.integers(1, 5))
        kv, gate = sequence.kv.copy(), sequence.gate.copy()
        sequence.kv[0, done + stay :] = 77
        sequence.gate[0, done + stay :] = 7
        run_step(sequence, scene, (done,), (new,))
        sequence.kv, sequence.gate = kv, gate
        done += min(stay, new)
    rate = sequence.rate
    (mine,), (theirs,) = scene.rows(), right.rows()
    for entry in range(40 // rate):
        place = scene.view.places(0, entry // scene.tokens)
        assert not isinstance(place, Fault)
        one = [p.numbers(place[0].page, entry % scene.tokens, place[0].scales) for p in (mine, theirs)]
        np.testing.assert_array_equal(*one)


def test_entries_are_those_of_the_sequence() -> None:
    """The step's oracle against the sum over a whole sequence: state and steps are nowhere in it."""
    sequence = sequence_of("index", plain(1))
    scene, rate = scene_of(sequence, (MOST,)), sequence.rate
    wanted = softmax_pool(sequence.kv[0], sequence.gate[0], rate, overlap=True)
    root = np.sqrt((wanted**2).mean(axis=1, keepdims=True) + 1e-6)
    for done, new in ((0, 6), (6, 1), (7, 30)):
        ran = run_step(sequence, scene, (done,), (new,))
        assert ran.latent is not None
        for token in range(done, done + new):
            if (token + 1) % rate == 0:
                got = ran.latent[token - done].astype(np.float64)
                np.testing.assert_allclose(got, (wanted / root)[token // rate], rtol=2**-6, atol=2**-6)


def test_requests_do_not_see_each_other() -> None:
    """A request leaves the same entries beside others as alone."""
    found = []
    for others in (0, 2):
        sequence = sequence_of("overlap", plain(1 + others))
        alone = sequence_of("overlap", plain(1))
        sequence.kv[0], sequence.gate[0] = alone.kv[0], alone.gate[0]
        sequence.fixed = alone.fixed
        scene = scene_of(sequence, (MOST,) * (1 + others))
        for done in range(0, 40, 5):
            run_step(sequence, scene, (done,) * (1 + others), (5,) * (1 + others))
        rows = scene.rows()[0]
        places = [scene.view.places(0, e // scene.tokens) for e in range(10)]
        found.append([rows.numbers(p[0].page, e % scene.tokens, p[0].scales) for e, p in enumerate(places)])
    np.testing.assert_array_equal(*found)


ROUNDS = [*(("overlap", n) for n in (4, 5, 6, 7)), ("two", 5)]


@pytest.mark.parametrize("schedule", ["ascending", "descending"])
@pytest.mark.parametrize(("name", "before"), ROUNDS)
def test_a_step_that_goes_round_the_ring(name: str, before: int, schedule: Any) -> None:
    """Rows that the step's first entries read lie where its last tokens go, whatever order blocks run in."""
    for new in (17, 19, 22, MOST - before):
        sequence = sequence_of(name, plain(1, schedule=schedule))
        scene = scene_of(sequence, (MOST,))
        run_step(sequence, scene, (0,), (before,))
        run_step(sequence, scene, (before,), (new,))


BAD = (-1, 2**31 - 1)


@pytest.mark.parametrize("what", ["page_table", "state", "lengths", "row_offsets", "angles"])
@pytest.mark.parametrize("name", SETS)
def test_bad_device_data(name: str, what: str) -> None:
    """Bad data is reported, and nothing is stored for it; the other requests have their entries and rows."""
    for bad in BAD:
        sequence = sequence_of(name, plain(3, fill="bytes", padding=1))
        scene = scene_of(sequence, (MOST,) * 3)
        run_step(sequence, scene, (0, 0, 0), (18, 5, 21))
        new, before = (1, 20, 12), (18, 5, 21)
        if what == "page_table":
            scene.tables["page_table"][1] = bad
        elif what == "state":
            for places in sequence.state.places.values():
                places[1] = bad
        elif what == "lengths":
            before = (18, bad - 20, 21)
        elif what == "angles" and "cos_sin" in sequence.fixed:
            sequence.fixed["cos_sin"] = sequence.fixed["cos_sin"][:16].copy()
        run_step(sequence, scene, before, new, offsets={1: 99} if what == "row_offsets" else {})


def test_a_bad_total() -> None:
    """A last offset of 0 makes every row padding; what is wrong is reported nevertheless."""
    sequence = sequence_of(next(iter(SETS)), plain(3, fill="bytes"))
    run_step(sequence, scene_of(sequence, (MOST,) * 3), (0, 0, 0), (1, 1, 0), offsets={3: 0})


def test_a_table_that_ends() -> None:
    """Tokens past their request's state table are reported: rows are not stored, entries not emitted."""
    sequence = sequence_of("index", plain(2))
    scene = scene_of(sequence, (MOST,) * 2)
    run_step(sequence, scene, (0, 0), (14, 9))
    sequence.state.places["state_table"] = sequence.state.places["state_table"][:, :4].copy()
    ran = run_step(sequence, scene, (14, 9), (6, 2))
    report = describe(ran.word)
    assert report is not None and report.code == Fault.POSITION and report.request == 0 and report.position == 12 + 3


def test_what_append_makes_of_the_same_rows() -> None:
    """Rows that are rounded behind RoPE: append stores the same codes and scales of them."""
    kernels = SETS["one"]
    sequence = sequence_of("one", plain(2))
    scene, other = (scene_of(sequence, (MOST,) * 2) for _ in range(2))
    step = run_step(sequence, scene, (0, 0), (13, MOST)).wanted
    k = step.stored.rows.astype(dtype(kernels.kv.dtype).numpy())
    places = [at.places[0].page * scene.tokens + at.token for at in step.found if at.places is not None]
    assert len(places) == len(k)
    with machine(mode="check"):
        cache = package(kernels).Cache(**other.arguments())[other.layer]
        package(kernels).append(cache, k, slots=np.array(places))
    for mine, theirs in zip(stored(sequence, scene), stored(sequence, other), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_padding_alone() -> None:
    """A batch without requests."""
    for name in SETS:
        sequence = sequence_of(name, plain(0, padding=2))
        run_step(sequence, scene_of(sequence, ()), (), ())


def test_one_launch() -> None:
    """State, entry and cache in one kernel, whatever the step does."""
    sequence = sequence_of("overlap", plain(1))
    scene = scene_of(sequence, (MOST,))
    scene.tables["lengths"][...] = 9
    tokens = np.array([(0, t) for t in range(9)])
    arguments = arguments_of(sequence, np.arange(9), tokens, 9)
    with machine(mode="check") as log:
        generated = package(sequence.kernels)
        cache = generated.Cache(**scene.arguments())[scene.layer]
        generated.pool_tokens(cache, **arguments, row_offsets=np.array([0, 9], np.int32))
    assert [x.entry for x in log.launches] == ["pool_overlap_pool_tokens"]
