"""reorder against the oracle: the new table, all memory of all layers, and what is bad about them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import Continuous, KernelSet, Layout, Paged, PerKV, Quant, Ring, ops, presets
from kvgen.errors import ArgumentError
from kvgen.layout.dtypes import dtype
from kvgen.reference import reorder
from kvgen.runtime import Fault, describe
from kvgen.runtime.cpu import machine
from kvgen.schema.cache import Cache
from tests.support.batches import PLAIN, Batch
from tests.support.harness import index_name, package
from tests.support.memory import Raw, rows_array
from tests.support.page_moves import SETS, expect, having, hold_bytes, launch, sizes, steps, vector
from tests.support.scenes import Scene

NAMES = having("reorder")


def free_pages(scene: Scene, *, scales: bool = False) -> list[int]:
    """Entries that no request has, as many as every request may need, by making the pool's last ones free."""
    entries = (scene.scale_entries if scales else None) or [[i for e in r for i in e] for r in scene.entries]
    used = {i for request in entries for i in request}
    return [i for i in range(sizes(scene)[scales]) if i not in used]


class Roomy(Scene):
    """A scene whose pool has free pages for every request."""

    def _lay_pages(self) -> None:
        super()._lay_pages()
        table = self.cache.page_table
        columns = self.ring_pages if isinstance(table, Ring) else 1
        more = len(self.batch.totals) * columns * (2 if isinstance(table, PerKV) else 1)
        self.pages += more * table.id_multiplier

    def _lay_scale_pages(self) -> None:
        super()._lay_scale_pages()
        if self.cache.storage.own_table:
            self.scale_pages += len(self.batch.totals) * self.cache.page_table.id_multiplier


class OneLayer(Roomy):
    """A scene whose pools have one layer."""

    layers = 1


def scene_of(kernels: KernelSet, batch: Batch, kind: type[Scene] = Roomy) -> Scene:
    from tests.support.page_moves import scramble

    scene = kind(kernels, batch, batch.totals)
    scramble(scene, scene.arrays())
    return scene


def fresh_of(scene: Scene) -> dict[str, Raw]:
    """A free page for every request, column and id."""
    table, batch = scene.cache.page_table, len(scene.batch.totals)
    free = iter(scene.rng.permutation(free_pages(scene)))
    shape = (
        (batch, 2) if isinstance(table, PerKV) else (batch, scene.ring_pages) if isinstance(table, Ring) else (batch,)
    )
    found = {"page_table": np.array([next(free) for _ in range(int(np.prod(shape)))]).reshape(shape)}
    if scene.cache.storage.own_table:
        found["scales_page_table"] = scene.rng.permutation(free_pages(scene, scales=True))[:batch]
    return {n: a.astype(dtype(table.dtype).numpy()) for n, a in found.items()}


def new_tables(scene: Scene) -> dict[str, tuple[Raw, Raw]]:
    """A table of canaries of the form of each of the scene's, and all memory around it."""
    found: dict[str, tuple[Raw, Raw]] = {}
    for name in ("page_table", "req_to_token", "scales_page_table"):
        if name in scene.tables:
            old = scene.tables[name]
            shape, strided = old.shape[1:], old.ndim > 1 and scene.batch.strided
            kind = scene.cache.page_table.dtype
            found[name] = (
                rows_array(len(old), shape, kind, strided=strided) if shape else vector(np.full(len(old), 7), kind)
            )
    return found


def check(
    scene: Scene, parents: Raw, fresh: dict[str, Raw] | None = None, *, mode: str = "check", lengths: bool = True
) -> int:
    """Reorder, and compare all memory with the oracle's; the oracle's error word."""
    fresh = fresh_of(scene) if fresh is None else fresh
    found, wanted = new_tables(scene), new_tables(scene)
    before = {name: table.copy() for name, table in scene.tables.items()}
    counts = [vector(np.full(len(parents), 77), scene.cache.lengths_dtype) for _ in range(2)]
    expected = scene.snapshot()
    new = {n: a for n, (a, _) in wanted.items()}
    word = reorder(scene.view, scene.arrays(expected), parents, fresh, new, counts[1][0] if lengths else None)
    given: dict[str, Any] = {f"new_{n}": a for n, (a, _) in found.items()}
    given |= {"fresh": fresh["page_table"]} | ({"new_lengths": counts[0][0]} if lengths else {})
    if "scales_page_table" in fresh:
        given["fresh_scales"] = fresh["scales_page_table"]
    got, log = launch(scene, "reorder", parents, mode=mode, **given)
    hold_bytes(scene.snapshot(), expected)
    for name, (_, memory) in found.items():
        np.testing.assert_array_equal(memory, wanted[name][1], err_msg=name)
    np.testing.assert_array_equal(counts[0][1], counts[1][1])
    for name, table in scene.tables.items():
        np.testing.assert_array_equal(table, before[name], err_msg=name)
    expect(got, word)
    assert len(log) == bool(len(parents))
    return word


def parents_of(scene: Scene, values: Any) -> Raw:
    return np.array(values, np.int64).astype(dtype(index_name(scene.kernels, "reorder")).numpy())


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=5)
@given(data=st.data())
def test_beams(name: str, data: Any) -> None:
    """Any parents, some several times and some not at all; rows that are left alone."""
    batch = replace(data.draw(steps(SETS[name])), shared=False)
    scene, count = scene_of(SETS[name], batch), len(batch.totals)
    parents = data.draw(st.lists(st.integers(-1, count - 1), min_size=count, max_size=count))
    check(scene, parents_of(scene, parents), lengths=data.draw(st.booleans()))


@pytest.mark.parametrize("name", ["moving_dense", "moving_ring"])
def test_one_layer(name: str) -> None:
    """The blocks of the only layer write the new table and the new lengths."""
    scene = scene_of(SETS[name], replace(PLAIN, totals=(7, 5, 8), new=(0,) * 3), OneLayer)
    check(scene, parents_of(scene, [1, 1, 2]))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_bad(name: str) -> None:
    """Parents that are none, bad pages of a parent, bad fresh pages, lengths that no table holds."""
    kernels = SETS[name]
    batch = replace(PLAIN, totals=(7, 5, 8, 4, 5), new=(0,) * 5)
    for values in ([5, 1, 1, 2**31 - 1, 0], [0, 0, -2, 0, 4], [2, 2, 2, 3, 3]):
        scene = scene_of(kernels, batch)
        check(scene, parents_of(scene, values))
    table = next(n for n in ("page_table", "req_to_token") if n in scene.tables)
    for bad in (2**31 - 1, scene.pages, 0 if kernels.cache.page_table.dtype == "u32" else -1):
        scene = scene_of(kernels, batch)
        for at in np.ndindex(scene.tables[table].shape):
            if at[-1] != 0 or scene.tables[table].ndim == 1:
                scene.tables[table][at] = np.array(bad).astype(scene.tables[table].dtype)
        check(scene, parents_of(scene, [1, 1, 1, 3, 0]), mode="fast")
        scene = scene_of(kernels, batch)
        fresh = fresh_of(scene)
        fresh["page_table"][2, ...] = np.array(bad).astype(fresh["page_table"].dtype)
        if bad != 0:
            check(scene, parents_of(scene, [1, 1, 1, 3, 3]), fresh)
    scene = scene_of(kernels, batch)
    scene.tables["lengths"][1] = 2**31 - 1
    report = describe(check(scene, parents_of(scene, [0, 0, 1, 1, 2])))
    if not isinstance(kernels.cache.page_table, Ring):
        assert report is not None and (report.code, report.request) == (Fault.LENGTH, 2)


@pytest.mark.parametrize(("name", "rows"), [("moving_indirect", "request_ids"), ("moving_mapped", "idx_mapping")])
def test_rows_of_no_request(name: str, rows: str) -> None:
    """Rows outside the table: of the child, and of the parent."""
    for b, parents, code in ((1, [2, 0, 1], Fault.TABLE), (0, [-1, 0, 1], Fault.LENGTH)):
        scene = scene_of(SETS[name], replace(PLAIN, totals=(7, 5, 8), new=(0,) * 3))
        scene.tables[rows][b] = 99
        report = describe(check(scene, parents_of(scene, parents)))
        assert report is not None and report.code is code and report.request == 1


@pytest.mark.parametrize("name", ["moving_dense", "moving_hnd", "moving_int8_own_table"])
def test_the_tokens_go_along(name: str) -> None:
    """Every child reads its parent's tokens, and a child that writes changes nobody else's."""
    scene = scene_of(SETS[name], replace(PLAIN, totals=(17, 20, 7, 10), new=(0,) * 4, strided=True))
    scene.fill(scene.batch.totals)
    parents = [1, 1, 3, 1]
    stored = [tokens_of(scene, p) for p in parents]
    found = {n: a for n, (a, _) in new_tables(scene).items()}
    fresh = fresh_of(scene)
    more = {"fresh_scales": fresh["scales_page_table"]} if "scales_page_table" in fresh else {}
    given: dict[str, Any] = {f"new_{n}": a for n, a in found.items()}
    lengths = scene.tables["lengths"].copy()
    given |= {"fresh": fresh["page_table"], "new_lengths": lengths} | more
    word, _ = launch(scene, "reorder", parents_of(scene, parents), **given)
    assert describe(word) is None
    scene.tables.update(found, lengths=lengths)
    for b, wanted in enumerate(stored):
        np.testing.assert_array_equal(tokens_of(scene, b), wanted)
    for b in range(4):
        scene.write(b, int(lengths[b]), [scene.values(r.heads, r.dim) for r in scene.rows()])
        for other, wanted in enumerate(stored):
            np.testing.assert_array_equal(tokens_of(scene, other), wanted)


def tokens_of(scene: Scene, b: int) -> Raw:
    """K of every token of a request."""
    count, role = scene.view.length(b), scene.rows()[0]
    assert count is not None
    rows = []
    for token in range(count):
        places = scene.view.places(b, token // scene.tokens)
        assert isinstance(places, tuple)
        rows.append(role.token_numbers(b, token, places[0]))
    return np.stack(rows)


# Pages and blocks of one token, one of them of several tiles; a block whose scales have a table of their own.
SMALL = {
    "tiles": presets.sglang(dtype="bf16", kv_heads=40, head_dim=256),
    "ring": Paged(dtype="f16", kv_heads=2, head_dim=40, page_size=1, table=Ring(window=5)),
    "block": Continuous(
        dtype="f16", kv_heads=2, head_dim=64, max_tokens=1, layout=Layout(kv="block layer kv token head dim")
    ),
    "own_table": Continuous(
        dtype="bf16", kv_heads=2, head_dim=64, max_tokens=16,
        quant=Quant(dtype="i8", scale_dtype="f16", zero=True, own_table=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_small_pages(name: str) -> None:
    cache = SMALL[name]
    kernels = KernelSet(name=f"reorder_{name}", q_heads=cache.kv_heads, cache=cache, ops=(ops.Reorder(),))
    totals = (1,) * 4 if name == "block" else (3, 4, 5, 2)
    for parents in ([1, 1, 3, 1], [0, -1, 0, 2]):
        scene = scene_of(kernels, replace(PLAIN, totals=totals, new=(0,) * 4))
        assert describe(check(scene, parents_of(scene, parents))) is None


def test_layers_of_different_sizes() -> None:
    """A page that one of the layers does not have is no page."""
    kernels = KernelSet(
        name="reorder_layers",
        q_heads=2,
        cache=presets.vllm(dtype="f16", kv_heads=2, head_dim=64, page_size=16),
        ops=(ops.Reorder(), ops.Compact()),
    )
    made, table = package(kernels), np.array([[0, 1], [2, 6]], np.int32)
    pools = [np.ones((2, 8, 16, 2, 64), np.float16)[:, :pages] for pages in (8, 4)]
    cache = made.Cache(pools, lengths=np.array([20, 20], np.int32), page_table=table)
    for parents, fresh in (([0, 0], [3, 6]), ([1, 1], [3, 3])):
        word = np.zeros(1, np.uint64)
        with machine(mode="check"):
            made.reorder(cache, np.array(parents, np.int32), np.array(fresh, np.int32), table.copy(), errors=word)
        report = describe(word)
        assert report is not None and (report.code, report.request) == (Fault.PAGE_ID, 1)
    alone = made.Cache(pools[:1], lengths=np.array([20, 20], np.int32), page_table=table)
    word = np.zeros(1, np.uint64)
    with machine(mode="check"):
        made.reorder(alone, np.array([0, 0], np.int32), np.array([3, 8], np.int32), table.copy(), errors=word)
    report = describe(word)
    assert report is not None and (report.code, report.request) == (Fault.PAGE_ID, 1), "one layer"
    new_ids, moves, num = np.zeros(8, np.int32), np.zeros((8, 2), np.int64), np.zeros(1, np.int64)
    word[0] = 0
    with machine(mode="check"):
        made.compact.plan(cache, new_ids, moves, num, errors=word)
    report = describe(word)
    assert report is not None and (report.code, report.request) == (Fault.PAGE_ID, 1)
    np.testing.assert_array_equal(new_ids, [0, 1, 2, -1, -1, -1, -1, -1])


def test_memory_that_is_read_meanwhile() -> None:
    """New tables and lengths in the memory of the old ones are refused; columns beside the old ones are not."""
    scene = scene_of(SETS["moving_dense"], replace(PLAIN, totals=(17, 20), new=(0,) * 2))
    both = np.zeros((2, 2, 4), np.uint32)
    both[:, 0, :2] = scene.tables["page_table"][:, :2]
    scene.tables.update(page_table=both[:, 0], lengths=np.array([17, 20, 0], np.uint32)[:2])
    given: dict[str, Any] = {"fresh": fresh_of(scene)["page_table"], "new_page_table": both[:, 1]}
    parents = parents_of(scene, [1, 0])
    word, log = launch(scene, "reorder", parents, **given)
    assert describe(word) is None and len(log) == 1
    np.testing.assert_array_equal(both[:, 1, :2], both[::-1, 0, :2])
    base = scene.tables["lengths"].base
    assert base is not None
    for array in (scene.tables["lengths"], base[1:]):
        with pytest.raises(ArgumentError, match=r"^new_lengths: got memory that lengths lies in too; .* of its own"):
            launch(scene, "reorder", parents, **given | {"new_lengths": array})
    wide = both.reshape(2, 8)
    for array in (both[:, 0], wide[:, 2:6], wide[:, 3:7]):
        with pytest.raises(ArgumentError, match=r"^new_page_table: got memory that page_table lies in too"):
            launch(scene, "reorder", parents, **given | {"new_page_table": array})
    scene = scene_of(SETS["moving_int8_own_table"], replace(PLAIN, totals=(9, 10), new=(0,) * 2))
    fresh = fresh_of(scene)
    given = {"fresh": fresh["page_table"], "fresh_scales": fresh["scales_page_table"]}
    scene.tables["scales_page_table"] = scene.tables["page_table"].copy()
    given |= {f"new_{n}": scene.tables["scales_page_table"] for n in ("page_table", "scales_page_table")}
    with pytest.raises(ArgumentError, match=r"^new_page_table: got memory that scales_page_table lies in too"):
        launch(scene, "reorder", parents_of(scene, [1, 0]), **given)


def test_sums_are_not_written_over_the_rows() -> None:
    """row_offsets too names memory that it must not write to."""
    cache = presets.max_paged(dtype="f16", kv_heads=2, head_dim=64, page_size=16)
    made = package(KernelSet(name="summed", q_heads=2, cache=cache, ops=(ops.RowOffsets(),)))
    lengths, counts = np.zeros(2, np.uint32), np.zeros(4, np.uint32)
    pool, table = np.zeros((1, 2, 1, 16, 2, 64), np.float16), np.zeros((2, 1), np.uint32)
    layer = made.Cache(pool, lengths=lengths, page_table=table)[0]
    with pytest.raises(ArgumentError, match=r"^out: got memory that row_offsets lies in too"):
        made.row_offsets(layer, counts[:3], row_offsets=counts[1:])
    with pytest.raises(ArgumentError, match=r"^out: got memory that lengths lies in too"):
        made.row_offsets(made.Cache(pool, lengths=counts[2:], page_table=table)[0], counts[:3])


def test_fresh_pages_that_repeat() -> None:
    """Two requests are given one free page: it has the bytes of one of the sources in every 16; other pages are as they were."""
    scene = scene_of(SETS["moving_dense"], replace(PLAIN, totals=(17, 20, 7, 9), new=(0,) * 4))
    fresh, tables = fresh_of(scene), new_tables(scene)
    fresh["page_table"][...] = fresh["page_table"][0]
    before = scene.arrays()["pool"].copy()
    launch(
        scene,
        "reorder",
        parents_of(scene, [0, 0, 2, 2]),
        fresh=fresh["page_table"],
        new_page_table=tables["page_table"][0],
        mode="fast",
    )
    after, page = scene.arrays()["pool"], int(fresh["page_table"][0])
    others = [i for i in range(scene.pages) if i != page]
    assert after[others].tobytes() == before[others].tobytes()
    mine = np.frombuffer(after[page].tobytes(), np.uint8).reshape(-1, 16)
    sources = [before[int(scene.tables["page_table"][b, p])] for b, p in ((0, 1), (2, 0))]
    same = [(np.frombuffer(s.tobytes(), np.uint8).reshape(-1, 16) == mine).all(axis=1) for s in sources]
    assert np.any(same, axis=0).all()


CSR = presets.flashinfer_hnd(dtype="bf16", kv_heads=2, head_dim=64, page_size=16)
KIVI = presets.kivi(dtype="f16", kv_heads=2, head_dim=24, page_size=16, group_size=8)


@pytest.mark.parametrize(("cache", "why"), [(CSR, "ToDense"), (KIVI, "residual")], ids=["csr", "kivi"])
def test_refused(cache: Cache, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        KernelSet(name="refused", q_heads=2, cache=cache, ops=(ops.Reorder(),))
