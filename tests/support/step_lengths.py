"""Batches whose lengths are counted: row_offsets and advance, run and compared with their oracles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvgen import CSR, KernelSet, ops
from kvgen.layout.dtypes import dtype
from kvgen.reference import advance, row_offsets
from kvgen.runtime import describe
from kvgen.schema.cache import Cache
from kvgen.schema.kernel_set import Op
from tests.support.batches import PLAIN, Batch
from tests.support.cache_matrix import chosen
from tests.support.harness import Run, hold_memory, index_name, package
from tests.support.memory import CANARY, Raw, rows_array
from tests.support.scenes import Scene


def operations(cache: Cache) -> Sequence[Op]:
    table = cache.page_table
    if isinstance(table, CSR) and table.last_page_len:
        return (ops.RowOffsets(),)
    return (ops.RowOffsets(), ops.Advance(), ops.Advance(name="accept", counts="new_tokens", index_dtype="i32"))


SETS = chosen("lengths", operations, ("dense", "hnd", "flashinfer", "ring", "continuous"))


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


MANY = (1, 511, 512, 1100)  # requests, around the threads of a block


def bad(array: Raw, at: int, value: int) -> Raw:
    """A copy with one entry as its type makes it of `value`."""
    found = array.copy()
    found[at] = np.array(value, np.int64).astype(array.dtype)
    return found


BATCH = replace(PLAIN, totals=(7, 12, 5), new=(2, 3, 1))


BAD_OFFSETS = {"decrease": (2, 0), "first_too_large": (0, 90), "past_the_next": (1, 6), "last_decreases": (3, 4)}
