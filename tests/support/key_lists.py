"""Lists of keys: list_keys, combine_lists and remap_indices with counts, run and compared with their oracles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np

from kvgen import KernelSet, Latent, Paged, Ring, ops
from kvgen.reference import combine_lists, list_keys, remap_indices
from kvgen.runtime import describe
from tests.support.batches import PLAIN, Batch
from tests.support.harness import offsets_of, surroundings
from tests.support.memory import CANARY, Raw, rows_array
from tests.support.scenes import Scene
from tests.support.step_lengths import go, hold, scene_of, vector

ENTRIES: Final = KernelSet(
    name="lists_of_entries",
    q_heads=1,
    cache=Latent(dtype="bf16", latent_dim=8, rope_dim=8, page_size=3, rate=4, lengths="after"),
    ops=[
        ops.ListKeys(),
        ops.RemapIndices(counts=True, unseen="drop"),
        ops.RemapIndices(name="remap_candidates", candidates=4, counts=True, unseen="drop"),
        ops.RemapIndices(name="remap_blocks", candidates=2),
        ops.CombineLists(window=7),
    ],
    arch=["sm_90a"],
)
EVERY: Final = KernelSet(
    name="lists_of_every_token",
    q_heads=1,
    cache=Paged(dtype="f16", kv_heads=1, head_dim=8, page_size=3, lengths="after", lengths_dtype="u32"),
    ops=[ops.CombineLists(window=7, entries="all", begins_dtype="i32")],
    arch=["sm_90a"],
)
RING: Final = KernelSet(
    name="lists_of_a_ring",
    q_heads=1,
    cache=Paged(dtype="f16", kv_heads=1, head_dim=8, page_size=3, table=Ring(window=10, dtype="i64")),
    ops=[ops.ListKeys(window=10, index_dtype="i64")],
    arch=["sm_90a"],
)
BATCH: Final = replace(PLAIN, totals=(27, 40, 13), new=(5, 9, 2), padding=1)


def step(kernels: KernelSet, batch: Batch) -> tuple[Scene, Raw, int]:
    """A scene, the offsets of its rows, and how many rows there are."""
    scene = scene_of(kernels, batch)
    kind = "i64" if kernels is RING else kernels.kv.lengths_dtype
    return scene, offsets_of(batch.new, kind, batch.leading), batch.leading + sum(batch.new) + batch.padding


class Lists:
    """The outputs of one call, `[rows, width]` and `[rows]`, in memory full of canaries; and the oracle's, full of rubbish."""

    def __init__(self, scene: Scene, rows: int, width: int) -> None:
        self.scene = scene
        self.keys, self._around = rows_array(rows, (width,), "i32", strided=scene.batch.strided)
        self.counts = vector(rows, "i32")
        self.wanted, self.wanted_counts = np.full((rows, width), 77, np.int32), np.full(rows, 77, np.int32)

    def hold(self, word: int, wanted_word: int) -> None:
        """Both are as the oracle's, and nothing beside them is written."""
        np.testing.assert_array_equal(self.keys, self.wanted)
        assert (surroundings(self.keys, self._around) == CANARY).all(), "written beside the lists"
        hold(self.counts, self.wanted_counts)
        assert not self.scene.batch.errors or word == wanted_word, f"{describe(word)}, not {describe(wanted_word)}"


def check_list_keys(scene: Scene, rows: int, offsets: Raw, width: int) -> tuple[int, Raw, Raw]:
    """list_keys against the oracle; the error word, the lists, the counts."""
    lists, (op,) = Lists(scene, rows, width), (o for o in scene.kernels.ops if isinstance(o, ops.ListKeys))
    wanted = list_keys(scene.view, offsets, lists.wanted, lists.wanted_counts, op.window)
    lists.hold(go(scene, "list_keys", row_offsets=offsets, keys=lists.keys, counts=lists.counts[0]), wanted)
    return wanted, lists.wanted, lists.wanted_counts


def check_counted(scene: Scene, offsets: Raw, indices: Raw) -> tuple[int, Raw, Raw]:
    """remap_indices with counts against the oracle."""
    lists = Lists(scene, *indices.shape)
    given, _ = rows_array(len(indices), indices.shape[1:], "i32", strided=not scene.batch.strided)
    given[...] = indices
    wanted = remap_indices(scene.view, offsets, indices, lists.wanted, counts=lists.wanted_counts, drop_unseen=True)
    arguments: dict[str, Any] = {"indices": given, "row_offsets": offsets, "out": lists.keys}
    lists.hold(go(scene, "remap_indices", **arguments, counts=lists.counts[0]), wanted)
    return wanted, lists.wanted, lists.wanted_counts


def check_listed(scene: Scene, offsets: Raw, indices: Raw, lists: Raw, *, counted: bool) -> tuple[int, Raw, Raw]:
    """remap_indices of columns of lists of blocks against the oracle, with counts and without."""
    name = "remap_candidates" if counted else "remap_blocks"
    (block,) = (op.candidates for op in scene.kernels.ops if isinstance(op, ops.RemapIndices) and op.name == name)
    held = Lists(scene, *indices.shape)
    given, _ = rows_array(len(indices), indices.shape[1:], "i32", strided=not scene.batch.strided)
    candidates, _ = rows_array(len(lists), lists.shape[1:], "i32", strided=scene.batch.strided)
    given[...], candidates[...] = indices, lists
    counts = {"counts": held.wanted_counts} if counted else {}
    wanted = remap_indices(
        *(scene.view, offsets, indices, held.wanted), **counts, drop_unseen=counted, candidates=lists, block=block or 1
    )
    arguments: dict[str, Any] = {"indices": given, "row_offsets": offsets, "out": held.keys, "candidates": candidates}
    if counted:
        arguments["counts"] = held.counts[0]
    else:
        held.wanted_counts[...] = held.counts[0]
    held.hold(go(scene, name, **arguments), wanted)
    return wanted, held.wanted, held.wanted_counts


def check_combined(
    scene: Scene,
    offsets: Raw,
    indices: Raw | None,
    begins: tuple[Raw, Raw],
    buffer_rows: int,
    width: int,
    rows: int = 0,
) -> tuple[int, Raw, Raw]:
    """combine_lists against the oracle; without `indices` each of `rows` rows has all entries that it sees."""
    lists = Lists(scene, rows if indices is None else len(indices), width)
    wanted = combine_lists(
        *(scene.view, offsets, *begins, buffer_rows, lists.wanted, lists.wanted_counts), window=7, indices=indices
    )
    places = {"entries_begin": begins[0], "tokens_begin": begins[1], "buffer_rows": buffer_rows}
    arguments: dict[str, Any] = {"row_offsets": offsets, "keys": lists.keys}
    arguments |= {} if indices is None else {"indices": indices}
    lists.hold(go(scene, "combine_lists", **arguments, **places, counts=lists.counts[0]), wanted)
    return wanted, lists.wanted, lists.wanted_counts
