"""to_dense and to_csr: every entry against the oracle, memory around the outputs untouched, bad data reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import CSR, Dense, Indirect, KernelSet, ops
from kvgen.layout.dtypes import dtype
from kvgen.reference import to_csr, to_dense
from kvgen.runtime import Fault, describe
from kvgen.runtime.cpu import machine
from kvgen.spec.cache import Cache, Continuous
from kvgen.spec.kernel_set import Op
from tests.ops.batches import PLAIN, batches
from tests.ops.chosen import CHOSEN, chosen
from tests.ops.harness import index_name, offsets_of, package, surroundings
from tests.ops.memory import CANARY, Raw, rows_array
from tests.ops.scenes import Scene
from tests.ops.test_lengths import go, hold, scene_of, vector


def _operations(cache: Cache) -> Sequence[Op] | None:
    found: list[Op] = []
    both = any(cache is CHOSEN[name] for name in BOTH)
    if isinstance(cache.page_table, CSR | Indirect):
        found += [ops.ToDense(), ops.ToDense(name="signed", table_dtype="i64", fill=-1)][: 1 + both]
    if isinstance(cache.page_table, Dense | Indirect) and not isinstance(cache, Continuous):
        found += [ops.ToCsr(), ops.ToCsr(name="wide", table_dtype="i64", fill=-1)][: 1 + both]
    return found or None


# Whose tables come in another type with another null entry too.
BOTH = ("kv_inside", "indirect", "dense")


# CSR of both kinds, with and without a multiplier; slots; dense tables of both kinds, and one beside a table of scales.
SETS = chosen("lists", _operations, ("kv_inside", "flashinfer", "indirect", "dense", "hnd", "int8_own_table"))
TO_DENSE = [name for name, kernels in SETS.items() if any(isinstance(o, ops.ToDense) for o in kernels.ops)]
TO_CSR = [name for name, kernels in SETS.items() if any(isinstance(o, ops.ToCsr) for o in kernels.ops)]
FILLS = {"to_dense": None, "signed": -1, "to_csr": None, "wide": -1}
KINDS = {"to_dense": "u32", "signed": "i64", "to_csr": "i32", "wide": "i64"}


def _steps(kernels: KernelSet, offsets: Raw | None) -> dict[str, Raw | None]:
    """The argument that says how many new tokens there are, where the operation takes one."""
    return {} if isinstance(kernels.cache.page_table, CSR) else {"row_offsets": offsets}


def check_to_dense(scene: Scene, op: str, columns: int, offsets: Raw | None) -> int:
    """A table of so many columns against the oracle; the error word."""
    requests = len(scene.batch.totals)
    out, around = rows_array(requests, (columns,), KINDS[op], strided=scene.batch.strided)
    steps, extra = _steps(scene.kernels, offsets), {}
    wanted, wanted_lengths = out.copy(), None
    if "last_page_len" in scene.tables:
        extra["lengths"] = vector(requests, scene.cache.lengths_dtype)
        wanted_lengths = extra["lengths"][0].copy()
    word = to_dense(scene.view, wanted, fill=FILLS[op], lengths=wanted_lengths, **steps)
    found = go(scene, op, page_table=out, **steps, **{name: array for name, (array, _) in extra.items()})
    np.testing.assert_array_equal(out, wanted)
    assert (surroundings(out, around) == CANARY).all(), "written beside the table"
    for array in extra.values():
        hold(array, wanted_lengths)
    assert not scene.batch.errors or found == word, f"{describe(found)}, not {describe(word)}"
    return word


def check_to_csr(scene: Scene, op: str, room: int, offsets: Raw | None, *, last: bool = True) -> tuple[int, list[Raw]]:
    """Lists with room for so many ids against the oracle; the error word and the lists."""
    requests = len(scene.batch.totals)
    arrays = {"page_indices": vector(room, KINDS[op]), "page_indptr": vector(requests + 1, KINDS[op])}
    if last:
        arrays["last_page_len"] = vector(requests, KINDS[op])
    wanted = [array.copy() for array, _ in arrays.values()]
    word = to_csr(scene.view, *wanted, fill=FILLS[op], row_offsets=offsets)
    found = go(scene, op, **{name: array for name, (array, _) in arrays.items()}, row_offsets=offsets)
    for pair, right in zip(arrays.values(), wanted, strict=True):
        hold(pair, right)
    assert not scene.batch.errors or found == word, f"{describe(found)}, not {describe(word)}"
    return word, wanted


def _having(kernels: KernelSet, *names: str) -> list[str]:
    """Those of the operations that the set has."""
    return [op.name for op in kernels.ops if op.name in names]


@pytest.mark.parametrize("name", TO_DENSE)
@settings(max_examples=5)
@given(data=st.data())
def test_to_dense(name: str, data: Any) -> None:
    """Tables as wide as needed, wider, and too narrow."""
    kernels = SETS[name]
    batch = data.draw(batches(kernels))
    scene = scene_of(kernels, batch)
    offsets = offsets_of(batch.new, index_name(kernels, "to_dense"), batch.leading)
    pages = max(map(len, scene.entries), default=0)
    columns = data.draw(st.sampled_from((pages, pages + 3, max(pages - 1, 0))))
    word = check_to_dense(scene, data.draw(st.sampled_from(_having(kernels, "to_dense", "signed"))), columns, offsets)
    assert (describe(word) is None) == (columns >= pages)


@pytest.mark.parametrize("name", TO_CSR)
@settings(max_examples=5)
@given(data=st.data())
def test_to_csr(name: str, data: Any) -> None:
    """Lists with just the room, with more, and with too little."""
    kernels = SETS[name]
    batch = data.draw(batches(kernels))
    scene = scene_of(kernels, batch)
    offsets = offsets_of(batch.new, index_name(kernels, "to_csr"), batch.leading)
    pages = sum(map(len, scene.entries))
    room = data.draw(st.sampled_from((pages, pages + 5, max(pages - 1, 0))))
    op, last = data.draw(st.sampled_from(_having(kernels, "to_csr", "wide"))), data.draw(st.booleans())
    word, lists = check_to_csr(scene, op, room, offsets, last=last)
    assert (describe(word) is None) == (room >= pages)
    if room >= pages and op == "to_csr":
        assert lists[0][:pages].tolist() == [page[0] for request in scene.entries for page in request]
    if kernels.cache.lengths == "before":
        check_to_csr(scene, op, room, None)


@pytest.mark.parametrize("op", ["to_dense", "to_csr"])
def test_there_and_back(op: str) -> None:
    """A request's pages in the other form say the same tokens."""
    batch = replace(PLAIN, totals=(0, 33, 16, 1), new=(0, 1, 2, 1))
    scene = scene_of(SETS["lists_flashinfer" if op == "to_dense" else "lists_dense"], batch)
    offsets = offsets_of(batch.new, "u32")
    if op == "to_csr":
        _, (indices, indptr, last) = check_to_csr(scene, op, 7, offsets)
        assert indptr.tolist() == [0, 0, 3, 4, 5] and last.tolist() == [0, 1, 16, 1]
        assert indices[:5].tolist() == [page[0] for request in scene.entries for page in request]
    else:
        check_to_dense(scene, op, 4, None)
        out, lengths = np.zeros((4, 4), np.uint32), np.zeros(4, np.int32)
        go(scene, op, page_table=out, lengths=lengths)
        assert lengths.tolist() == [0, 33, 16, 1]
        assert out.tolist() == [[p[0] for p in pages] + [scene.pages] * (4 - len(pages)) for pages in scene.entries]


def _long(name: str, requests: int, pages: int, counts: Sequence[int] | None = None) -> tuple[Scene, Raw]:
    """A scene of many requests with up to so many pages each, and how many each has."""
    rng = np.random.default_rng(requests)
    scene = Scene(SETS[name], PLAIN, ())
    counts = rng.integers(0, pages + 1, requests) if counts is None else np.array(counts)
    scene.batch = replace(PLAIN, totals=tuple(int(n) * scene.tokens for n in counts), new=(0,) * requests)
    table = scene.cache.page_table.dtype
    if isinstance(scene.cache.page_table, CSR):
        indptr = np.cumsum([0, *counts])
        scene.tables["page_indptr"] = indptr.astype(dtype(table).numpy())
        scene.tables["page_indices"] = rng.integers(0, 2, indptr[-1]).astype(dtype(table).numpy())
        scene.tables["last_page_len"] = np.full(requests, scene.tokens, dtype(table).numpy())
    else:
        scene.tables["lengths"] = (counts * scene.tokens).astype(dtype(scene.cache.lengths_dtype).numpy())
        scene.tables["page_table"] = rng.integers(0, 2, (requests, pages)).astype(dtype(table).numpy())
    return scene, counts


@pytest.mark.parametrize(("requests", "pages"), [(1, 1700), (9, 600), (9, 512), (1030, 3)])
def test_many_pages_in_one_launch(requests: int, pages: int) -> None:
    """Requests that several warps share, and batches that several blocks do."""
    scene, counts = _long("lists_dense", requests, pages)
    _, (indices, indptr, _) = check_to_csr(scene, "to_csr", int(counts.sum()), None)
    table = scene.tables["page_table"]
    np.testing.assert_array_equal(indptr, np.cumsum([0, *counts]))
    np.testing.assert_array_equal(indices, np.concatenate([row[:n] for row, n in zip(table, counts, strict=True)]))
    scene, _ = _long("lists_flashinfer", requests, pages)
    check_to_dense(scene, "to_dense", pages + 1, None)


@pytest.mark.parametrize("counts", [(3, 512), (8, 512), (1, 505), (7, 1024), (5, 0)])
def test_the_last_ids_of_a_warp(counts: tuple[int, ...]) -> None:
    """Slices that begin inside a sector, whose last ids are the next warp's."""
    scene, _ = _long("lists_dense", 2, max(counts), counts)
    for op in ("to_csr", "wide"):
        _, (indices, _, _) = check_to_csr(scene, op, sum(counts), None)
        assert indices.tolist() == [
            int(x) for row, n in zip(scene.tables["page_table"], counts, strict=True) for x in row[:n]
        ]


def test_one_launch_each() -> None:
    batch = replace(PLAIN, totals=(20, 3), new=(1, 1))
    for name, op in (("lists_dense", "to_csr"), ("lists_flashinfer", "to_dense"), ("lists_indirect", "to_csr")):
        scene = scene_of(SETS[name], batch)
        outs = {
            "to_csr": {"page_indices": np.zeros(40, np.int32), "page_indptr": np.zeros(3, np.int32)},
            "to_dense": {"page_table": np.zeros((2, 3), np.uint32)},
        }[op]
        with machine(mode="check") as log:
            getattr(package(scene.kernels), op)(package(scene.kernels).Cache(**scene.arguments())[0], **outs)
        assert [done.entry for done in log.launches] == [f"{name}_{op}"]


def test_sectors() -> None:
    """A list is written a sector once, whatever lies where, but where slices meet; rows of a table so too."""
    scene, counts = _long("lists_dense", 16, 1700)
    total = int(counts.sum())
    lists = [vector(total, "i32")[0], np.zeros(17, np.int32)]
    with machine(mode="check") as log:
        package(scene.kernels).to_csr(package(scene.kernels).Cache(**scene.arguments())[0], *lists)
    found = log.launches[0].counters.per_buffer
    # The counters take a lane's n-th store at a place with the other lanes' n-th: one that sits out the first is a trip late.
    assert found["page_indices"].store_sectors <= 1.02 * (-(-total * 4 // 32) + 16)
    assert found["page_table"].load_sectors <= 1.25 * total * 4 / 32 + 2 * 16  # the list's sectors are not the table's
    scene, counts = _long("lists_flashinfer", 16, 1700)
    out = rows_array(16, (1704,), "u32", strided=False)[0]
    with machine(mode="check") as log:
        package(scene.kernels).to_dense(package(scene.kernels).Cache(**scene.arguments())[0], out)
    assert log.launches[0].counters.per_buffer["page_table"].store_sectors == out.nbytes // 32


def test_nobody() -> None:
    """Of an empty batch to_csr writes where its first request would begin; to_dense has nothing to write."""
    check_to_csr(scene_of(SETS["lists_dense"], PLAIN), "to_csr", 0, None)
    check_to_dense(scene_of(SETS["lists_flashinfer"], PLAIN), "to_dense", 3, None)
    check_to_dense(scene_of(SETS["lists_flashinfer"], replace(PLAIN, totals=(3,), new=(1,))), "to_dense", 0, None)


# Bad data ----------------------------------------------------------------------------------------------------------------

BATCH = replace(PLAIN, totals=(7, 20, 5), new=(2, 3, 1))


def _spoil(scene: Scene, name: str, at: Any, value: int) -> None:
    array = scene.tables[name] = scene.tables[name].copy()
    array[at] = np.array(value, np.int64).astype(array.dtype)


@pytest.mark.parametrize("value", [-1, 2**31 - 1, "pages"])
@pytest.mark.parametrize("name", SETS)
def test_bad_ids(name: str, value: int | str) -> None:
    """Ids outside the pool become the null entry, and are reported by request and token."""
    scene = scene_of(SETS[name], BATCH)
    multiplier = scene.cache.page_table.id_multiplier
    number = -(-scene.pages // multiplier) if isinstance(value, str) else value
    if "page_indices" in scene.tables:
        _spoil(scene, "page_indices", int(scene.tables["page_indptr"][1]) + 1, number)
    elif "req_to_token" in scene.tables:
        _spoil(scene, "req_to_token", (int(scene.tables["request_ids"][1]), 1), number)
    else:
        _spoil(scene, "page_table", (1, 1), number)
    offsets = offsets_of(BATCH.new, scene.cache.lengths_dtype)
    words = [check_to_dense(scene, "to_dense", 21, offsets)] if name in TO_DENSE else []
    words += [check_to_csr(scene, "to_csr", 40, offsets)[0]] if name in TO_CSR else []
    for report in map(describe, words):
        assert report is not None
        assert (report.code, report.request, report.position) == (Fault.PAGE_ID, 1, scene.tokens)


@pytest.mark.parametrize("value", [-1, 2**31 - 1, 500, 21_000])
@pytest.mark.parametrize("name", TO_CSR)
def test_bad_lengths(name: str, value: int) -> None:
    """A length that the table has no pages for: the request has none, the others all of theirs."""
    scene = scene_of(SETS[name], BATCH)
    _spoil(scene, "lengths", 1, value)
    offsets = offsets_of(BATCH.new, scene.cache.lengths_dtype)
    words = [check_to_csr(scene, "to_csr", 40, offsets)[0]]
    words += [check_to_dense(scene, "to_dense", 21, offsets)] if name in TO_DENSE else []
    for report in map(describe, words):
        assert report is not None and (report.code, report.request) == (Fault.LENGTH, 1)


@pytest.mark.parametrize("at", [0, 1, 2, 3])
@pytest.mark.parametrize("value", [-1, 0, 3, 2**31 - 1])
def test_bad_slices(at: int, value: int) -> None:
    """Slices that decrease or leave the list."""
    for name in ("lists_flashinfer", "lists_kv_inside"):
        scene = scene_of(SETS[name], BATCH)
        _spoil(scene, "page_indptr", at, value)
        check_to_dense(scene, "to_dense", 4, None)


@pytest.mark.parametrize("value", [-1, 2**31 - 1])
def test_bad_last_page(value: int) -> None:
    scene = scene_of(SETS["lists_flashinfer"], BATCH)
    _spoil(scene, "last_page_len", 1, value)
    report = describe(check_to_dense(scene, "to_dense", 3, None))
    assert report is not None and (report.code, report.request) == (Fault.LENGTH, 1)


@pytest.mark.parametrize("value", [-1, 2**31 - 1, 3])
def test_bad_requests(value: int) -> None:
    """Rows of req_to_token that are none, or another request's."""
    scene = scene_of(SETS["lists_indirect"], BATCH)
    _spoil(scene, "request_ids", 1, value)
    offsets = offsets_of(BATCH.new, scene.cache.lengths_dtype)
    check_to_csr(scene, "to_csr", 40, offsets)
    check_to_dense(scene, "to_dense", 21, offsets)


@pytest.mark.parametrize(("at", "value"), [(2, 0), (0, 90), (1, 6), (3, 2), (2, -1)])
def test_bad_offsets(at: int, value: int) -> None:
    for name in TO_CSR:
        scene = scene_of(SETS[name], BATCH)
        offsets = offsets_of(BATCH.new, scene.cache.lengths_dtype)
        offsets[at] = np.array(value, np.int64).astype(offsets.dtype)
        report = describe(check_to_csr(scene, "to_csr", 40, offsets)[0])
        assert report is not None and report.code is Fault.ROW_OFFSETS
