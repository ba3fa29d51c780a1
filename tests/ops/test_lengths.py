"""row_offsets and advance: every sum and every length against the oracle, memory around them untouched, bad data reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import CSR, KernelSet, ops
from kvgen.layout.dtypes import dtype
from kvgen.reference import advance, row_offsets
from kvgen.runtime import Fault, describe
from kvgen.runtime.cpu import machine
from kvgen.spec.cache import Cache
from kvgen.spec.kernel_set import Op
from tests.ops.batches import PLAIN, Batch, batches
from tests.ops.chosen import chosen
from tests.ops.harness import Run, hold_memory, index_name, offsets_of, package
from tests.ops.memory import CANARY, Raw, rows_array
from tests.ops.scenes import Scene


def _operations(cache: Cache) -> Sequence[Op]:
    table = cache.page_table
    if isinstance(table, CSR) and table.last_page_len:
        return (ops.RowOffsets(),)
    return (ops.RowOffsets(), ops.Advance(), ops.Advance(name="accept", counts="new_tokens", index_dtype="i32"))


SETS = chosen("lengths", _operations, ("dense", "hnd", "flashinfer", "ring", "continuous"))
ADVANCED = [name for name, kernels in SETS.items() if len(kernels.ops) > 1]


def vector(size: int, kind: str) -> tuple[Raw, Raw]:
    """An array of `size` numbers and all memory around it: canaries."""
    array, memory = rows_array(1, (size,), kind, strided=False, guard=8)
    return array[0], memory


def hold(found: tuple[Raw, Raw], wanted: Raw) -> None:
    """The array is as wanted, and the memory around it as it was; gaps between rows too."""
    array, memory = found
    np.testing.assert_array_equal(array, wanted)
    array.view(np.uint8)[...] = CANARY
    assert (memory == CANARY).all(), "written beside the array"


def scene_of(kernels: KernelSet, batch: Batch) -> Scene:
    """A scene whose lengths say what they must for the step's new tokens."""
    before = [n - new for n, new in zip(batch.totals, batch.new, strict=True)]
    return Scene(kernels, batch, batch.totals if kernels.cache.lengths == "after" else before)


def go(scene: Scene, name: str, **arguments: Any) -> int:
    """Run an operation once, one launch; its error word. Nothing of the cache's memory changes."""
    pool = scene.snapshot()
    call: Callable[..., None] = getattr(package(scene.kernels), name)
    run = Run(scene, name, call, **arguments)
    hold_memory(scene, pool)
    return run.word


def check_row_offsets(scene: Scene, offsets: Raw | None) -> int:
    """row_offsets of a scene against the oracle; its error word."""
    kind = index_name(scene.kernels, "row_offsets")
    wanted, word = row_offsets(scene.view, dtype(kind).numpy(), offsets)
    out = vector(len(scene.batch.totals) + 1, kind)
    found = go(scene, "row_offsets", out=out[0], row_offsets=offsets)
    hold(out, wanted)
    assert not scene.batch.errors or found == word, f"{describe(found)}, not {describe(word)}"
    return word


def check_advance(scene: Scene, name: str, counts: Raw | None, *, in_place: bool = False) -> int:
    """advance of a scene against the oracle; its error word."""
    argument = {"new_tokens" if name == "accept" else "row_offsets": counts}
    wanted, word = advance(scene.view, **argument)
    out = vector(len(wanted), scene.cache.lengths_dtype)
    if in_place:
        out[0][...] = scene.tables["lengths"]
        scene.tables["lengths"] = out[0]
    found = go(scene, name, new_lengths=out[0], **argument)
    hold(out, wanted)
    assert not scene.batch.errors or found == word, f"{describe(found)}, not {describe(word)}"
    return word


@pytest.mark.parametrize("name", SETS)
@settings(max_examples=5)
@given(data=st.data())
def test_row_offsets(name: str, data: Any) -> None:
    batch = data.draw(batches(SETS[name]))
    offsets = offsets_of(batch.new, index_name(SETS[name], "row_offsets"), batch.leading)
    assert describe(check_row_offsets(scene_of(SETS[name], batch), offsets)) is None
    if SETS[name].cache.lengths == "before":
        check_row_offsets(scene_of(SETS[name], batch), None)


@pytest.mark.parametrize("name", ADVANCED)
@settings(max_examples=5)
@given(data=st.data())
def test_advance(name: str, data: Any) -> None:
    """By offsets, by counts and by one, into another array and into the lengths themselves."""
    kernels = SETS[name]
    batch = data.draw(batches(kernels))
    offsets = offsets_of(batch.new, index_name(kernels, "advance"), batch.leading)
    check_advance(scene_of(kernels, batch), "advance", offsets, in_place=data.draw(st.booleans()))
    check_advance(scene_of(kernels, batch), "accept", np.array(batch.new, np.int32), in_place=data.draw(st.booleans()))
    check_advance(scene_of(kernels, batch), "advance", None, in_place=True)


MANY = (1, 511, 512, 1100)  # requests, around the threads of a block


@pytest.mark.parametrize("requests", MANY)
def test_many_requests(requests: int) -> None:
    """Blocks that begin in the middle of the batch, in one launch."""
    rng = np.random.default_rng(requests)
    new = rng.integers(0, 3, requests)
    scene = Scene(SETS["lengths_dense"], replace(PLAIN, totals=(1,) * 2, new=(0,) * 2), (1, 1))
    scene.batch = replace(PLAIN, totals=(1,) * requests, new=tuple(new.tolist()))
    scene.tables["lengths"] = rng.integers(0, 50, requests).astype(np.uint32)
    scene.tables["page_table"] = np.zeros((requests, 4), np.uint32)
    with machine(mode="check") as log:
        cache = package(scene.kernels).Cache(**scene.arguments())[0]
        out, lengths = np.zeros(requests + 1, np.uint32), np.zeros(requests, np.uint32)
        offsets = offsets_of(new.tolist(), "u32")
        package(scene.kernels).row_offsets(cache, out, row_offsets=offsets)
        package(scene.kernels).advance(cache, lengths, row_offsets=offsets)
    assert [done.entry for done in log.launches] == ["lengths_dense_row_offsets", "lengths_dense_advance"]
    np.testing.assert_array_equal(lengths, scene.tables["lengths"] + new)
    np.testing.assert_array_equal(out, np.cumsum([0, *lengths]))


def _bad(array: Raw, at: int, value: int) -> Raw:
    """A copy with one entry as its type makes it of `value`."""
    found = array.copy()
    found[at] = np.array(value, np.int64).astype(array.dtype)
    return found


BATCH = replace(PLAIN, totals=(7, 12, 5), new=(2, 3, 1))
BAD_OFFSETS = {"decrease": (2, 0), "first_too_large": (0, 90), "past_the_next": (1, 6), "last_decreases": (3, 4)}


@pytest.mark.parametrize("label", [*BAD_OFFSETS, "minus_one"])
@pytest.mark.parametrize("name", ["lengths_dense", "lengths_continuous", "lengths_hnd"])
def test_bad_offsets(name: str, label: str) -> None:
    """Requests next to offsets that decrease have no tokens, stay as long as they are, and are reported."""
    at, value = BAD_OFFSETS.get(label, (2, -1))
    offsets = _bad(offsets_of(BATCH.new, index_name(SETS[name], "advance")), at, value)
    for word in (
        check_row_offsets(scene_of(SETS[name], BATCH), offsets),
        check_advance(scene_of(SETS[name], BATCH), "advance", offsets),
    ):
        report = describe(word)
        assert report is not None and report.code is Fault.ROW_OFFSETS


@pytest.mark.parametrize("value", [-1, -2, 2**31 - 1, 2**31 - 3, 2**32 - 4, 2**32 - 2])
@pytest.mark.parametrize("name", ["lengths_dense", "lengths_continuous", "lengths_hnd", "lengths_ring"])
def test_bad_lengths(name: str, value: int) -> None:
    """Lengths that cannot be, that overflow with the new tokens, and sums past the largest index."""
    scene = scene_of(SETS[name], BATCH)
    scene.tables["lengths"] = _bad(scene.tables["lengths"], 1, value)
    offsets = offsets_of(BATCH.new, index_name(SETS[name], "advance"))
    for word in (check_row_offsets(scene, offsets), check_advance(scene, "advance", offsets)):
        report = describe(word)
        assert report is None or (report.code is Fault.LENGTH and report.request in (1, 2))
    if value == -1:
        report = describe(check_advance(scene, "accept", np.array([1, 1, 1], np.int32), in_place=True))
        assert report is not None and report.request == 1


@pytest.mark.parametrize("name", ["lengths_dense", "lengths_continuous"])
def test_bad_counts(name: str) -> None:
    scene = scene_of(SETS[name], BATCH)
    report = describe(check_advance(scene, "accept", np.array([1, -1, 2**31 - 1], np.int32)))
    assert report is not None and (report.code, report.request) == (Fault.LENGTH, 1)


def test_bad_page_lists() -> None:
    """Lengths that follow from lists: a slice that leaves the list, a last page that is none."""
    for key, value in (("page_indptr", -1), ("page_indptr", 10_000), ("last_page_len", -1)):
        scene = scene_of(SETS["lengths_flashinfer"], BATCH)
        scene.tables[key] = _bad(scene.tables[key], 2, value)
        assert str(describe(check_row_offsets(scene, None))).startswith("LENGTH")


def test_more_new_rows_than_tokens() -> None:
    """Lengths after the step have its rows in them."""
    scene = scene_of(SETS["lengths_hnd"], BATCH)
    report = describe(check_row_offsets(scene, np.array([0, 2, 2, 9], np.int32)))
    assert report is not None and (report.code, report.request) == (Fault.LENGTH, 2)


def test_nobody() -> None:
    """An empty batch: one sum of nothing, and no launch that could advance."""
    scene = scene_of(SETS["lengths_dense"], PLAIN)
    with machine() as log:
        cache = package(scene.kernels).Cache(**scene.arguments())[0]
        out = np.ones(1, np.uint32)
        package(scene.kernels).row_offsets(cache, out)
        package(scene.kernels).advance(cache, np.zeros(0, np.uint32))
    assert len(log.launches) == 1 and out[0] == 0
