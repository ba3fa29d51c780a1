"""Places in the pool: slot_mapping and remap_indices, run and compared with their oracles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from kvgen import KernelSet, Quant, ops
from kvgen.reference import remap_indices, slot_mapping
from kvgen.runtime import describe
from kvgen.schema.cache import Cache
from kvgen.schema.kernel_set import Op
from tests.support.batches import PLAIN
from tests.support.cache_matrix import CHOSEN, chosen
from tests.support.harness import index_name, offsets_of, surroundings
from tests.support.memory import CANARY, Raw, rows_array
from tests.support.scenes import Scene
from tests.support.step_lengths import go, hold, vector

STORED = (
    "dense",
    "kv_inside",
    "ring",
    "continuous_open",
    "indirect",
    "mapped",
)  # append by slots stores where slot_mapping says


def operations(cache: Cache) -> Sequence[Op]:
    found: list[Op] = [ops.SlotMapping(), ops.RemapIndices(index_dtype="i64")]
    if any(cache is CHOSEN[name] for name in NARROW):
        found.append(ops.SlotMapping(name="slots32", slots_dtype="i32"))
    if any(cache is CHOSEN[name] for name in STORED):
        found.append(ops.Append(name="append_slots", rows="slots"))
    return found


AXES: Final = "page layer token head dim"


BYTES: Final = Quant(dtype="e4m3")


# Every form of table but PerKV, which has no slots; known and unknown sizes of a page.
NARROW = ("flashinfer", "indirect")


SETS = chosen("slots", operations, ("dense", "hnd", "kv_inside", "ring", "continuous_open", "mapped", *NARROW))


STORING = {f"slots_{name}": SETS[f"slots_{name}"] for name in STORED}


def check_slots(scene: Scene, op: str, rows: int, offsets: Raw) -> tuple[int, Raw]:
    """Slots of so many rows against the oracle; the error word and the slots."""
    slots = vector(rows, "i32" if op == "slots32" else "i64")
    wanted = slots[0].copy()
    word = slot_mapping(scene.view, offsets, wanted)
    found = go(scene, op, row_offsets=offsets, slots=slots[0])
    hold(slots, wanted)
    assert not scene.batch.errors or found == word, f"{describe(found)}, not {describe(word)}"
    return word, wanted


def check_remap(scene: Scene, indices: Raw, offsets: Raw, *, in_place: bool = False) -> tuple[int, Raw]:
    """Rows in the pool of these tokens against the oracle; the error word and the rows."""
    given, _ = rows_array(len(indices), indices.shape[1:], "i32", strided=scene.batch.strided)
    given[...] = indices
    out, around = rows_array(len(indices), indices.shape[1:], "i32", strided=not scene.batch.strided)
    wanted = out.copy()
    word = remap_indices(scene.view, offsets, indices, wanted)
    found = go(scene, "remap_indices", indices=given, row_offsets=offsets, out=given if in_place else out)
    np.testing.assert_array_equal(given if in_place else out, wanted)
    assert in_place or (surroundings(out, around) == CANARY).all(), "written beside the rows"
    assert not scene.batch.errors or found == word, f"{describe(found)}, not {describe(word)}"
    return word, wanted


def picks(scene: Scene, rows: Sequence[int], width: int) -> Raw:
    """Tokens at random of each row's request, some of them -1."""
    found = np.full((len(rows), width), -1)
    for row, b in enumerate(rows):
        count = scene.batch.totals[b] if b >= 0 else 9
        if count:
            found[row] = scene.rng.integers(0, count, width)
    found[scene.rng.random(found.shape) < 0.2] = -1
    return found.astype(np.int32)


def wide(name: str, requests: int, width: int) -> tuple[Scene, Raw, Raw]:
    """A decode step of many requests with random tables: the scene, its offsets, and picks."""
    rng = np.random.default_rng(requests)
    scene = Scene(SETS[name], PLAIN, ())
    pages, tokens = 5, scene.tokens
    scene.batch = replace(PLAIN, totals=(pages * tokens,) * requests, new=(1,) * requests)
    scene.tables["lengths"] = rng.integers(0, pages * tokens - 1, requests).astype(scene.tables["lengths"].dtype)
    scene.tables["page_table"] = rng.integers(0, 2, (requests, pages)).astype(scene.tables["page_table"].dtype)
    indices = rng.integers(-1, pages * tokens, (requests, width)).astype(np.int32)
    return scene, offsets_of([1] * requests, "i64"), indices


BATCH = replace(PLAIN, totals=(7, 12, 5), new=(2, 3, 1), padding=1)


def spoilt(array: Raw, at: Any, value: int) -> Raw:
    found = array.copy()
    found[at] = np.array(value, np.int64).astype(array.dtype)
    return found


def checked(scene: Scene, offsets: Raw, indices: Raw | None = None) -> list[int]:
    """Both operations on a scene; their error words."""
    chosen_tokens = picks(scene, (0, 0, 1, 1, 1, 2, -1), 9) if indices is None else indices
    words = [check_slots(scene, "slot_mapping", 7, offsets.astype(good_offsets(scene.kernels).dtype))[0]]
    return [*words, check_remap(scene, chosen_tokens, offsets)[0]]


def good_offsets(kernels: KernelSet) -> Raw:
    return offsets_of(BATCH.new, index_name(kernels, "slot_mapping"))
