"""decode over pages that each kv head lists, against the oracle in float64; hostile lists."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import Block, KernelSet, Layout, Mask, Paged, PerKV, Quant, Ring, Score, ops
from kvgen.reference import decode_per_head
from kvgen.runtime.faults import Fault, describe
from tests.support.batches import PLAIN, Batch, batches, capacity
from tests.support.harness import (
    Run,
    decode_of,
    hold_untouched,
    index_name,
    launcher,
    offsets_of,
    queries,
    surroundings,
)
from tests.support.memory import CANARY, Raw, rows_array
from tests.support.scenes import Scene
from tests.support.tolerance import hold, numerics

_CACHE: dict[str, Any] = {"dtype": "bf16", "kv_heads": 2, "head_dim": 16}


def listed_set(name: str, group: int = 4, page: int = 32, op: dict[str, Any] | None = None, **fields: Any) -> KernelSet:
    """A set with decode alone, over lists of pages."""
    kv = Paged(page_size=page, **(_CACHE | fields))
    decode = ops.Decode(pages="per_head", **(op or {}))
    return KernelSet(name=f"listed_{name}", q_heads=group * kv.kv_heads, cache=kv, ops=(decode,), arch=("sm_90a",))


TILES = listed_set("tiles", 4, 64, op={"sinks": "lse", "lse_base": "2"})
# What every run has, and what a campaign has besides.
SETS = [TILES, listed_set("lanes", 2, 4, {"mask": Mask(window=9)}, kv_heads=3, lengths="before")]
if "KVGEN_FAMILY" in os.environ:
    e4m3: dict[str, Any] = {"dtype": "e4m3", "scale_dtype": "f32"}
    SETS += [
        listed_set("pages", 1, 128, {"mask": Mask(window=70), "out_dtype": "f32"}, head_dim=128),
        listed_set("teams", 20, 64, {"lse_empty": "inf"}, head_dim=64),
        listed_set("scales", 8, 32, quant=Quant(**e4m3)),
        listed_set("blocks", 4, 64, quant=Quant(dtype="e2m1", scale_dtype="e4m3", block=Block(dim=16)), head_dim=64),
        listed_set("by_head", 4, 32, layout=Layout(k="page layer head token dim", v="page layer head token dim")),
        listed_set("softcap", 4, 32, {"score": Score(softcap=20.0), "mask": Mask(chunk=48)}),
        listed_set("two_tables", 4, 32, table=PerKV(), layout=Layout(kv="page layer token head dim")),
        listed_set("ring", 4, 32, {"mask": Mask(window=80)}, table=Ring(window=96)),
        listed_set("own_scales", 4, 16, quant=Quant(**e4m3, own_table=True)),
        listed_set("odd", 3, 5, {"score": Score(alibi=True)}, dtype="f32"),
        listed_set("prefix", 4, 32, {"cross": True, "mask": Mask(causal=False)}),
    ]
ALL = pytest.mark.parametrize("kernels", SETS, ids=lambda kernels: kernels.name)


def lists_of(scene: Scene, requests: list[int | None], width: int, *, by_head: bool = False) -> Raw:
    """Lists of each row and kv head: pages of its request in any order, some of them twice, among holes. `by_head`: a head's rows
    lie side by side in memory, as the indexers of some engines leave them."""
    heads = scene.cache.kv_heads
    if by_head:
        array, _ = rows_array(heads, (len(requests), width), "i32", strided=scene.batch.strided)
        lists = array.transpose(1, 0, 2)
    else:
        lists, _ = rows_array(len(requests), (heads, width), "i32", strided=scene.batch.strided)
    for row, b in enumerate(requests):
        pages = 0 if b is None else -(-scene.batch.totals[b] // scene.tokens)
        lists[row] = scene.rng.choice(np.array([*range(pages), -1]), (heads, width))
    return lists


def check(
    scene: Scene,
    q: Raw,
    lists: Raw,
    counts: Raw | None = None,
    *,
    lse: bool = True,
    row_offsets: Raw | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> tuple[Raw, int]:
    """Launch it and hold each kv head to the oracle with its lists; nothing else is written. Returns out and the error word.
    `arguments`: what masks, scores and sinks take; by default sinks and slopes alone."""
    op, group = decode_of(scene.kernels), scene.kernels.group
    slopes = op.score is not None and op.score.alibi
    taken = [name for name, is_taken in (("sinks", op.sinks), ("alibi_slopes", slopes)) if is_taken]
    if arguments is None:
        arguments = {name: scene.values(scene.kernels.q_heads).astype(np.float32) for name in taken}
    given = numerics(scene.kernels, op, arguments)
    out, around = rows_array(len(q), (q.shape[1], scene.rows()[1].dim), given.out, strided=scene.batch.strided)
    sums, sums_around = rows_array(len(q), (q.shape[1],), "f32", strided=False)
    how = given.oracle() | {"page_lists": lists, "page_counts": counts, "row_offsets": row_offsets}
    wanted = decode_per_head(scene.view, scene.rows(), q, **how)
    pool = scene.snapshot()
    brought = {"page_lists": lists, "page_counts": counts, "row_offsets": row_offsets, **arguments}
    run = Run(scene, op.name, launcher(scene, op.name), q=q, out=out, lse=sums if lse else None, **brought)
    for head, its in enumerate(wanted):
        mine = np.arange(q.shape[1]) // group == head
        values = np.where(mine[:, None], out.astype(np.float64), its.out)
        hold(its, given, q, values, np.where(mine, sums, its.lse) if lse else None)
    for array, memory in ((out, around), (sums, sums_around)):
        assert (surroundings(array, memory) == CANARY).all(), "written beside the rows"
    hold_untouched(scene, pool)
    run.expect_word(max(its.errors for its in wanted))
    return out, max(its.errors for its in wanted)


def listed_scene(kernels: KernelSet, batch: Batch, rows: int) -> tuple[Scene, Raw]:
    """A scene with every token stored, and queries."""
    before = kernels.cache.lengths == "before" and not decode_of(kernels).cross
    scene = Scene(kernels, batch, [n - 1 for n in batch.totals] if before else batch.totals)
    scene.fill(batch.totals)
    return scene, queries(scene, rows)


@ALL
@settings(max_examples=6)
@given(data=st.data())
def test_drawn_lists(kernels: KernelSet, data: Any) -> None:
    """Lists of any pages, as long as is drawn, in both orders of memory; with and without counts, offsets and log-sum-exp."""
    batch = data.draw(batches(kernels, least=0 if kernels.cache.lengths == "after" else 1))
    has_row = [data.draw(st.booleans()) for _ in batch.totals]
    requests: list[int | None] = [b for b, some in enumerate(has_row) if some]
    offsets = None
    if data.draw(st.booleans()):
        offsets = offsets_of(has_row, index_name(kernels, "decode"), batch.leading)
        requests = [None] * batch.leading + requests + [None] * batch.padding
    else:
        requests = [*range(len(batch.totals)), *[None] * batch.padding]
    scene, q = listed_scene(kernels, batch, len(requests))
    width = data.draw(st.integers(0, 16))
    lists = lists_of(scene, requests, width, by_head=data.draw(st.booleans()))
    counts = None
    if data.draw(st.booleans()):
        counts = scene.rng.integers(0, width + 1, (len(requests), kernels.cache.kv_heads)).astype(np.int32)
    check(scene, q, lists, counts, lse=data.draw(st.booleans()), row_offsets=offsets)


@ALL
def test_all_pages_in_order(kernels: KernelSet) -> None:
    """The list of all pages: an element of every page counts, and no other does."""
    longest = capacity(kernels)
    batch = replace(PLAIN, totals=(longest, 1, longest // 2), new=(1, 1, 1), fill="inf")
    scene, q = listed_scene(kernels, batch, 3)
    pages = -(-longest // scene.tokens)
    lists = np.full((3, kernels.cache.kv_heads, pages + 1), -1, np.int32)
    for b, n in enumerate(batch.totals):
        lists[b, :, : -(-n // scene.tokens)] = np.arange(-(-n // scene.tokens))
    out, word = check(scene, q, lists)
    assert not word and np.isfinite(out.astype(np.float32)).all()


@ALL
@pytest.mark.parametrize("value", [-2, 2**31 - 1, -(2**31), "past", "count", "negative count", "page id"])
def test_hostile_lists(kernels: KernelSet, value: int | str) -> None:
    """A wrong entry, count or page is reported, and costs the heads that have it, and no others, their result."""
    longest = capacity(kernels)
    batch = replace(PLAIN, totals=(longest, longest), new=(1, 1))
    scene, q = listed_scene(kernels, batch, 2)
    last = (longest - 1) // scene.tokens
    lists = np.full((2, kernels.cache.kv_heads, 5), -1, np.int32)
    lists[:, :, 1] = last
    counts = np.full(lists.shape[:2], 5, np.int32)
    fault = Fault.POSITION
    if value == "count":
        counts[1, 1], fault = 6, Fault.LENGTH
    elif value == "negative count":
        counts[1, 1], fault = -1, Fault.LENGTH
    elif value == "page id":
        scene.tables["page_table"][1] = 2**31 - 1
        lists[1, [h for h in range(lists.shape[1]) if h != 1]] = -1
        fault = Fault.PAGE_ID
    else:
        lists[1, 1, 3] = last + 1 if value == "past" else value
    out, word = check(scene, q, lists, counts)
    found = describe(word)
    assert found is not None and (found.code, found.request) == (fault, 1)
    of_head = np.isnan(out.astype(np.float32)).all(axis=2).reshape(2, kernels.cache.kv_heads, -1)
    assert of_head[1, 1].all() and of_head.sum() == kernels.group


def test_what_show_says() -> None:
    """Pages of whole tiles are read by tensor cores, others by CUDA cores; a block has one kv head."""
    taken = [{c.name for c in op.choices(s).values()} for s in SETS[:2] for op in s.ops if isinstance(op, ops.Decode)]
    assert taken == [{"decode_mma"}, {"decode_simt"}]
