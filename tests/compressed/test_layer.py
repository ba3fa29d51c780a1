"""Layers of compressed attention on the CPU machine against the statement: prompts, steps, chunks, drafts, several requests.

A run of the tests has the layer with the most operations; a campaign has every kind, and 300 single steps.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from typing import Final

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.compressed.drawn import SMALL_YARN, draw
from tests.compressed.kits import Kit, kit
from tests.compressed.server import Server
from tests.compressed.statement import Codes, Floats, Form, Layer, Rows, Weights, layer

CAMPAIGN: Final = "KVGEN_FAMILY" in os.environ
V4: Final = Form(dim=128, turned=16, window=12, yarn=SMALL_YARN, once=True, row=Codes(16), entry=Codes(16))
WHOLE: Final = Codes(32, plain=False)
V41: Final = replace(V4, q_norm=False, eps=1e-20, index="latent", index_dim=128, topk=5, row=WHOLE, entry=WHOLE)
FORMS: Final = {
    "window": replace(V4, theta=10_000.0, yarn=None),
    "sparse": replace(V4, rate=4, overlap=True, topk=5, index="pool", index_dim=128),
    "hadamard": replace(V4, rate=4, overlap=True, topk=5, index="pool", index_dim=128, hadamard=True),
    "heavy": replace(V4, rate=16),
    "pairs": replace(V41, rate=2),
    "each": replace(V41, rate=1, gated=False),
    "blocks": replace(V41, rate=1, gated=False, candidates=(3, 4)),
}
KINDS: Final = list(FORMS) if CAMPAIGN else ["sparse"]
HEADS: Final = 8
# o rounded to bf16 before and after it is turned back, P to bf16, rows and queries whose last bit f32 and float64 round apart.
ROUNDING: Final = 2.0**-7
# An indexer's q or key with one such code, as a share of the row's largest score.
SCORE: Final = 4e-3


@cache
def made(name: str) -> Kit:
    return kit(f"layer_{name}", FORMS[name], HEADS, HEADS, drafts=3)


def rows_of(name: str, count: int, *, requests: int = 2) -> tuple[list[Rows], Weights]:
    form = FORMS[name]
    found = [draw(form, count, HEADS, index_heads=HEADS if form.index else 0, seed=b) for b in range(requests)]
    return [rows for rows, _ in found], found[0][1]


class Served:
    """Steps of a server, and what they gave each request so far."""

    def __init__(self, name: str, rows: list[Rows], weights: Weights, **fields: int) -> None:
        self.server = Server(made(name), weights, rows, **fields)
        self.o: list[list[Floats]] = [[] for _ in rows]
        self.picks: list[list[NDArray[np.int64]]] = [[] for _ in rows]
        self.logits: list[list[Floats]] = [[] for _ in rows]

    def step(self, *counts: int, owner: Served | None = None) -> None:
        found, at = self.server.step(list(counts), owner=owner.server if owner is not None else None), 0
        for b, n in enumerate(counts):
            self.o[b] += list(found.o[at : at + n])
            self.picks[b] += found.picks[at : at + n]
            self.logits[b] += found.logits[at : at + n]
            at += n

    def forget(self, b: int, count: int) -> None:
        self.server.take_back(b, count)
        del self.o[b][-count:], self.picks[b][-count:], self.logits[b][-count:]

    def hold(self, weights: Weights) -> None:
        """Every o is the statement's over the entries that the row read, and these are the statement's best ones."""
        form = self.server.kit.form
        for rows, o, picks, logits in zip(self.server.rows, self.o, self.picks, self.logits, strict=True):
            whole = layer(form, rows.first(len(o)), weights)
            _hold_picks(form, whole, picks, logits)
            want = layer(form, rows.first(len(o)), weights, picks=picks).o
            np.testing.assert_allclose(np.stack(o), want, rtol=ROUNDING, atol=ROUNDING * np.abs(want).max())


def _hold_picks(form: Form, whole: Layer, picks: list[NDArray[np.int64]], logits: list[Floats]) -> None:
    for t, (mine, best) in enumerate(zip(picks, whole.picks, strict=True)):
        assert len(mine) == len(best) == len(set(mine.tolist()))
        if whole.scores is None or not len(best):
            np.testing.assert_array_equal(mine, best)
            continue
        scores = whole.scores[t]
        slack = SCORE * np.abs(scores[np.isfinite(scores)]).max()
        np.testing.assert_allclose(logits[t], scores[: len(logits[t])], rtol=0, atol=slack)
        assert (scores[mine] >= scores[best].min() - slack).all(), f"row {t} read {mine}, of which the best are {best}"


@pytest.mark.parametrize("name", KINDS)
def test_prompts_and_single_steps(name: str) -> None:
    """Windows wrap, entries are emitted at every phase, and requests are at different ones."""
    steps = 300 if CAMPAIGN else 5
    rows, weights = rows_of(name, 60 + steps)
    served = Served(name, rows, weights, most=60)
    served.step(*((37, 5) if CAMPAIGN else (21, 2)))
    for _ in range(steps):
        served.step(1, 1)
    served.step(0, 9)
    served.step(6, 1)
    served.hold(weights)


@pytest.mark.parametrize("name", KINDS)
def test_chunks_are_as_the_whole(name: str) -> None:
    rows, weights = rows_of(name, 45)
    whole, chunks = Served(name, rows, weights), Served(name, rows, weights, seed=1)
    parts = ((7, 1), (20, 30), (1, 0), (17, 14)) if CAMPAIGN else ((7, 1), (13, 2))
    whole.step(*(sum(counts) for counts in zip(*parts, strict=True)))
    for counts in parts:
        chunks.step(*counts)
    for b in (0, 1):
        np.testing.assert_array_equal(np.stack(whole.o[b]), np.stack(chunks.o[b]))


@pytest.mark.parametrize("name", KINDS)
def test_drafts_that_are_taken_back_leave_nothing(name: str) -> None:
    rows, weights = rows_of(name, 40)
    wrong, _ = rows_of(name, 40)
    wrong = [
        replace(b, **{n: -x[::-1] for n, x in vars(a).items() if x is not None})
        for a, b in zip(wrong, rows, strict=True)
    ]
    plain, drafted = Served(name, rows, weights), Served(name, rows, weights, seed=1)
    for served in (plain, drafted):
        served.step(*((19, 6) if CAMPAIGN else (7, 2)))
    for i in range(12 if CAMPAIGN else 3):
        plain.step(1, 1)
        drafted.server.rows = [
            _ahead(r, w, done + 1) for r, w, done in zip(rows, wrong, drafted.server.done, strict=True)
        ]
        drafted.step(4, 1 + i % 4)
        drafted.forget(0, 3)
        if i % 4:
            drafted.forget(1, i % 4)
    for b in (0, 1):
        np.testing.assert_array_equal(np.stack(plain.o[b]), np.stack(drafted.o[b]))


def _ahead(rows: Rows, wrong: Rows, at: int) -> Rows:
    """The rows up to a token, and wrong ones from there on."""
    both = {n: (x, getattr(wrong, n)) for n, x in vars(rows).items() if x is not None}
    return replace(rows, **{n: np.concatenate([x[:at], y[at:]]) for n, (x, y) in both.items()})


@pytest.mark.parametrize("name", KINDS)
def test_requests_do_not_see_each_other(name: str) -> None:
    """Beside another request, and after its pages went round, a request has the bits that it has alone."""
    rows, weights = rows_of(name, 40, requests=3)
    together, alone = Served(name, rows, weights), Served(name, rows[1:2], weights, seed=2)
    for counts in (
        ((20, 11, 3), (1, 1, 1), (0, 1, 16), (9, 4, 1), (1, 1, 1)) if CAMPAIGN else ((9, 6, 1), (0, 1, 13), (1, 1, 1))
    ):
        together.step(*counts)
        alone.step(counts[1])
    np.testing.assert_array_equal(np.stack(together.o[1]), np.stack(alone.o[0]))


@pytest.mark.parametrize("name", ["sparse", "pairs", "each"] if CAMPAIGN else ["sparse"])
def test_layers_that_share_entries_and_picks(name: str) -> None:
    """A layer with rows of its own reads the entries of the layer before it, by its picks, as in V4.1."""
    rows, weights = rows_of(name, 40)
    others, other_weights = rows_of(name, 40)
    others = [replace(b, q=-b.q[::-1], kv=b.kv[::-1]) for b in others]
    owner, reader = Served(name, rows, weights), Served(name, others, other_weights, seed=1)
    for counts in ((17, 4), (1, 1), (1, 1), (0, 9), (1, 1)) if CAMPAIGN else ((9, 4), (1, 1)):
        owner.step(*counts)
        reader.step(*counts, owner=owner)
    form = FORMS[name]
    for b in (0, 1):
        count = len(owner.o[b])
        whole = layer(form, rows[b].first(count), weights, picks=owner.picks[b])
        want = layer(form, others[b].first(count), other_weights, owner=whole).o
        np.testing.assert_allclose(np.stack(reader.o[b]), want, rtol=ROUNDING, atol=ROUNDING * np.abs(want).max())


@pytest.mark.skipif(not CAMPAIGN, reason="kernels of its own; tests/ops/test_indexer_candidates.py has the operations")
def test_layers_that_pick_among_another_ones_blocks() -> None:
    """A layer with q and weights of its own picks among the best blocks of the layer before it, as V4.1's from 24 on: prompts,
    whose first rows see fewer entries than lists have, and single tokens."""
    name = "blocks"
    rows, weights = rows_of(name, 60)
    others, other_weights = rows_of(name, 60)
    turned = ("q", "kv", "index_q", "index_w")
    others = [replace(b, **{n: -getattr(b, n)[::-1] for n in turned}) for b in others]
    owner, reader = Served(name, rows, weights), Served(name, others, other_weights, seed=1)
    for counts in ((33, 4), (1, 1), (1, 1), (0, 9), (1, 1), (9, 2)):
        owner.step(*counts)
        reader.step(*counts, owner=owner)
    owner.hold(weights)
    form, fewer = FORMS[name], 0
    for b in (0, 1):
        count = len(owner.o[b])
        whole = layer(form, rows[b].first(count), weights, picks=owner.picks[b])
        among = layer(form, others[b].first(count), other_weights, owner=whole)
        _hold_picks(form, among, reader.picks[b], reader.logits[b])
        want = layer(form, others[b].first(count), other_weights, owner=whole, picks=reader.picks[b]).o
        np.testing.assert_allclose(np.stack(reader.o[b]), want, rtol=ROUNDING, atol=ROUNDING * np.abs(want).max())
        plain = layer(replace(form, candidates=None), others[b].first(count), other_weights)
        assert plain.scores is not None and among.scores is not None
        fewer += int((np.isfinite(plain.scores) & ~np.isfinite(among.scores)).sum())
    assert fewer > 100, "blocks leave something out"


@pytest.mark.parametrize("part", ["window", "entries"])
def test_a_page_that_no_pool_has_is_one_requests_own(part: str) -> None:
    """A hostile page id in request 0's table: its rows are NaN, no other memory changes, request 1 has the bits that it had."""
    name = "sparse"
    rows, weights = rows_of(name, 12)
    plain, harmed = Served(name, rows, weights), Served(name, rows, weights)
    for served in (plain, harmed):
        served.step(9, 6)
    pages = harmed.server.window if part == "window" else harmed.server.pools[part]
    pages.table[0, :1] = 10**6
    before = [x.copy() for x in _bytes(harmed.server)]
    plain.step(0, 1)
    harmed.step(1, 1)
    assert np.isnan(harmed.o[0][-1]).all()
    np.testing.assert_array_equal(harmed.o[1][-1], plain.o[1][-1])
    changed = sum(int((old != new).sum()) for old, new in zip(before, _bytes(harmed.server), strict=True))
    row, key = 112 + 2 * 16 + 8, 128 + 4
    assert 0 < changed <= 2 * (row + row + key)  # a row, an entry and a key of each request


def _bytes(server: Server) -> list[NDArray[np.uint8]]:
    """The memory of every pool."""
    found = []
    for pages in (server.window, *server.pools.values()):
        for pool in pages.made.blocks:
            found += [layer.view(np.uint8) for layer in (pool if isinstance(pool, list | tuple) else [pool])]
    return found


def test_a_wrong_form_is_seen() -> None:
    """What `hold` allows is less than what a token more or less in the window, or an entry, changes."""
    name = KINDS[0]
    rows, weights = rows_of(name, 16)
    served = Served(name, rows, weights)
    served.step(16, 1)
    served.hold(weights)
    form = FORMS[name]
    for wrong in ({"window": form.window + 1}, {"window": form.window - 1}, {"once": False}, {"theta": 2 * form.theta}):
        served.server.kit = replace(made(name), form=replace(form, **wrong))
        with pytest.raises(AssertionError):
            served.hold(weights)
