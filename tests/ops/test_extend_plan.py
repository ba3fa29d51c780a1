"""extend's plans: every tile of keys that a row sees is visited once for a tile of rows, no other is, and blocks end together."""

from __future__ import annotations

import heapq
import os
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pytest

from kvgen import KernelSet
from kvgen.bench import measure
from kvgen.bench.planned_chunks import PlannedTile, PlannedTiles, planned_tiles, tiles_in
from kvgen.bench.tiles import causal_share
from kvgen.cases.scene import Scene
from kvgen.cases.workload import Workload
from kvgen.lowering.attention.problem import Fit
from kvgen.lowering.attention.split_kv import OVERHEAD
from kvgen.ops import Extend
from tests.ops import test_extend_sm90
from tests.support import extend_sets
from tests.support.batches import PLAIN
from tests.support.extend_steps import extend_of, step
from tests.support.harness import package
from tests.support.sets import archs_of

CAMPAIGN: Final = "KVGEN_FAMILY" in os.environ
SETS: Final = {
    "paged": extend_sets.SETS["paged"],
    "window": extend_sets.SETS["window"],
    "chunk": extend_sets.MORE["twelve"],
    "full": extend_sets.MORE["full"],
    "invariant": extend_sets.SETS["invariant"],
    "llama": test_extend_sm90.SETS["llama"],
}
# Tokens and rows of requests: 60 that decode and a prompt, chunks behind a prefix, verification; and few, whose keys are cut.
BATCHES: Final = (
    ((700, *range(100, 1300, 20)), (700, *(1,) * 60)),
    ((300, 2000, 65, 64, 1), (1, 130, 65, 0, 1)),
    ((3000,), (1,)),
    ((900, 40), (33, 5)),
)


def fit_of(kernels: KernelSet) -> Fit:
    """How the last architecture that tests build the set for takes the call: the CPU machine runs it."""
    return extend_of(kernels).choices(kernels)[archs_of(kernels)[-1]].fit


def tile_of(kernels: KernelSet) -> int:
    """Tokens of a tile of keys, as the planner counts them."""
    return fit_of(kernels).tile


def plan_of(kernels: KernelSet, totals: tuple[int, ...], rows: tuple[int, ...], multiprocessors: int) -> PlannedTiles:
    found = step(kernels, replace(PLAIN, totals=totals, new=(0,) * len(totals)), rows, dominant=False)
    workspace = found.planned(multiprocessors=multiprocessors)
    return tiles_in(np.asarray(workspace.view.owner), workspace.sizes, kernels, fit_of(kernels).division.columns)


def seen(op: Extend, tokens: int, rows: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """[row, token]: what the mask says."""
    at, token = np.arange(tokens - rows, tokens)[:, None], np.arange(tokens)
    found = np.ones((rows, tokens), np.bool_)
    if op.mask.causal:
        found &= token <= at
    if op.mask.window is not None:
        found &= token > at - op.mask.window
    if op.mask.chunk is not None:
        found &= token // op.mask.chunk == at // op.mask.chunk
    return found


def held(kernels: KernelSet, plan: PlannedTiles, totals: tuple[int, ...], rows: tuple[int, ...]) -> None:
    """A tile of rows has its keys once, in pieces that begin where tiles do, and visits those that one of its rows sees."""
    op, tile = extend_of(kernels), tile_of(kernels)
    columns = fit_of(kernels).division.columns
    pieces = defaultdict(list)
    for entry in plan.entries:
        pieces[entry.b, entry.first].append(entry)
    cols = [n * kernels.group for n in rows]
    assert sorted(pieces) == [(b, first) for b, n in enumerate(cols) for first in range(0, n, columns)]
    for (b, first), parts in pieces.items():
        parts.sort(key=lambda e: e.begin)
        assert all(e.pieces == len(parts) for e in parts)
        assert all(x.end == y.begin and x.end % tile == 0 for x, y in pairwise(parts))
        last = min(first + columns, cols[b]) - 1
        asked = seen(op, totals[b], rows[b])[first // kernels.group : last // kernels.group + 1].any(axis=0)
        visited = sum(-(-e.end // tile) - e.begin // tile for e in parts if e.begin < e.end)
        assert visited == len(set(np.flatnonzero(asked) // tile)), (b, first)


@pytest.mark.parametrize("name", SETS)
def test_visits_are_what_the_mask_allows(name: str) -> None:
    kernels = SETS[name]
    for totals, rows in BATCHES if CAMPAIGN or name != "full" else BATCHES[3:]:
        for multiprocessors in (4, 132) if CAMPAIGN or rows == BATCHES[2][1] else (132,):
            held(kernels, plan_of(kernels, totals, rows, multiprocessors), totals, rows)


@pytest.mark.parametrize("name", SETS if CAMPAIGN else ("paged",))
def test_drawn_plans(name: str) -> None:
    kernels, rng = SETS[name], np.random.default_rng(19)
    for _ in range(40 if CAMPAIGN else 3):
        count = int(rng.integers(1, 80))
        rows = tuple(
            int(2 ** rng.uniform(0, 9)) if rng.random() < 0.3 else int(rng.integers(0, 5)) for _ in range(count)
        )
        totals = tuple(int(n + 2 ** rng.uniform(0, 11)) for n in rows)
        held(kernels, plan_of(kernels, totals, rows, int(rng.integers(1, 150))), totals, rows)


def test_products_that_a_causal_mask_allows() -> None:
    """The share that `bench --cycles` says is that of the planner's own entries."""
    for name, rows in (("paged", 300), ("llama", 170)):
        kernels = SETS[name]
        op, tile = extend_of(kernels), tile_of(kernels)
        (kernel, *_) = op.plan(kernels)
        made = sum(
            fit_of(kernels).division.columns * tile * (-(-e.end // tile) - e.begin // tile)
            for e in plan_of(kernels, (rows,), (rows,), 132).entries
        )
        allowed = kernels.group * int(seen(op, rows, rows).sum())
        assert causal_share(kernel, kernels.group, rows) == pytest.approx(allowed / made)


def cost(kernels: KernelSet, entry: PlannedTile) -> int:
    """In halves of a wide tile's time."""
    tile = tile_of(kernels)
    tiles = max(1, -(-entry.end // tile) - entry.begin // tile)
    narrow = entry.cols <= fit_of(kernels).narrow_columns
    return (tiles + OVERHEAD) * (1 if narrow else 2)


# A prompt beside requests that decode, of one length and of many; a long one; prompts alone.
MIXED: Final = (
    ((4000,) * 61, (4000, *(1,) * 60)),
    ((3000, *range(500, 8000, 250)), (3000, *(1,) * 30)),
    ((60000, 2000), (1, 2000)),
    ((5000, 1000, 300), (5000, 900, 300)),
)


@pytest.mark.parametrize("batch", MIXED, ids=("even", "uneven", "long", "prompts"))
def test_blocks_end_together_and_wait_for_different_things(batch: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """132 blocks that take works in turn end half of the longest one later than if they shared all evenly, or earlier; in each
    of the first three quarters of that time requests of one tile have a part of the blocks like their part of all cost."""
    totals, rows = batch
    kernels = SETS["llama"]
    scene = Scene(kernels, package(kernels), Workload("mixed", totals, rows))
    plan = planned_tiles(scene, extend_of(kernels), 132)
    held(kernels, plan, totals, rows)
    alone = {b for b, n in enumerate(rows) if n * kernels.group <= 128}
    total, of_alone = 0, 0
    free = [0] * 132
    quarter = [0.0] * 4
    works = [(cost(kernels, e), e.b in alone) for e, _ in plan.works]
    even = sum(c for c, _ in works) / 132
    for c, is_alone in works:
        begin = heapq.heappop(free)
        heapq.heappush(free, begin + c)
        total, of_alone = total + c, of_alone + c * is_alone
        for n in range(4 if is_alone else 0):
            quarter[n] += max(0.0, min(begin + c, (n + 1) * even / 4) - max(begin, n * even / 4))
    assert max(free) <= even + max(c for c, _ in works) / 2
    if 0 < len(alone) < len(rows):
        parts = [4 * n / of_alone for n in quarter[:3]]
        assert min(parts) > 0.6 and max(parts) < 1.5, parts


def test_heads_go_in_groups_where_many_rows_share_long_keys() -> None:
    """Keys that one tile reads take no part in it: nobody finds them in L2."""
    kernels = SETS["llama"]
    together = [
        plan_of(kernels, totals, rows, 8).heads_together for totals, rows in (((40000,), (1,)), ((20000,), (64,)))
    ]
    assert together == [2, 1]


def test_every_visit_reads_its_tokens_once_and_every_row_is_written_once() -> None:
    """Sectors of K and V: those of the entries' keys, whole copies of 16 tokens; bytes of out and LSE: their own."""
    work = Workload("mixed", (310, 64, 641, 97), (160, 1, 1, 33))
    for name in ("paged", "llama"):
        kernels, op = SETS[name], extend_of(SETS[name])
        scene = Scene(kernels, package(kernels), work)
        plan = planned_tiles(scene, op, 8)
        *_, done = measure(scene, op, None)
        copied = 16 if name == "llama" else 1
        tokens = sum(-(-e.end // copied) * copied - e.begin // copied * copied for e in plan.entries)
        row = 2 * (kernels.kv.head_dim + kernels.kv.v_dim)
        (kv,) = (t for t in done.traffic if t.group == "kv")
        assert kv.counted.sectors == tokens * kernels.kv.kv_heads * row // 32
        written = {t.name: t.counted.store_bytes for t in done.traffic if t.group == "output"}
        assert written["out"] == done.rows * kernels.q_heads * kernels.kv.v_dim * 2
        assert written["lse"] == done.rows * kernels.q_heads * 4


def test_a_prompt_beside_requests_that_decode() -> None:
    """In a campaign one of 4,000 rows beside 60: each row is right, and nothing beside them changes."""
    prompt, count = (4000, 60) if CAMPAIGN else (130, 4)
    totals = (prompt, *range(3 * prompt // 4, 3 * prompt // 4 + 10 * count, 10))
    rows = (prompt, *(1,) * count)
    step(SETS["llama"], replace(PLAIN, totals=totals, new=(0,) * len(rows), padding=3), rows).check(multiprocessors=132)
