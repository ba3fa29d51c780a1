"""compact against the oracle: the plan, the moves in all layers, the new table; and that every token survives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import CSR, KernelSet, ops, presets
from kvgen.layout.dtypes import dtype
from kvgen.reference import compact, compact_plan
from kvgen.runtime import Fault, describe
from kvgen.runtime.cpu import machine
from tests.support.batches import PLAIN
from tests.support.harness import package
from tests.support.memory import Raw
from tests.support.page_moves import SETS, expect, having, hold_bytes, launch, moving_scene, sizes, steps, vector
from tests.support.scenes import Scene

TABLES = ("page_table", "req_to_token", "page_indices")


def table_of(scene: Scene) -> str:
    return next(n for n in TABLES if n in scene.tables)


def check(
    scene: Scene, *, room: int = 99, in_place: bool = True, used: bool = True, kept: list[int] | None = None
) -> int:
    """Plan and move, each compared with the oracle's; the plan's error word."""
    count, kind, name = sizes(scene)[0], scene.cache.page_table.dtype, table_of(scene)
    found = {"new_ids": vector(np.full(count, 7), kind), "moves": vector(np.full((room, 2), 7), "i64")}
    found |= {"num_moves": vector([7], "i64"), "num_used": vector([7], "i64")}
    wanted = {n: vector(a.copy(), kind if n == "new_ids" else "i64") for n, (a, _) in found.items()}
    others = None if kept is None else np.array(kept, np.int64)
    moves, pages, word = compact_plan(scene.view, wanted["new_ids"][0], wanted["moves"][0], others)
    wanted["num_moves"][0][0] = moves
    if used:
        wanted["num_used"][0][0] = pages
    pool, table = scene.snapshot(), scene.tables[name].copy()
    given: dict[str, Any] = {n: a for n, (a, _) in found.items() if n != "num_used" or used}
    got, log = launch(scene, "compact", step="plan", kept=others, **given)
    assert len(log) == 1
    expect(got, word)
    for n, (_, memory) in found.items():
        np.testing.assert_array_equal(memory, wanted[n][1], err_msg=n)
    hold_bytes(scene.snapshot(), pool)
    np.testing.assert_array_equal(scene.tables[name], table)

    target = scene.tables[name] if in_place else table.copy()
    right = table.copy()
    compact(scene.view, scene.arrays(pool), given["moves"], given["new_ids"], {name: right})
    given.pop("num_used", None)
    given[f"new_{name}"] = target
    second, log = launch(scene, "compact", **given)
    expect(second, 0)
    assert len(log) == 1
    hold_bytes(scene.snapshot(), pool)
    np.testing.assert_array_equal(target, right)
    return word


@pytest.mark.parametrize("name", having("compact"))
@settings(max_examples=5)
@given(data=st.data())
def test_batches(name: str, data: Any) -> None:
    """Any batch, requests that share pages, room for all moves or too little."""
    scene = moving_scene(SETS[name], data.draw(steps(SETS[name])))
    room, flags = data.draw(st.sampled_from((99, 99, 1, 2))), st.booleans()
    kept = data.draw(st.none() | st.lists(st.integers(-1, sizes(scene)[0] - 1), max_size=3))
    check(scene, room=room, in_place=data.draw(flags), used=data.draw(flags), kept=kept)


@pytest.mark.parametrize(
    "name", ["moving_dense", "moving_per_kv", "moving_ring", "moving_kv_inside", "moving_indirect", "moving_mapped"]
)
def test_every_token_survives(name: str) -> None:
    """What requests read before and after is the same, and the used pages are the first ones."""
    batch = replace(PLAIN, totals=(9, 30, 4, 17), new=(0,) * 4, shared=True, seed=5)
    scene = moving_scene(SETS[name], batch)
    scene.fill(scene.batch.totals)
    before = [reads(scene, b) for b in range(4)]
    check(scene)
    for b, wanted in enumerate(before):
        np.testing.assert_array_equal(reads(scene, b), wanted)
    new_ids = np.zeros(sizes(scene)[0], dtype(scene.cache.page_table.dtype).numpy())
    moves, used, _ = compact_plan(scene.view, new_ids, np.zeros((9, 2), np.int64))
    assert moves == 0 and used > 4


def reads(scene: Scene, b: int) -> Raw:
    """K of every living token of a request."""
    count, role = scene.view.length(b), scene.rows()[0]
    assert count is not None
    found = []
    for token in range(scene.view.first_token(count), count):
        places = scene.view.places(b, token // scene.tokens)
        assert isinstance(places, tuple)
        found.append(role.token_numbers(b, token, places[0]))
    return np.stack(found)


BAD = ("dense", "hnd", "per_kv", "kv_inside", "indirect", "mapped", "continuous_open")


@pytest.mark.parametrize("name", [f"moving_{n}" for n in BAD])
def test_what_is_bad(name: str) -> None:
    """Pages outside the pool stay in the table as they are; a length that cannot be: its request is left alone."""
    batch = replace(PLAIN, totals=(7, 5, 8), new=(0,) * 3)
    for bad in (2**31 - 1, 10**6, -1):
        scene = moving_scene(SETS[name], batch)
        table = scene.tables[table_of(scene)]
        first = {1: (1,), 3: (1, 1, 0)}.get(table.ndim, (1, 0))
        if name in ("moving_indirect", "moving_mapped"):
            first = (scene.row(1), 0)
        table[first] = np.array(bad).astype(table.dtype)
        report = describe(check(scene))
        assert report is not None and report.code is Fault.PAGE_ID
    scene = moving_scene(SETS[name], batch)
    scene.tables["lengths"][1] = 2**31 - 1
    report = describe(check(scene))
    assert report is not None and (report.code, report.request) == (Fault.LENGTH, 1)


def test_kept_pages() -> None:
    """Pages of nobody in the batch stay whole, and new_ids says where they are; what names no page is reported."""
    scene = moving_scene(SETS["moving_dense"], replace(PLAIN, totals=(40, 20), new=(0, 0)))
    count = sizes(scene)[0]
    free = next(i for i in reversed(range(count)) if i not in {x for r in scene.entries for e in r for x in e})
    before = scene.arrays()["pool"][free].copy()
    new_ids, moves = np.zeros(count, np.uint32), np.zeros((count, 2), np.int64)
    compact_plan(scene.view, new_ids, moves, np.array([free]))
    assert describe(check(scene, kept=[-1, free, free])) is None
    assert scene.arrays()["pool"][int(new_ids[free])].tobytes() == before.tobytes()
    for bad in (count, -2, 2**40):
        report = describe(check(scene, kept=[-1, 0, bad]))
        assert report is not None and (report.code, report.position) == (Fault.PAIR, 2)


def test_slices_that_decrease() -> None:
    scene = moving_scene(SETS["moving_kv_inside"], replace(PLAIN, totals=(7, 5, 8), new=(0,) * 3))
    assert isinstance(scene.cache.page_table, CSR)
    scene.tables["page_indptr"][1] = 2**31 - 1
    report = describe(check(scene))
    assert report is not None and report.code is Fault.LENGTH


def test_hostile_maps() -> None:
    """Moves and maps of anything: no page but those that pairs inside the pool name is written."""
    scene = moving_scene(SETS["moving_dense"], replace(PLAIN, totals=(40, 20), new=(0, 0)))
    count = sizes(scene)[0]
    moves = np.array([[0, count], [-2, 1], [2**40, 1], [1, 2]])
    new_ids = np.full(count, 2**32 - 2, np.uint32)
    expected, table = scene.snapshot(), scene.tables["page_table"].copy()
    for live in (-1, 2**40, 2**31):
        wanted = compact(scene.view, scene.arrays(expected), moves, new_ids, {"page_table": table}, live)
        got, _ = launch(scene, "compact", moves, np.array([live]), new_ids, scene.tables["page_table"])
        expect(got, wanted)
        hold_bytes(scene.snapshot(), expected)
        np.testing.assert_array_equal(scene.tables["page_table"], table)
        report = describe(wanted)
        assert report is not None and (report.code, report.position) == (Fault.PAIR, 0)


def test_a_large_pool() -> None:
    """More ids than the planner has in flight at once, several times over."""
    kernels = KernelSet(
        name="compact_large", q_heads=1, cache=presets.sglang(dtype="f16", kv_heads=1, head_dim=8), ops=(ops.Compact(),)
    )
    rng = np.random.default_rng(0)
    pages, requests, tokens = 30_000, 3, 4000
    pool = [rng.integers(0, 2**15, (pages, 1, 1, 8), dtype=np.uint16).view(np.float16) for _ in range(2)]
    order = rng.permutation(pages)[: requests * tokens].reshape(requests, tokens).astype(np.int32)
    table = order.copy()
    arrays = {"lengths": np.full(requests, tokens), "request_ids": np.arange(requests), "req_to_token": table}
    generated = package(kernels)
    cache = generated.Cache([pool[0]], [pool[1]], **arrays)
    new_ids, moves, num = np.zeros(pages, np.int32), np.zeros((requests * tokens, 2), np.int64), np.zeros(1, np.int64)
    before = [p[order].copy() for p in pool]
    with machine(mode="fast"):  # many pages; the same kernels are checked over few above
        generated.compact.plan(cache, new_ids, moves, num)
        generated.compact(cache, moves, num, new_ids, table)
    used = np.unique(order)
    assert int(num[0]) == (used >= len(used)).sum()
    np.testing.assert_array_equal(np.sort(table.reshape(-1)), np.arange(len(used)))
    for p, old in zip(pool, before, strict=True):
        np.testing.assert_array_equal(p[table].view(np.uint16), old.view(np.uint16))
